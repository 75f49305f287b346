// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"pgregory.net/rapid"

	"github.com/kilomesh/kilo/internal/mesh"
)

func TestHandlersPokeOnlyOnWhatIsRead(t *testing.T) {
	base := func() *corev1.Node {
		n := testNode(annotations{AnnotationKey: keyA, annotationLastSeen: "1", "other": "x"})
		n.UID, n.ResourceVersion, n.Spec.PodCIDRs = "u", "1", []string{"10.2.1.0/24"}
		n.Labels = map[string]string{topologyLabel: "a", "zone": "z"}
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "10.0.0.5"}}
		return n
	}
	for _, c := range []struct {
		name   string
		change func(n *corev1.Node)
		own    bool
		want   int
	}{
		{name: "kubelet heartbeat", change: func(n *corev1.Node) {
			n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, LastHeartbeatTime: metav1.Unix(1, 0)}}
			n.Status.Images = []corev1.ContainerImage{{Names: []string{"x"}}}
		}},
		{name: "heartbeat of earlier releases", change: func(n *corev1.Node) { n.Annotations[annotationLastSeen] = "2" }},
		{name: "other annotation", change: func(n *corev1.Node) { n.Annotations["other"] = "y" }},
		{name: "other label", change: func(n *corev1.Node) { n.Labels["zone"] = "y" }},
		{name: "other value with the same meaning", change: func(n *corev1.Node) { n.Spec.PodCIDRs[0] = "10.2.1.7/24" }},
		{name: "granularity of another node", change: func(n *corev1.Node) { n.Annotations[AnnotationGranularity] = "full" }, want: 1},
		{name: "address of another node", change: func(n *corev1.Node) { n.Status.Addresses[0].Address = "10.0.0.6" }},
		{name: "granularity", own: true, change: func(n *corev1.Node) { n.Annotations[AnnotationGranularity] = "full" }, want: 1},
		{name: "address", own: true, change: func(n *corev1.Node) { n.Status.Addresses[0].Address = "10.0.0.6" }, want: 1},
		{name: "key", change: func(n *corev1.Node) { n.Annotations[AnnotationKey] = keyB }, want: 1},
		{name: "value that turns bad", change: func(n *corev1.Node) { n.Annotations[AnnotationPersistentKeepalive] = "x" }, want: 1},
		{name: "topology label", change: func(n *corev1.Node) { n.Labels[topologyLabel] = "b" }, want: 1},
		{name: "replaced object", change: func(n *corev1.Node) { n.UID = "v" }, want: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			pokes := 0
			h := handlers(func() { pokes++ }, (*cachedNode).same, func(string) {})
			after := base()
			after.ResourceVersion = "2"
			c.change(after)
			h.OnUpdate(newCachedNode(base(), topologyLabel, c.own), newCachedNode(after, topologyLabel, c.own))
			if pokes != c.want {
				t.Errorf("%d pokes, want %d", pokes, c.want)
			}
		})
	}
	pokes := 0
	h := handlers(func() { pokes++ }, (*cachedNode).same, func(string) {})
	h.OnAdd(newCachedNode(base(), topologyLabel, false), true)
	h.OnDelete(newCachedNode(base(), topologyLabel, false))
	h.OnDelete(cache.DeletedFinalStateUnknown{Key: "n"})
	if pokes != 3 {
		t.Errorf("%d pokes of one added and two deleted objects, want 3", pokes)
	}
}

// agedPeer returns a good Peer with key i that was created at age seconds.
func agedPeer(name string, i byte, age int64) *cachedPeer {
	key := repeatedKey(i)
	u := unstructuredPeer(name, map[string]any{"allowedIPs": []any{"10.5.0.1/32"}, "publicKey": key})
	u.SetCreationTimestamp(metav1.Unix(age, 0))
	return newCachedPeer(u)
}

func repeatedKey(i byte) string {
	var k mesh.PublicKey
	for j := range k {
		k[j] = i
	}
	return k.String()
}

// TestSnapshotPeersWithOneKey is L74: the oldest has the key.
func TestSnapshotPeersWithOneKey(t *testing.T) {
	bad := newCachedPeer(unstructuredPeer("a", map[string]any{"publicKey": repeatedKey(1)}))
	peers := []*cachedPeer{bad, agedPeer("b", 1, 20), agedPeer("c", 1, 10), agedPeer("d", 1, 10), agedPeer("e", 2, 10)}
	s := snapshot(nil, peers)
	var names []string
	for _, p := range s.Peers {
		names = append(names, p.Name)
	}
	if diff := cmp.Diff([]string{"c", "e"}, names); diff != "" {
		t.Errorf("peers (-want +got):\n%s", diff)
	}
	var problems []string
	for _, p := range s.Problems {
		problems = append(problems, p.Object+" "+p.Field)
	}
	if diff := cmp.Diff([]string{"peer/a spec.allowedIPs", "peer/b spec.publicKey", "peer/d spec.publicKey"}, problems); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	for _, p := range s.Problems[1:] {
		if !strings.Contains(p.Err.Error(), "peer c") {
			t.Errorf("problem %q does not name the owner", p)
		}
	}
}

// TestSnapshotHasNoHistory: whatever was in the caches before, and in whatever
// order things came, a Snapshot is that of a fresh start.
func TestSnapshotHasNoHistory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store, final := cache.NewStore(cache.DeletionHandlingMetaNamespaceKeyFunc), map[string]*cachedPeer{}
		for i := range rapid.IntRange(0, 20).Draw(rt, "events") {
			name := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(rt, "name")
			p := agedPeer(name, rapid.ByteRange(1, 3).Draw(rt, "key"), rapid.Int64Range(1, 3).Draw(rt, "age"))
			if rapid.Bool().Draw(rt, "bad") {
				p = newCachedPeer(unstructuredPeer(name, map[string]any{}))
			}
			p.ResourceVersion = fmt.Sprint(i)
			switch rapid.IntRange(0, 3).Draw(rt, "kind") {
			case 0:
				_ = store.Delete(cache.DeletedFinalStateUnknown{Key: name, Obj: p})
				delete(final, name)
			default:
				_ = store.Update(p)
				final[name] = p
			}
		}
		fresh := cache.NewStore(cache.MetaNamespaceKeyFunc)
		for _, p := range final {
			_ = fresh.Add(p)
		}
		want, got := snapshot(nil, listed[*cachedPeer](fresh)), snapshot(nil, listed[*cachedPeer](store))
		if diff := cmp.Diff(want, got, compare()); diff != "" {
			rt.Fatalf("snapshot (-fresh +got):\n%s", diff)
		}
	})
}

// TestCRDMissing: only the API server's own word counts.
func TestCRDMissing(t *testing.T) {
	const status404 = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,
		"message":"customresourcedefinitions.apiextensions.k8s.io \"peers.kilo.squat.ai\" not found",
		"details":{"name":"peers.kilo.squat.ai","group":"apiextensions.k8s.io","kind":"customresourcedefinitions"}}`
	for _, c := range []struct {
		name, contentType, body string
		code                    int
		want                    bool
	}{
		{name: "not there", contentType: "application/json", body: status404, code: 404, want: true},
		{name: "page of a proxy", contentType: "text/html", body: "<html>not found</html>", code: 404},
		{name: "plain text", contentType: "text/plain", body: "404 page not found\n", code: 404},
		{name: "there, not yet served", contentType: "application/json", body: `{"kind":"CustomResourceDefinition","apiVersion":"apiextensions.k8s.io/v1"}`, code: 200},
		{name: "forbidden", contentType: "application/json", body: `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`, code: 403},
	} {
		t.Run(c.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", c.contentType)
				if strings.HasPrefix(r.URL.Path, "/apis/kilo.squat.ai/") {
					http.Error(w, "404 page not found", http.StatusNotFound)
					return
				}
				w.WriteHeader(c.code)
				_, _ = w.Write([]byte(c.body))
			}))
			defer srv.Close()
			pokes := make(chan struct{}, 100)
			cluster, err := New(&rest.Config{Host: srv.URL}, Options{Log: slog.New(slog.DiscardHandler), Poke: func() { pokes <- struct{}{} }})
			if err != nil {
				t.Fatal(err)
			}
			err = cluster.core.Get().AbsPath("/apis/kilo.squat.ai/v1alpha1/peers").Do(t.Context()).Error()
			if got := cluster.crd.report(t.Context(), err); got != c.want {
				t.Errorf("%v explained by a missing definition: %t, want %t", err, got, c.want)
			}
			s := cluster.Snapshot()
			got := len(s.Problems) == 1 && s.Problems[0].Object == "customresourcedefinition/peers.kilo.squat.ai"
			if got != c.want || len(pokes) > 0 != c.want {
				t.Errorf("missing %t, %d pokes, problems %v; want missing %t", got, len(pokes), s.Problems, c.want)
			}
		})
	}
}

// BenchmarkSnapshot: the cost of a Snapshot of a large cluster, and what a Node
// and a Peer occupy in the caches.
func BenchmarkSnapshot(b *testing.B) {
	for _, size := range []int{100, 5000} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c, err := New(&rest.Config{}, Options{NodeName: "node-7", TopologyLabel: topologyLabel, Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			before := heap()
			for i := range size {
				node, _ := c.transformNode(largeNode(i))
				if err := c.nodes.GetStore().Add(node); err != nil {
					b.Fatal(err)
				}
			}
			perNode := float64(heap()-before) / float64(size)
			b.ReportAllocs()
			for b.Loop() {
				if s := c.Snapshot(); len(s.Nodes) != size || s.Self == nil || len(s.Problems) > 0 {
					b.Fatalf("%d nodes, %v", len(s.Nodes), s.Problems)
				}
			}
			b.ReportMetric(perNode, "heap-B/node")
		})
	}
}

// BenchmarkParseNode: what one changed Node costs.
func BenchmarkParseNode(b *testing.B) {
	node := largeNode(1)
	b.ReportAllocs()
	for b.Loop() {
		ParseNode(node, topologyLabel)
	}
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// largeNode is a Node as a busy cluster has them.
func largeNode(i int) *corev1.Node {
	n := testNode(annotations{
		AnnotationKey: keyA, AnnotationEndpoint: fmt.Sprintf("192.0.2.%d:51820", i%256), AnnotationInternalIP: fmt.Sprintf("10.0.%d.%d/16", i/256, i%256),
		AnnotationWireGuardIP: "", AnnotationGranularity: "location", annotationLastSeen: "1",
	})
	n.Name, n.UID, n.ResourceVersion = fmt.Sprintf("node-%d", i), types.UID(fmt.Sprintf("uid-%d", i)), "1"
	n.CreationTimestamp = metav1.NewTime(time.Unix(int64(i), 0))
	n.Labels = map[string]string{topologyLabel: "a"}
	n.Spec.PodCIDRs = []string{fmt.Sprintf("10.%d.%d.0/24", 64+i/256, i%256), fmt.Sprintf("fd00:%x::/64", i)}
	for j := range 50 {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.example.com/image-%d-%d", i, j)}})
	}
	return n
}
