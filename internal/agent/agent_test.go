// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
)

// fakeCluster serves one snapshot and remembers what was published.
type fakeCluster struct {
	calls    *calls
	synced   chan struct{}
	mu       sync.Mutex
	snapshot mesh.Snapshot
	last     mesh.Publication
	warnings []string
	err      error
}

func (c *fakeCluster) WaitForSync(ctx context.Context) error {
	select {
	case <-c.synced:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (c *fakeCluster) Snapshot() mesh.Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.snapshot
}

func (c *fakeCluster) set(f func(s *mesh.Snapshot)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.snapshot)
}

func (c *fakeCluster) Publish(_ context.Context, p mesh.Publication) (bool, error) {
	c.calls.add("publish")
	c.last = p
	return false, c.err
}

func (c *fakeCluster) Withdraw(context.Context) error {
	c.calls.add("withdraw")
	return nil
}

func (c *fakeCluster) Warn(object, reason, message string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.warnings = append(c.warnings, object+" "+reason+": "+message)
}

// fakeKernel remembers the last State.
type fakeKernel struct {
	calls  *calls
	facts  mesh.Facts
	state  mesh.State
	err    error
	cniErr error
	watch  func(ctx context.Context, started, changed func()) error
}

func (k *fakeKernel) Facts(context.Context) (mesh.Facts, error) { return k.facts, nil }

func (k *fakeKernel) Apply(_ context.Context, s mesh.State) error {
	k.calls.add("apply")
	k.state = s
	return k.err
}

func (k *fakeKernel) CleanUp(_ context.Context, deleteLink bool) error {
	k.calls.add("clean up")
	if deleteLink {
		k.calls.add("delete link")
	}
	return nil
}

func (k *fakeKernel) WriteCNI([]netip.Prefix, int) error { return k.cniErr }
func (k *fakeKernel) Writes() uint64                     { return 0 }

func (k *fakeKernel) Watch(ctx context.Context, started, changed func()) error {
	if k.watch != nil {
		return k.watch(ctx, started, changed)
	}
	<-ctx.Done()
	return nil
}

type calls struct {
	mu   sync.Mutex
	list []string
}

func (c *calls) add(s string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, s)
}

// take returns the calls since the last take.
func (c *calls) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.list
	c.list = nil
	return out
}

// fixture is an agent of node a in a mesh with node b.
type fixture struct {
	*Agent
	calls   *calls
	cluster *fakeCluster
	kernel  *fakeKernel
	log     *bytes.Buffer
	done    chan error
	stop    context.CancelFunc
}

func start(t *testing.T, change func(f *fixture)) *fixture {
	t.Helper()
	f := &fixture{calls: &calls{}, log: &bytes.Buffer{}, done: make(chan error, 1)}
	pods := func(s string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(s)} }
	own := mesh.Node{Name: "a", Location: "x", PodCIDRs: pods("10.2.1.0/24")}
	other := mesh.Node{
		Name: "b", Location: "y", PodCIDRs: pods("10.2.2.0/24"), Key: mesh.PublicKey{2},
		InternalIPs: pods("192.168.2.2/24"), Endpoint: mesh.Endpoint{IP: netip.MustParseAddr("203.0.113.2"), Port: 51820},
	}
	f.cluster = &fakeCluster{calls: f.calls, synced: make(chan struct{}), snapshot: mesh.Snapshot{
		Nodes: []mesh.Node{own, other}, Self: &mesh.Declared{Node: own},
	}}
	f.kernel = &fakeKernel{calls: f.calls, facts: mesh.Facts{
		Addrs:      []mesh.LinkAddr{{Dev: "eth0", Prefix: netip.MustParsePrefix("192.168.1.1/24"), MTU: 1500}},
		DefaultDev: "eth0", DefaultMTU: 1500,
	}}
	cfg := Config{
		NodeName: "a", Key: mesh.NewSecretKey([mesh.KeySize]byte{7}), ResyncPeriod: 30 * time.Second,
		Log:    slog.New(slog.NewTextHandler(f.log, nil)),
		Detect: mesh.DetectConfig{Port: 51820},
		Mesh: mesh.Config{
			Granularity: mesh.GranularityLocation, Encapsulation: mesh.EncapsulateAlways, WireGuardCIDRs: pods("10.4.0.0/16"),
			ManageLocal: true, ManageCNI: true, WireGuardDev: "kilo0", TunnelDev: "tunl0",
		},
		CleanUp: true,
	}
	a, err := New(cfg, f.cluster, f.kernel)
	if err != nil {
		t.Fatal(err)
	}
	f.Agent = a
	if change != nil {
		change(f)
	}
	ctx, stop := context.WithCancel(t.Context())
	f.stop = stop
	go func() { f.done <- f.Run(ctx) }()
	return f
}

// end stops the agent and returns what Run said.
func (f *fixture) end() error {
	f.stop()
	return <-f.done
}

func (f *fixture) sync() {
	close(f.cluster.synced)
	synctest.Wait()
}

func (f *fixture) poked() []string {
	time.Sleep(minInterval) // in the bubble's time
	f.Poke()
	synctest.Wait()
	return f.calls.take()
}

func (f *fixture) get(path string) (int, string) {
	r := httptest.NewRecorder()
	f.Handler().ServeHTTP(r, httptest.NewRequest("GET", path, nil))
	return r.Code, r.Body.String()
}

func wantCalls(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("calls = %q, want %q", got, want)
	}
}

func TestNothingIsTouchedBeforeTheCachesAreFilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil)
		time.Sleep(time.Hour)
		wantCalls(t, f.calls.take())
		if code, body := f.get("/readyz"); code != 503 || !strings.Contains(body, "caches") {
			t.Errorf("/readyz = %d %q, want 503 and the reason", code, body)
		}
		if code, _ := f.get("/healthz"); code != 200 {
			t.Errorf("/healthz = %d, want 200", code)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
		wantCalls(t, f.calls.take())
	})
}

func TestPassAppliesAndPublishes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil)
		f.sync()
		wantCalls(t, f.calls.take(), "apply", "publish")
		if p := f.cluster.last; p.Endpoint.String() != "192.168.1.1:51820" || len(p.WireGuardIPs) != 1 || p.Key != f.publicKey {
			t.Errorf("published %+v", p)
		}
		if _, body := f.get("/state"); !strings.Contains(body, "route 10.2.2.0/24 via 10.4.0.2 dev kilo0 onlink") {
			t.Errorf("/state = %s", body)
		}
		if code, body := f.get("/readyz"); code != 200 {
			t.Errorf("/readyz = %d %q", code, body)
		}
		logged := f.log.Len()
		wantCalls(t, f.poked(), "apply", "publish")
		if f.log.Len() != logged {
			t.Errorf("an unchanged pass logged: %s", f.log.String()[logged:])
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
		wantCalls(t, f.calls.take(), "withdraw", "clean up")
	})
}

// TestProblemsAreToldOfByOneNode: what is wrong with a Node by that one, what
// concerns all by the first.
func TestProblemsAreToldOfByOneNode(t *testing.T) {
	bad := errors.New("bad")
	problems := []mesh.Problem{
		{Object: "node/a", Field: "f", Err: bad},
		{Object: "node/b", Err: bad},
		{Object: "peer/p", Err: bad},
		{Object: "customresourcedefinition/x", Err: bad},
	}
	for first, want := range map[string][]string{
		"b":   {"node/a KiloProblem: f: bad", "peer/p KiloProblem: bad", "customresourcedefinition/x KiloProblem: bad"},
		"Abe": {"node/a KiloProblem: f: bad"}, // upper case comes before lower
	} {
		synctest.Test(t, func(t *testing.T) {
			f := start(t, func(f *fixture) {
				f.cluster.snapshot.Nodes[1].Name = first
				f.cluster.snapshot.Problems = problems
			})
			f.sync()
			f.poked() // the second time they are no news
			if !slices.Equal(f.cluster.warnings, want) {
				t.Errorf("with node %s: events %q, want %q", first, f.cluster.warnings, want)
			}
			if err := f.end(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAFailedPassIsToldOfOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, func(f *fixture) { f.kernel.err = errors.New("no such device") })
		f.sync()
		time.Sleep(time.Minute)
		if want := []string{"node/a KiloFailed: apply: no such device"}; !slices.Equal(f.cluster.warnings, want) {
			t.Errorf("events %q, want %q", f.cluster.warnings, want)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestExitWithoutCleanUpLeavesEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, func(f *fixture) { f.cfg.CleanUp = false })
		f.sync()
		f.calls.take()
		if err := f.end(); err != nil {
			t.Error(err)
		}
		wantCalls(t, f.calls.take())
	})
}

func TestMissingOwnNodeCutsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil)
		f.sync()
		f.calls.take()
		f.cluster.set(func(s *mesh.Snapshot) { s.Self, s.Nodes = nil, s.Nodes[1:] })
		wantCalls(t, f.poked())
		if _, body := f.get("/readyz"); !strings.Contains(body, "problem: node/a: is not in the cluster") {
			t.Errorf("/readyz = %q, want the problem", body)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestNodeWithoutPodCIDRPublishesAndLeavesTheKernelAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, func(f *fixture) { f.cluster.snapshot.Self.Node.PodCIDRs = nil })
		f.sync()
		wantCalls(t, f.calls.take(), "publish")
		if _, body := f.get("/readyz"); !strings.Contains(body, "node/a: is left out of the mesh: has no pod CIDR") {
			t.Errorf("/readyz = %q, want the problem", body)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestFailureIsTriedAgainSoonerAtFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, func(f *fixture) { f.kernel.err = errors.New("add route x: no buffer space") })
		f.sync()
		time.Sleep(2*time.Minute + time.Second)
		passes := 0
		for _, c := range f.calls.take() {
			if c == "apply" {
				passes++
			}
		}
		// At 0, 0.25, 0.75, ... 15.75 s (each a minimum interval later), then every 15 s.
		if passes < 12 || passes > 15 {
			t.Errorf("%d passes in two minutes, want about 14", passes)
		}
		if n := strings.Count(f.log.String(), "no buffer space"); n != 1 {
			t.Errorf("the same failure was logged %d times, want once", n)
		}
		if code, body := f.get("/readyz"); code != 503 || !strings.Contains(body, "no buffer space") {
			t.Errorf("/readyz = %d %q", code, body)
		}
		f.kernel.err = nil
		f.poked()
		if code, _ := f.get("/readyz"); code != 200 {
			t.Errorf("/readyz = %d after the failure is gone", code)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestFailedPublishIsRetriedAndStopsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, func(f *fixture) { f.cluster.err = errors.New("connection refused") })
		f.sync()
		time.Sleep(time.Second)
		if got := f.calls.take(); len(got) < 4 || !slices.Equal(got[:4], []string{"apply", "publish", "apply", "publish"}) {
			t.Errorf("calls = %q, want applies and publishes", got)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestBadCNIFileIsAProblemThatStopsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, func(f *fixture) {
			f.kernel.cniErr = mesh.Problem{Object: "file//etc/cni/net.d/10-kilo.conflist", Field: "plugins", Err: errors.New("is 7; want a list")}
		})
		f.sync()
		wantCalls(t, f.calls.take(), "apply", "publish")
		for _, want := range []string{"file//etc/cni/net.d/10-kilo.conflist", "plugins", "is 7; want a list"} {
			if !strings.Contains(f.log.String(), want) {
				t.Errorf("log lacks %q:\n%s", want, f.log)
			}
		}
		f.kernel.cniErr = nil
		f.poked()
		if !strings.Contains(f.log.String(), "problem cleared") {
			t.Errorf("log lacks that the problem cleared:\n%s", f.log)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestUnresolvableNameDelaysNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dns := mesh.Endpoint{DNS: "b.example", Port: 51820}
		one, two := netip.MustParseAddr("198.51.100.7"), netip.MustParseAddr("198.51.100.8")
		var answer atomic.Pointer[[]netip.Addr]
		f := start(t, func(f *fixture) {
			f.cluster.snapshot.Peers = []mesh.Peer{
				{Name: "named", Key: mesh.PublicKey{4}, AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.5.0.1/32")}, Endpoint: dns},
				{Name: "other", Key: mesh.PublicKey{5}, AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.5.0.2/32")}},
			}
			f.names.lookup = func(ctx context.Context, _ string) ([]netip.Addr, error) {
				if a := answer.Load(); a != nil {
					return *a, nil
				}
				<-ctx.Done()
				return nil, ctx.Err()
			}
		})
		f.sync()
		wantCalls(t, f.calls.take(), "apply", "publish")
		if n := len(f.kernel.state.Device.Peers); n != 3 {
			t.Errorf("%d peers in the device, want node b and both peers", n)
		}
		answer.Store(&[]netip.Addr{one, two})
		time.Sleep(2 * lookupTimeout)
		time.Sleep(retryInterval)
		synctest.Wait()
		if got := f.kernel.state.Device.Peer(mesh.PublicKey{4}).Endpoint.String(); got != "198.51.100.7:51820" {
			t.Errorf("endpoint = %s, want the resolved address", got)
		}
		answer.Store(&[]netip.Addr{two, one}) // a name with several addresses does not make the endpoint jump
		time.Sleep(2 * refreshInterval)
		synctest.Wait()
		if got := f.kernel.state.Device.Peer(mesh.PublicKey{4}).Endpoint.String(); got != "198.51.100.7:51820" {
			t.Errorf("endpoint = %s after the answer's order changed", got)
		}
		answer.Store(&[]netip.Addr{two})
		time.Sleep(2 * refreshInterval)
		synctest.Wait()
		if got := f.kernel.state.Device.Peer(mesh.PublicKey{4}).Endpoint.String(); got != "198.51.100.8:51820" {
			t.Errorf("endpoint = %s, want the new address of the name", got)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestStormOfEventsCostsABoundedNumberOfPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil)
		f.sync()
		f.calls.take()
		for range 1000 {
			f.Poke()
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if got := len(f.calls.take()) / 2; got < 5 || got > 11 {
			t.Errorf("%d passes in a second of 1,000 events, want about 10", got)
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}

func TestChangesOfTheKernelCauseAPassAndALostWatchIsMended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lose := make(chan error)
		var changed func()
		f := start(t, func(f *fixture) {
			f.kernel.watch = func(ctx context.Context, started, c func()) error {
				f.calls.add("watch")
				changed = c
				started()
				select {
				case err := <-lose:
					return err
				case <-ctx.Done():
					return nil
				}
			}
		})
		f.sync()
		time.Sleep(2 * minInterval)
		synctest.Wait()
		f.calls.take() // of the start
		changed()
		time.Sleep(minInterval)
		synctest.Wait()
		if got := f.calls.take(); !slices.Equal(got, []string{"apply", "publish"}) {
			t.Errorf("after a change: %v", got)
		}
		lose <- errors.New("socket broken")
		time.Sleep(maxRetry + minInterval)
		synctest.Wait()
		if got := f.calls.take(); !slices.Equal(got, []string{"watch", "apply", "publish"}) {
			t.Errorf("after the watch was lost: %v", got)
		}
		if err := f.end(); err != nil || !strings.Contains(f.log.String(), "socket broken") {
			t.Errorf("Run: %v, log %s", err, f.log)
		}
	})
}

func TestMetricsKeepTheExistingNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, nil)
		f.sync()
		_, body := f.get("/metrics")
		for _, want := range []string{`kilo_errors_total{event="apply"} 0`, "kilo_leader 1", "kilo_nodes 2", "kilo_peers 0", "kilo_reconciles_total 1", "kilo_kernel_writes_total 0", "go_goroutines", "process_start_time_seconds"} {
			if !strings.Contains(body, want) {
				t.Errorf("/metrics lacks %q", want)
			}
		}
		if err := f.end(); err != nil {
			t.Error(err)
		}
	})
}
