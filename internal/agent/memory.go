// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
)

const (
	// apiPatience is how long a start waits for the API server before it goes by
	// what an earlier run knew of the cluster.
	apiPatience = 3 * time.Second
	// saveInterval lies between two looks at whether that has changed.
	saveInterval = 10 * time.Second
)

// Memory keeps a cluster over restarts, so that a node comes back to its place
// in the mesh while there is no API server to ask.
type Memory interface {
	// Load returns what was saved last; an error that is fs.ErrNotExist if there is nothing.
	Load() (mesh.Snapshot, error)
	// Save keeps s, but for its Problems. It writes only what differs.
	Save(s mesh.Snapshot) error
	// Forget removes what was saved; that there is nothing is no error.
	Forget() error
}

// noMemory is that of an agent without one.
type noMemory struct{}

func (noMemory) Load() (mesh.Snapshot, error) { return mesh.Snapshot{}, errors.ErrUnsupported }
func (noMemory) Save(mesh.Snapshot) error     { return nil }
func (noMemory) Forget() error                { return nil }

// ready returns once there is a cluster to go by: that of the API server, or
// after apiPatience one that is remembered. If it is that, the API server's
// takes its place as soon as the caches are filled, and the returned function
// waits for this.
func (a *Agent) ready(ctx context.Context) (wait func(), err error) {
	synced := make(chan error, 1)
	go func() { synced <- a.cluster.WaitForSync(ctx) }()
	patience := time.NewTimer(apiPatience)
	defer patience.Stop()
	select {
	case err := <-synced:
		return func() {}, err
	case <-patience.C:
	}
	s, err := a.cfg.Memory.Load()
	if err != nil {
		a.cfg.Log.Warn("the API server does not answer, and nothing is known from an earlier run", "error", err)
		return func() {}, <-synced
	}
	a.cfg.Log.Warn("the API server does not answer, so what an earlier run knew is gone by", "nodes", len(s.Nodes), "peers", len(s.Peers))
	s.Problems = append(s.Problems, mesh.Problem{Object: "apiserver", Err: errors.New("does not answer since the start of this agent; the nodes and peers are those of an earlier run")})
	a.remembered.Store(&s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if <-synced == nil {
			a.remembered.Store(nil)
			a.Poke()
		}
	}()
	return func() { <-done }, nil
}

// snapshot returns the cluster; live says that it is the API server's.
func (a *Agent) snapshot() (s mesh.Snapshot, live bool) {
	if s := a.remembered.Load(); s != nil {
		return *s, false
	}
	return a.cluster.Snapshot(), true
}

// remember saves what a pass went by. A failure is no failure of the pass.
func (a *Agent) remember(s mesh.Snapshot) {
	if time.Since(a.saved) < saveInterval {
		return
	}
	a.saved = time.Now()
	err := a.cfg.Memory.Save(s)
	if (err != nil) != a.saveFailed {
		if a.saveFailed = err != nil; err != nil {
			a.cfg.Log.Error("the cluster is not saved, so a restart needs the API server", "error", err)
		} else {
			a.cfg.Log.Info("the cluster is saved again")
		}
	}
}
