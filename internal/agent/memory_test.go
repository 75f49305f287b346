// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"io/fs"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
)

// fakeMemory remembers in its field.
type fakeMemory struct {
	calls *calls
	s     *mesh.Snapshot
	err   error
}

func (m *fakeMemory) Load() (mesh.Snapshot, error) {
	if m.s == nil {
		return mesh.Snapshot{}, fs.ErrNotExist
	}
	return *m.s, nil
}

func (m *fakeMemory) Save(s mesh.Snapshot) error {
	m.calls.add("save")
	m.s = &s
	return m.err
}

func (m *fakeMemory) Forget() error {
	m.calls.add("forget")
	return nil
}

// startRemembering starts an agent that knows from an earlier run of node b at
// another address than the API server, which is silent until sync, tells.
func startRemembering(t *testing.T) (*fixture, *fakeMemory) {
	t.Helper()
	m := &fakeMemory{}
	f := start(t, func(f *fixture) {
		s := f.cluster.snapshot
		s.Nodes = append([]mesh.Node(nil), s.Nodes...)
		s.Nodes[1].PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.2.9.0/24")}
		m.calls, m.s = f.calls, &s
		f.cfg.Memory = m
	})
	return f, m
}

func TestAStartWithoutTheAPIServerGoesByWhatAnEarlierRunKnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := startRemembering(t)
		time.Sleep(apiPatience - time.Millisecond)
		synctest.Wait()
		wantCalls(t, f.calls.take())
		time.Sleep(time.Second)
		wantCalls(t, f.calls.take(), "apply")
		if _, state := f.get("/state"); !strings.Contains(state, "route 10.2.9.0/24") {
			t.Errorf("/state = %s, want the remembered node b", state)
		}
		if _, body := f.get("/readyz"); !strings.Contains(body, "apiserver") {
			t.Errorf("/readyz = %q, want that the API server is missing", body)
		}
		f.sync()
		time.Sleep(minInterval)
		synctest.Wait()
		wantCalls(t, f.calls.take(), "apply", "save", "publish")
		if len(m.s.Nodes) != 2 || m.s.Nodes[0].PodCIDRs[0].String() != "10.2.2.0/24" {
			t.Errorf("saved %v", m.s.Nodes)
		}
		if _, body := f.get("/readyz"); strings.Contains(body, "apiserver") {
			t.Errorf("/readyz = %q though the API server is there", body)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
		wantCalls(t, f.calls.take(), "withdraw", "clean up", "forget")
	})
}

func TestAnAPIServerThatAnswersIsBelievedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _ := startRemembering(t)
		f.sync()
		wantCalls(t, f.calls.take(), "apply", "save", "publish")
		if _, state := f.get("/state"); strings.Contains(state, "route 10.2.9.0/24") {
			t.Errorf("/state = %s, want nothing that is only remembered", state)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

// TestAnEndBeforeTheAPIServerAnswers: nobody is left waiting for it.
func TestAnEndBeforeTheAPIServerAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _ := startRemembering(t)
		time.Sleep(apiPatience + time.Second)
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

// TestAFullDiskStopsNoPass: that the cluster cannot be saved is logged once.
func TestAFullDiskStopsNoPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, m := startRemembering(t)
		m.err = fs.ErrPermission
		f.sync()
		f.calls.take()
		for range 5 {
			time.Sleep(saveInterval)
			wantCalls(t, f.poked(), "apply", "save", "publish")
		}
		if code, body := f.get("/readyz"); code != 200 {
			t.Errorf("/readyz = %d %q, want that the node is ready", code, body)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
		if n := strings.Count(f.log.String(), "not saved"); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
	})
}
