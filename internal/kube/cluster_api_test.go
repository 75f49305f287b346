// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/kilomesh/kilo/api/v1alpha1"
	"github.com/kilomesh/kilo/internal/mesh"
)

// TestAPISchema: the schema accepts and refuses what the one in running clusters does.
func TestAPISchema(t *testing.T) {
	a := api(t)
	a.applyCRD()
	ips := []any{"10.5.0.1/32"}
	endpoint := func(e map[string]any) map[string]any {
		return map[string]any{"allowedIPs": ips, "publicKey": keyA, "endpoint": e}
	}
	for i, c := range []struct {
		name   string
		spec   map[string]any
		refuse string // a part of the message
	}{
		{name: "least", spec: map[string]any{"allowedIPs": ips, "publicKey": keyA}},
		{name: "complete", spec: map[string]any{
			"allowedIPs": ips, "publicKey": keyA, "presharedKey": keyB, "persistentKeepalive": int64(10),
			"endpoint": map[string]any{"dnsOrIP": map[string]any{"dns": "example.com", "ip": "10.0.0.1"}, "port": int64(51820)},
		}},
		{name: "text is not the schema's business", spec: map[string]any{"allowedIPs": []any{"foo"}, "publicKey": "", "presharedKey": "foo"}},
		{name: "empty allowedIPs", spec: map[string]any{"allowedIPs": []any{}, "publicKey": keyA}},
		{name: "numbers out of range", spec: map[string]any{"allowedIPs": ips, "publicKey": keyA, "persistentKeepalive": int64(-1)}},
		{name: "empty dnsOrIP", spec: endpoint(map[string]any{"dnsOrIP": map[string]any{}, "port": int64(0)})},
		{name: "negative port", spec: endpoint(map[string]any{"dnsOrIP": map[string]any{}, "port": int64(-1)})},
		{name: "port that fits no int32", spec: endpoint(map[string]any{"dnsOrIP": map[string]any{}, "port": int64(1) << 32}), refuse: "spec.endpoint.port"},
		{name: "unknown fields are dropped", spec: map[string]any{"allowedIPs": ips, "publicKey": keyA, "unknown": "x"}},
		{name: "no spec", spec: nil, refuse: "spec"},
		{name: "no key", spec: map[string]any{"allowedIPs": ips}, refuse: "spec.publicKey"},
		{name: "null key of an empty shell variable", spec: map[string]any{"allowedIPs": ips, "publicKey": nil}, refuse: "spec.publicKey"},
		{name: "no allowedIPs", spec: map[string]any{"publicKey": keyA}, refuse: "spec.allowedIPs"},
		{name: "null item", spec: map[string]any{"allowedIPs": []any{nil}, "publicKey": keyA}, refuse: "spec.allowedIPs[0]"},
		{name: "endpoint without host", spec: endpoint(map[string]any{"port": int64(1)}), refuse: "spec.endpoint.dnsOrIP"},
		{name: "endpoint without port", spec: endpoint(map[string]any{"dnsOrIP": map[string]any{}}), refuse: "spec.endpoint.port"},
		{name: "flat endpoint of 0.1", spec: endpoint(map[string]any{"ip": "10.0.0.1", "port": int64(1)}), refuse: "spec.endpoint.dnsOrIP"},
		{name: "keepalive as text", spec: map[string]any{"allowedIPs": ips, "publicKey": keyA, "persistentKeepalive": "10"}, refuse: "spec.persistentKeepalive"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newPeer(a.name(fmt.Sprint(i)), c.spec)
			if c.spec == nil {
				delete(o.Object, "spec")
			}
			err := (&apiServer{t: t, Interface: a.Interface}).create(a.peers(), o)
			switch {
			case c.refuse == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.refuse != "" && (!apierrors.IsInvalid(err) || !strings.Contains(err.Error(), c.refuse)):
				t.Errorf("error %v: want it refused for %s", err, c.refuse)
			}
		})
	}
}

// TestAPIFollow: objects come, change, turn bad and good, and go, and one that
// cannot even be decoded blocks no other.
func TestAPIFollow(t *testing.T) {
	a := api(t)
	a.applyCRD()
	keys := []string{randomKey(), randomKey()}
	good := map[string]any{"allowedIPs": []any{"10.5.0.1/24"}, "publicKey": keys[0]}
	undecodable := map[string]any{"allowedIPs": []any{"10.5.1.1/32"}, "publicKey": keys[1], "endpoint": map[string]any{"dnsOrIP": map[string]any{}, "port": int64(-1)}}
	n, p, u := a.name("n"), a.name("p"), a.name("u")
	for _, err := range []error{
		a.create(a.nodes(), newNode(n, annotations{AnnotationKey: keyA}, "10.2.1.0/24")),
		a.create(a.peers(), newPeer(p, good)), a.create(a.peers(), newPeer(u, undecodable)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	s := a.start(n)
	defer s.stop()
	s.sync(t) // and nothing is missing from now on
	want := mesh.Node{Name: n, Key: testKey(t), PodCIDRs: prefixes("10.2.1.0/24")}
	if got, _ := s.node(n); !cmp.Equal(want, got, compare()) {
		t.Errorf("node (-want +got):\n%s", cmp.Diff(want, got, compare()))
	}
	if got, problems := s.peer(p); got.Name != p || len(problems) > 0 || got.AllowedIPs[0] != prefixes("10.5.0.0/24")[0] {
		t.Errorf("peer %+v, problems %v", got, problems)
	}
	if got, problems := s.peer(u); got.Name != "" || len(problems) != 1 {
		t.Errorf("peer that cannot be decoded: %+v, problems %v", got, problems)
	}
	if self := s.Snapshot().Self; self == nil || self.Node.Name != n {
		t.Errorf("self %+v", self)
	}

	a.patch(a.peers(), p, `{"spec":{"publicKey":"foo"}}`)
	eventually(t, "the peer turns bad", func() string { return unless(s.peer(p))(false, 1) })
	a.patch(a.peers(), p, `{"spec":{"publicKey":"`+keys[0]+`"}}`)
	eventually(t, "the peer turns good", func() string { return unless(s.peer(p))(true, 0) })
	a.patch(a.peers(), u, `{"spec":{"endpoint":null}}`)
	eventually(t, "the other peer can be decoded", func() string { return unless(s.peer(u))(true, 0) })
	a.patch(a.nodes(), n, `{"metadata":{"annotations":{"`+AnnotationPersistentKeepalive+`":"-1"}}}`)
	eventually(t, "the node has a bad value", func() string {
		if got, problems := s.node(n); got.Name != n || len(problems) != 1 {
			return fmt.Sprint(got, problems)
		}
		return ""
	})

	before := s.pokes.Load()
	a.delete(a.peers(), p)
	a.delete(a.nodes(), n)
	eventually(t, "node and peer are gone", func() string {
		snap := s.Snapshot()
		got, _ := s.node(n)
		if got.Name != "" || snap.Self != nil || len(problemsWith(snap, "node/"+n)) > 0 {
			return fmt.Sprint(got, snap.Self)
		}
		return unless(s.peer(p))(false, 0)
	})
	eventually(t, "pokes of both", func() string {
		if got := s.pokes.Load() - before; got < 2 {
			return fmt.Sprint(got)
		}
		return ""
	})
}

// TestAPIHeartbeatDoesNotPoke: neither the kubelet's nor that of earlier releases.
func TestAPIHeartbeatDoesNotPoke(t *testing.T) {
	a := api(t)
	a.applyCRD()
	n := a.name("n")
	if err := a.create(a.nodes(), newNode(n, nil, "10.2.1.0/24")); err != nil {
		t.Fatal(err)
	}
	s := a.start(a.name("another"))
	defer s.stop()
	s.sync(t)
	eventually(t, "the node is known", func() string {
		if got, _ := s.node(n); got.Name == "" || s.pokes.Load() == 0 {
			return "no"
		}
		return ""
	})
	quiet(t, s)
	before := s.pokes.Load()
	for i := range 3 {
		a.patch(a.nodes(), n, fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":"2026-01-01T00:00:0%dZ"}]}}`, i), "status")
		last := a.patch(a.nodes(), n, fmt.Sprintf(`{"metadata":{"annotations":{"%s":"%d"}}}`, annotationLastSeen, i)).GetResourceVersion()
		eventually(t, "the heartbeat has come", func() string {
			item, _, _ := s.nodes.GetStore().GetByKey(n)
			if got := item.(*cachedNode); got.ResourceVersion != last {
				return got.ResourceVersion
			}
			return ""
		})
	}
	// Events are handled in order: when this one has poked, those before have not.
	a.patch(a.nodes(), n, `{"metadata":{"annotations":{"`+AnnotationLeader+`":""}}}`)
	eventually(t, "the annotation pokes", func() string {
		if s.pokes.Load() == before {
			return "no"
		}
		return ""
	})
	if got := s.pokes.Load() - before; got != 1 {
		t.Errorf("%d pokes, want 1, of the annotation (is somebody else at this API server?)", got)
	}
}

// TestAPIPublish: one write for a change, none without, and all gone at the end.
func TestAPIPublish(t *testing.T) {
	a := api(t)
	a.applyCRD()
	n := a.name("n")
	if err := a.create(a.nodes(), newNode(n, nil, "10.2.1.0/24")); err != nil {
		t.Fatal(err)
	}
	a.patch(a.nodes(), n, `{"metadata":{"annotations":null}}`)
	s := a.start(n)
	defer s.stop()
	s.sync(t)
	version := func() string {
		t.Helper()
		o, err := a.nodes().Get(t.Context(), n, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return o.GetResourceVersion()
	}
	p := leaderPublication(t)
	publish(t, s.Cluster, p, true)
	written := version()
	for range 3 {
		publish(t, s.Cluster, p, false)
	}
	eventually(t, "the others read what was published", func() string {
		got, problems := s.node(n)
		want := mesh.Node{
			Name: n, Key: p.Key, Endpoint: p.Endpoint, PodCIDRs: prefixes("10.2.1.0/24"),
			InternalIPs: prefixes("10.0.0.5/24", "fd00::5/64"), WireGuardIPs: addrs("10.4.0.1", "fd04::1"), Granularity: p.Granularity,
		}
		return cmp.Diff(want, got, compare()) + fmt.Sprint(problems)[2:]
	})
	publish(t, s.Cluster, p, false)
	if v := version(); v != written {
		t.Errorf("version %s after publishing nothing new, want %s", v, written)
	}

	// Another program removes a value: it comes back.
	a.patch(a.nodes(), n, `{"metadata":{"annotations":{"`+AnnotationKey+`":null,"`+annotationLastSeen+`":"1","foreign":"x"}}}`)
	eventually(t, "the edit is repaired", func() string {
		changed, err := s.Publish(t.Context(), p)
		if err != nil || !changed {
			return fmt.Sprint(changed, err)
		}
		return ""
	})

	for range 2 {
		if err := s.Withdraw(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	o, err := a.nodes().Get(t.Context(), n, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for key := range o.GetAnnotations() {
		if strings.HasPrefix(key, prefix) {
			t.Errorf("annotation %s is left", key)
		}
	}
	if o.GetAnnotations()["foreign"] != "x" {
		t.Error("the annotation of another program is gone")
	}

	// A node that is replaced under the same name is published to again.
	a.delete(a.nodes(), n)
	eventually(t, "the node is gone", func() string {
		got, _ := s.node(n)
		return got.Name
	})
	if err := s.Withdraw(t.Context()); err != nil {
		t.Errorf("withdraw without a node: %v", err)
	}
	if err := a.create(a.nodes(), newNode(n, nil, "10.2.2.0/24")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new node is published to", func() string {
		changed, err := s.Publish(t.Context(), p)
		if err != nil || !changed {
			return fmt.Sprint(changed, err)
		}
		return ""
	})
}

// TestAPILateCRD: without the definition of Peers there are nodes and a
// problem, and as soon as it comes there are Peers.
func TestAPILateCRD(t *testing.T) {
	a := api(t)
	if list, err := a.peers().List(t.Context(), metav1.ListOptions{}); err == nil {
		if len(list.Items) > 0 {
			t.Skipf("SKIPPED: the definition of peers would have to go, and there are %d peers", len(list.Items))
		}
		a.delete(a.crds(), v1alpha1.PeerCRD)
	}
	eventually(t, "the definition is gone", func() string {
		if _, err := a.peers().List(t.Context(), metav1.ListOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Sprint(err)
		}
		return ""
	})
	t.Cleanup(a.applyCRD)
	s := a.start("")
	defer s.stop()
	s.sync(t)
	crdProblems := func() int {
		return len(problemsWith(s.Snapshot(), "customresourcedefinition/"+v1alpha1.PeerCRD))
	}
	if crdProblems() != 1 {
		t.Fatalf("problems %v", s.Snapshot().Problems)
	}
	before := s.pokes.Load()
	a.applyCRD()
	p := a.name("p")
	if err := a.create(a.peers(), newPeer(p, map[string]any{"allowedIPs": []any{"10.5.0.1/32"}, "publicKey": randomKey()})); err != nil {
		t.Fatal(err)
	}
	eventually(t, "peers are known", func() string {
		if crdProblems() > 0 {
			return "the definition is missing"
		}
		return unless(s.peer(p))(true, 0)
	})
	if s.pokes.Load() == before {
		t.Error("no poke")
	}

	// And the other way round, while running.
	a.delete(a.crds(), v1alpha1.PeerCRD)
	eventually(t, "the definition is gone again", func() string {
		if crdProblems() != 1 {
			return "no"
		}
		return unless(s.peer(p))(false, 0)
	})
}

// TestAPIAway: what happens while the API server is away is known when it is
// back, deletions too, and until then the last state stays.
func TestAPIAway(t *testing.T) {
	a := api(t)
	a.applyCRD()
	stays, goes, comes, peer := a.name("stays"), a.name("goes"), a.name("comes"), a.name("peer")
	for _, err := range []error{
		a.create(a.nodes(), newNode(stays, nil, "10.2.1.0/24")), a.create(a.nodes(), newNode(goes, nil, "10.2.2.0/24")),
		a.create(a.peers(), newPeer(peer, map[string]any{"allowedIPs": []any{"10.5.0.1/32"}, "publicKey": randomKey()})),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	gate := a.gate()
	s := (&apiServer{t: t, config: gate.config}).start(stays)
	defer s.stop()
	s.sync(t)

	gate.close()
	a.delete(a.nodes(), goes)
	a.delete(a.peers(), peer)
	if err := a.create(a.nodes(), newNode(comes, annotations{AnnotationKey: keyA}, "10.2.3.0/24")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Publish(t.Context(), leaderPublication(t)); err == nil {
		t.Error("published to an API server that is away")
	}
	time.Sleep(time.Second)
	if n, _ := s.node(goes); n.Name == "" {
		t.Error("a node went with the API server")
	}
	if why := unless(s.peer(peer))(true, 0); why != "" {
		t.Errorf("a peer went with the API server: %s", why)
	}
	gate.open()
	eventually(t, "the state of the API server", func() string {
		gone, _ := s.node(goes)
		came, _ := s.node(comes)
		if gone.Name != "" || came.Key != testKey(t) {
			return fmt.Sprint(gone, came)
		}
		return unless(s.peer(peer))(false, 0)
	})
	publish(t, s.Cluster, leaderPublication(t), true)
}

// TestAPIRunEnds with all its goroutines, also if it never got anywhere.
func TestAPIRunEnds(t *testing.T) {
	a := api(t)
	for name, config := range map[string]*rest.Config{"reachable": a.config, "unreachable": {Host: "https://127.0.0.1:1"}} {
		t.Run(name, func(t *testing.T) {
			s := (&apiServer{t: t, config: config}).start("")
			if name == "reachable" {
				s.sync(t)
			} else {
				ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
				defer cancel()
				if err := s.WaitForSync(ctx); err == nil {
					t.Error("synced with nothing")
				}
			}
			s.stop()
			eventually(t, "no goroutine of ours is left", func() string {
				stacks := make([]byte, 1<<20)
				stacks = stacks[:runtime.Stack(stacks, true)]
				for g := range strings.SplitSeq(string(stacks), "\n\n") {
					if strings.Contains(g, "tools/cache") || strings.Contains(g, "internal/kube.(*Cluster)") {
						return g
					}
				}
				return ""
			})
		})
	}
}
