// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
)

const (
	// minInterval lies between the starts of two passes, so that a storm of
	// events costs a bounded number of them.
	minInterval = 100 * time.Millisecond
	// A pass that failed is tried again after minRetry, then twice that and so on up to maxRetry.
	minRetry = 250 * time.Millisecond
	maxRetry = 15 * time.Second
	// cleanUpTimeout bounds what is undone on exit.
	cleanUpTimeout = 10 * time.Second
)

// Cluster is the API server as the loop needs it.
type Cluster interface {
	// WaitForSync returns once Snapshot is complete.
	WaitForSync(ctx context.Context) error
	Snapshot() mesh.Snapshot
	// Publish writes what differs from what the API server has.
	Publish(ctx context.Context, p mesh.Publication) (changed bool, err error)
	// Withdraw removes everything that Publish writes.
	Withdraw(ctx context.Context) error
	// Warn tells those who look at an object, named as in mesh.Problem, what is
	// wrong with it. It does not wait, and the API server may never hear of it.
	Warn(object, reason, message string)
}

// Kernel is the host as the loop needs it.
type Kernel interface {
	Facts(ctx context.Context) (mesh.Facts, error)
	// Apply brings the host to s as far as it can, and returns all that failed.
	Apply(ctx context.Context, s mesh.State) error
	// CleanUp removes what Apply made; the WireGuard link only if asked.
	CleanUp(ctx context.Context, deleteLink bool) error
	// WriteCNI makes the CNI configuration name the pod CIDRs and the MTU. An
	// error that a user must mend is or wraps a mesh.Problem.
	WriteCNI(podCIDRs []netip.Prefix, mtu int) error
	// Watch calls changed when others may have changed what Apply left, or what
	// Facts reads, from when it calls started until ctx ends.
	Watch(ctx context.Context, started, changed func()) error
	// Writes counts the writes to the kernel so far.
	Writes() uint64
}

// Config is what the loop is told by flags.
type Config struct {
	NodeName string
	Key      mesh.SecretKey
	Mesh     mesh.Config
	Detect   mesh.DetectConfig
	// LeaderElection says who judges the leaders, sticky if empty.
	LeaderElection mesh.LeaderElection
	// ResyncPeriod is how often everything is looked at without any event.
	ResyncPeriod time.Duration
	// CleanUp undoes everything on exit, CleanUpLink the WireGuard link too.
	CleanUp, CleanUpLink bool
	// Memory of the cluster for a start without the API server; nil for none.
	Memory Memory
	Log    *slog.Logger
}

// Agent runs the loop of one node. Create it with New.
type Agent struct {
	cfg       Config
	publicKey mesh.PublicKey
	cluster   Cluster
	kernel    Kernel
	names     *resolver
	metrics   *metrics
	wake      chan struct{}
	status    atomic.Pointer[status]
	// remembered is what an earlier run knew, until the API server tells.
	remembered atomic.Pointer[mesh.Snapshot]
	// saved is when the Memory was last given the cluster, saveFailed whether that failed.
	saved      time.Time
	saveFailed bool
}

// status is what the last pass left for those who ask.
type status struct {
	state    mesh.State
	problems []mesh.Problem
	err      error
	// speaks says that this node tells of what is wrong with all nodes' objects.
	speaks bool
}

// New returns an Agent that is not running yet.
func New(cfg Config, cluster Cluster, kernel Kernel) (*Agent, error) {
	public, err := cfg.Key.Public()
	if err != nil {
		return nil, err
	}
	if cfg.Memory == nil {
		cfg.Memory = noMemory{}
	}
	a := &Agent{cfg: cfg, publicKey: public, cluster: cluster, kernel: kernel, wake: make(chan struct{}, 1)}
	a.names = newResolver(cfg.Log, a.Poke)
	a.metrics = newMetrics(kernel)
	a.status.Store(&status{err: errors.New("the caches are not filled yet")})
	return a, nil
}

// Poke asks for a pass soon. It never blocks and may be called from anywhere.
func (a *Agent) Poke() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// Run does passes until ctx ends, then cleans up if it is to. Nothing is
// touched before the caches are filled, or Memory tells what was in them: an
// empty cluster would cut every link.
func (a *Agent) Run(ctx context.Context) error {
	wait, err := a.ready(ctx)
	if err != nil && !ended(ctx) {
		return err
	}
	defer wait()
	if ended(ctx) {
		return nil
	}
	a.loop(ctx)
	if !a.cfg.CleanUp {
		return nil
	}
	return a.cleanUp(context.WithoutCancel(ctx))
}

func (a *Agent) loop(ctx context.Context) {
	var helpers sync.WaitGroup
	defer helpers.Wait()
	helpers.Go(func() { a.names.run(ctx) })
	helpers.Go(func() { a.watch(ctx) })
	retry := minRetry
	for {
		start := time.Now()
		wait := a.cfg.ResyncPeriod
		if a.pass(ctx) == nil {
			retry = minRetry
		} else {
			wait = min(wait, retry)
			retry = min(2*retry, maxRetry)
		}
		if !a.sleep(ctx, time.Until(start.Add(minInterval)), nil) || !a.sleep(ctx, wait, a.wake) {
			return
		}
	}
}

// watch asks for a pass when the kernel has changed. While it cannot, only the
// resync period finds that out.
func (a *Agent) watch(ctx context.Context) {
	for {
		err := a.kernel.Watch(ctx, a.Poke, a.Poke)
		if ended(ctx) {
			return
		}
		a.cfg.Log.Error("the kernel is not watched, will be tried again", "error", err)
		a.sleep(ctx, maxRetry, nil)
	}
}

// sleep returns after d or a wake; false if ctx ended.
func (a *Agent) sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-wake:
	case <-ctx.Done():
	}
	return !ended(ctx)
}

func ended(ctx context.Context) bool { return ctx.Err() != nil }

// pass looks at everything once and returns what failed in this world; bad
// inputs are problems, which only their owners can mend.
func (a *Agent) pass(ctx context.Context) error {
	start := time.Now()
	next := &status{}
	errs := a.reconcile(ctx, next)
	if ended(ctx) {
		return nil // what was cut short by the exit is no failure
	}
	next.err = errors.Join(errs...)
	previous := a.status.Swap(next)
	a.report(previous, next)
	a.metrics.pass(time.Since(start), next)
	return next.err
}

func (a *Agent) reconcile(ctx context.Context, next *status) (errs []error) {
	snapshot, live := a.snapshot()
	next.problems = slices.Clone(snapshot.Problems)
	if snapshot.Self == nil {
		// Whether the Node is late or deleted: traffic that flows is not cut over it.
		next.problems = append(next.problems, mesh.Problem{Object: "node/" + a.cfg.NodeName, Err: errors.New("is not in the cluster; want --hostname to name this host's Node object")})
		return nil
	}
	facts, err := a.kernel.Facts(ctx)
	if err != nil {
		return []error{fmt.Errorf("read this host's addresses: %w", err)}
	}
	self, problems := mesh.Detect(*snapshot.Self, facts, a.cfg.Detect)
	self.Key = a.publicKey
	next.problems = append(next.problems, problems...)
	nodes, peers := withSelf(snapshot.Nodes, self), slices.Clone(snapshot.Peers)
	a.names.resolve(nodes, peers)
	next.speaks = isFirst(nodes, a.cfg.NodeName)

	topology, problems := mesh.Compute(a.cfg.Mesh, nodes, peers, a.leaders(nodes))
	next.problems = append(next.problems, problems...)
	a.metrics.mesh(topology, a.cfg.NodeName)
	publication, taking := topology.Publication(a.cfg.NodeName)
	if taking {
		errs = a.apply(ctx, topology, facts, self, next)
	} else {
		publication = mesh.PublicationOf(a.cfg.Mesh, self)
	}
	if !live {
		return errs
	}
	a.remember(mesh.Snapshot{Nodes: nodes, Peers: peers, Self: snapshot.Self})
	if _, err := a.cluster.Publish(ctx, publication); err != nil {
		errs = append(errs, fmt.Errorf("publish node/%s: %w", a.cfg.NodeName, err))
	}
	return errs
}

func (a *Agent) leaders(nodes []mesh.Node) mesh.Leaders {
	if a.cfg.LeaderElection == mesh.LeaderElectionStatic {
		return mesh.StaticLeaders(a.cfg.Mesh.Granularity, nodes)
	}
	return mesh.StickyLeaders(a.cfg.Mesh.Granularity, nodes, a.cfg.NodeName)
}

// apply brings the host to what the topology asks of it.
func (a *Agent) apply(ctx context.Context, t *mesh.Topology, facts mesh.Facts, self mesh.Node, next *status) (errs []error) {
	state, problems, err := t.State(a.cfg.NodeName, a.cfg.Key, facts)
	if err != nil {
		return []error{err}
	}
	next.state = state
	next.problems = append(next.problems, problems...)
	if a.cfg.Mesh.ManageCNI {
		var problem mesh.Problem
		switch err := a.kernel.WriteCNI(self.PodCIDRs, state.PodMTU); {
		case errors.As(err, &problem):
			next.problems = append(next.problems, problem)
		case err != nil:
			errs = append(errs, err)
		}
	}
	if err := a.kernel.Apply(ctx, state); err != nil {
		errs = append(errs, fmt.Errorf("apply: %w", err))
	}
	return errs
}

// withSelf returns the nodes with the own one as it is now, not as it published itself.
func withSelf(nodes []mesh.Node, self mesh.Node) []mesh.Node {
	out := make([]mesh.Node, 0, len(nodes)+1)
	for _, n := range nodes {
		if n.Name != self.Name {
			out = append(out, n)
		}
	}
	return append(out, self)
}

// report logs what is new and what has gone since the last pass.
func (a *Agent) report(previous, next *status) {
	was := problemSet(previous.problems)
	is := problemSet(next.problems)
	for _, p := range next.problems {
		if _, ok := was[p.Error()]; !ok {
			a.cfg.Log.Warn("problem appeared", "object", p.Object, "field", p.Field, "error", p.Err)
			a.warn(p, next.speaks)
		}
	}
	for _, p := range previous.problems {
		if _, ok := is[p.Error()]; !ok {
			a.cfg.Log.Info("problem cleared", "object", p.Object, "field", p.Field)
		}
	}
	switch {
	case next.err != nil && (previous.err == nil || previous.err.Error() != next.err.Error()):
		a.cfg.Log.Error("pass failed in part, will be tried again", "error", next.err)
		a.cluster.Warn("node/"+a.cfg.NodeName, reasonFailed, next.err.Error())
	case next.err == nil && previous.err != nil:
		a.cfg.Log.Info("pass succeeded")
	}
}

// The reasons of Events.
const (
	reasonProblem = "KiloProblem" // an input that the mesh works around
	reasonFailed  = "KiloFailed"  // a pass that failed in part
)

// warn makes an Event of a problem, on one node of all that have it: what is
// wrong with a Node on that one, and what concerns all on the one that speaks.
func (a *Agent) warn(p mesh.Problem, speaks bool) {
	switch kind, name, _ := strings.Cut(p.Object, "/"); {
	case kind == "node" && name != a.cfg.NodeName, kind != "node" && kind != "file" && !speaks:
		return
	}
	message := p.Err.Error()
	if p.Field != "" {
		message = p.Field + ": " + message
	}
	a.cluster.Warn(p.Object, reasonProblem, message)
}

// isFirst reports whether the node is the first by name of those that have an agent.
func isFirst(nodes []mesh.Node, name string) bool {
	return !slices.ContainsFunc(nodes, func(n mesh.Node) bool { return n.Name < name && !n.Key.IsZero() })
}

func problemSet(ps []mesh.Problem) map[string]struct{} {
	set := make(map[string]struct{}, len(ps))
	for _, p := range ps {
		set[p.Error()] = struct{}{}
	}
	return set
}

// cleanUp undoes everything. The others learn first, so that they stop sending.
func (a *Agent) cleanUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanUpTimeout)
	defer cancel()
	a.cfg.Log.Info("cleaning up")
	var errs []error
	if err := a.cluster.Withdraw(ctx); err != nil {
		errs = append(errs, fmt.Errorf("withdraw the annotations of node/%s: %w", a.cfg.NodeName, err))
	}
	if err := a.kernel.CleanUp(ctx, a.cfg.CleanUpLink); err != nil {
		errs = append(errs, fmt.Errorf("clean up: %w", err))
	}
	return errors.Join(append(errs, a.cfg.Memory.Forget())...)
}
