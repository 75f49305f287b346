// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kilomesh/kilo/lab"
	"github.com/kilomesh/kilo/lab/labtest"
)

// newHost is a further private host of cloud "b".
func newHost(name string) lab.HostSpec { return lab.HostSpec{Name: name, Cloud: "b", Private: true} }

func TestNodeJoins(t *testing.T) {
	l := labtest.Start(t, lab.Demo(lab.Dual))
	waitMatrix(t, l)
	if _, err := l.AddHost(t.Context(), newHost("b4")); err != nil {
		t.Fatal(err)
	}
	if m := waitMatrix(t, l); len(m.Cells) != 2*16*8 {
		t.Errorf("the table has %d cells, want those of 8 hosts", len(m.Cells))
	}
}

// TestNodeLeaves: an agent that ends with --clean-up takes its node out of the mesh.
func TestNodeLeaves(t *testing.T) {
	l := labtest.Start(t, lab.Demo(lab.Dual))
	leaving := l.Host("b3")
	if err := leaving.RestartAgent(t.Context(), syscall.SIGTERM, "--clean-up=true"); err != nil {
		t.Fatal(err)
	}
	waitMatrix(t, l)
	if err := leaving.StopAgent(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	t.Run("its annotations are gone", func(t *testing.T) {
		node, err := l.Kube.CoreV1().Nodes().Get(t.Context(), leaving.Name(), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for k, v := range node.Annotations {
			if strings.HasPrefix(k, "kilo.squat.ai/") {
				t.Errorf("annotation %s=%s is left", k, v)
			}
		}
	})
	t.Run("its kernel is clean", func(t *testing.T) { checkClean(t, leaving) })
	t.Run("the others forget it", func(t *testing.T) {
		for _, h := range others(l, leaving) {
			waitFor(t, "routes to "+leaving.Name()+" to go", 10*time.Second, func(context.Context) error {
				return hasRoutes(h, leaving, false)
			})
		}
	})
	if err := leaving.Remove(); err != nil {
		t.Fatal(err)
	}
	waitMatrix(t, l)
}

// checkClean: nothing that kg made is left on the host.
func checkClean(t *testing.T, h *lab.Host) {
	t.Helper()
	routes, err1 := h.KiloRoutes()
	rules, err2 := h.KiloRules()
	table, err3 := h.HasKiloTable()
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	if len(routes) > 0 || rules > 0 || table {
		t.Errorf("%s still has routes %v, %d rules, table inet kilo: %v", h.Name(), routes, rules, table)
	}
}

// TestNodeIsDeleted: routes to a deleted Node go everywhere, other traffic goes on.
func TestNodeIsDeleted(t *testing.T) {
	l := labtest.Start(t, lab.Demo(lab.Dual))
	waitMatrix(t, l)
	gone := l.Host("b3")
	flood := startFloods(t, l, [2]string{"a1", "c2"}, [2]string{"c1", "b2"}, [2]string{"b2", "a2"})
	if err := l.Kube.CoreV1().Nodes().Delete(t.Context(), gone.Name(), metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, h := range others(l, gone) {
		waitFor(t, "routes to "+gone.Name()+" to go", 10*time.Second, func(context.Context) error {
			return hasRoutes(h, gone, false)
		})
	}
	flood.goOn(t) // the traffic without the node is what is tested
	flood.stop(t)
	if err := gone.Remove(); err != nil {
		t.Fatal(err)
	}
	waitMatrix(t, l)
}

// TestAgentRestarts: traffic through a leader does not notice that its agent ends and starts.
func TestAgentRestarts(t *testing.T) {
	l := labtest.Start(t, lab.Demo(lab.Dual))
	waitMatrix(t, l)
	leader := l.Host("b1")
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			flood := startFloods(t, l, [2]string{"a1", "b2"}, [2]string{"b3", "c2"}, [2]string{"c1", "b1"}, [2]string{"a2", "b1"})
			if err := leader.StopAgent(sig); err != nil {
				t.Fatal(err)
			}
			flood.goOn(t) // the traffic without an agent is what is tested
			if err := leader.RestartAgent(t.Context(), sig); err != nil {
				t.Fatal(err)
			}
			flood.goOn(t) // as is that after the first pass
			flood.stop(t)
		})
	}
	waitMatrix(t, l)
}

// floods ping from the first pod of one host to that of another, in each family.
type floods struct {
	names []string
	all   []*lab.Flood
}

func startFloods(t *testing.T, l *lab.Lab, pairs ...[2]string) *floods {
	t.Helper()
	f := &floods{}
	for _, p := range pairs {
		from, to := l.Host(p[0]).Pods()[0], l.Host(p[1]).Pods()[0]
		for _, a := range to.Addrs() {
			flood, err := lab.StartFlood(t.Context(), from, a, 5*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			f.all = append(f.all, flood)
			f.names = append(f.names, fmt.Sprintf("%s → %s (%v)", from.Name(), to.Name(), a))
		}
	}
	return f
}

// goOn waits for a hundred further replies to each flood, so that losses show.
func (f *floods) goOn(t *testing.T) {
	t.Helper()
	for i, flood := range f.all {
		enough := flood.Answered() + 100
		waitFor(t, "replies to "+f.names[i], 20*time.Second, func(context.Context) error {
			if n := flood.Answered(); n < enough {
				return fmt.Errorf("%d of %d", n, enough)
			}
			return nil
		})
	}
}

// stop fails the test if anything was lost.
func (f *floods) stop(t *testing.T) {
	t.Helper()
	for i, flood := range f.all {
		r := flood.Stop()
		if t.Logf("%s: %v", f.names[i], r); r.Lost > 0 || r.Sent < 50 {
			t.Errorf("%s: %v, want 0 lost of at least 50", f.names[i], r)
		}
	}
}
