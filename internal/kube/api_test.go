// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/kilomesh/kilo/api/v1alpha1"
	"github.com/kilomesh/kilo/internal/mesh"
)

// These tests need a real API server without anybody else in it, see api. They
// may run again and again: what they create has names of its own and goes.

const (
	kubeconfigEnv = "KILO_TEST_KUBECONFIG"
	patience      = time.Minute
)

// apiServer is a client of the API server under test.
type apiServer struct {
	t      *testing.T
	config *rest.Config
	dynamic.Interface
	run string // part of all names
}

// api connects to the API server of the kubeconfig file that the environment
// names, and skips the test without.
func api(t *testing.T) *apiServer {
	t.Helper()
	path := os.Getenv(kubeconfigEnv)
	if path == "" {
		t.Skipf("SKIPPED, NOTHING IS TESTED: set %s to the kubeconfig of a running kube-apiserver", kubeconfigEnv)
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 200, 200
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return &apiServer{t: t, config: config, Interface: client, run: "kilo-test-" + strings.ToLower(rand.Text()[:8])}
}

func (a *apiServer) name(s string) string { return a.run + "-" + s }

func (a *apiServer) nodes() dynamic.ResourceInterface {
	return a.Resource(schema.GroupVersionResource{Version: "v1", Resource: "nodes"})
}

func (a *apiServer) peers() dynamic.ResourceInterface {
	return a.Resource(v1alpha1.GroupVersion().WithResource(v1alpha1.PeerResource))
}

func (a *apiServer) crds() dynamic.ResourceInterface {
	return a.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
}

// applyCRD applies manifests/crds.yaml and waits until it is served.
func (a *apiServer) applyCRD() {
	a.t.Helper()
	text, err := os.ReadFile("../../manifests/crds.yaml")
	if err != nil {
		a.t.Fatal(err)
	}
	var crd unstructured.Unstructured
	if err := yaml.Unmarshal(text, &crd.Object); err != nil {
		a.t.Fatal(err)
	}
	// The context of a test has ended when it cleans up, and one that is going cannot be applied.
	eventually(a.t, "the definition of peers is served", func() string {
		_, err := a.crds().Apply(context.Background(), crd.GetName(), &crd, metav1.ApplyOptions{FieldManager: "kilo-test", Force: true})
		if err == nil {
			_, err = a.peers().List(context.Background(), metav1.ListOptions{})
		}
		return errText(err)
	})
}

// create creates o, deletes it when the test ends, and returns the error.
func (a *apiServer) create(r dynamic.ResourceInterface, o *unstructured.Unstructured) error {
	a.t.Helper()
	_, err := r.Create(a.t.Context(), o, metav1.CreateOptions{})
	if err == nil {
		a.t.Cleanup(func() { a.delete(r, o.GetName()) })
	}
	return err
}

func (a *apiServer) delete(r dynamic.ResourceInterface, name string) {
	a.t.Helper()
	// The test's own context has ended when it cleans up.
	if err := r.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		a.t.Error(err)
	}
}

func (a *apiServer) patch(r dynamic.ResourceInterface, name, patch string, subresource ...string) *unstructured.Unstructured {
	a.t.Helper()
	o, err := r.Patch(a.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresource...)
	if err != nil {
		a.t.Fatal(err)
	}
	return o
}

func newNode(name string, a annotations, podCIDR string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Node", "spec": map[string]any{"podCIDRs": []any{podCIDR}, "podCIDR": podCIDR}}}
	o.SetName(name)
	o.SetAnnotations(a)
	return o
}

func newPeer(name string, spec map[string]any) *unstructured.Unstructured {
	o := unstructuredPeer(name, spec)
	unstructured.RemoveNestedField(o.Object, "metadata", "uid")
	unstructured.RemoveNestedField(o.Object, "metadata", "resourceVersion")
	return o
}

// started is a Cluster that runs until the test ends.
type started struct {
	*Cluster
	pokes *atomic.Int64
	stop  func()
}

func (a *apiServer) start(nodeName string) started {
	a.t.Helper()
	pokes := new(atomic.Int64)
	c, err := New(a.config, Options{
		NodeName: nodeName, TopologyLabel: topologyLabel, Poke: func() { pokes.Add(1) },
		Log: slog.New(slog.NewTextHandler(a.t.Output(), nil)),
	})
	if err != nil {
		a.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop := func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				a.t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			a.t.Error("Run does not end")
		}
	}
	return started{c, pokes, stop}
}

func (s started) sync(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := s.WaitForSync(ctx); err != nil {
		t.Fatal(err)
	}
}

// node returns what a Snapshot says of the Node, and its problems.
func (s started) node(name string) (mesh.Node, []mesh.Problem) {
	snap := s.Snapshot()
	for _, n := range snap.Nodes {
		if n.Name == name {
			return n, problemsWith(snap, "node/"+name)
		}
	}
	return mesh.Node{}, nil
}

// peer returns what a Snapshot says of the Peer, and its problems.
func (s started) peer(name string) (mesh.Peer, []mesh.Problem) {
	snap := s.Snapshot()
	for _, p := range snap.Peers {
		if p.Name == name {
			return p, problemsWith(snap, "peer/"+name)
		}
	}
	return mesh.Peer{}, problemsWith(snap, "peer/"+name)
}

func problemsWith(s mesh.Snapshot, object string) []mesh.Problem {
	return slices.DeleteFunc(slices.Clone(s.Problems), func(p mesh.Problem) bool { return p.Object != object })
}

// eventually waits until check returns "".
func eventually(t *testing.T, what string, check func() string) {
	t.Helper()
	end := time.Now().Add(patience)
	for {
		why := check()
		if why == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not after %s: %s", what, patience, why)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// unless returns a description of a peer unless it is there, or not, with so many problems.
func unless(p mesh.Peer, problems []mesh.Problem) func(there bool, n int) string {
	return func(there bool, n int) string {
		if (p.Name != "") == there && len(problems) == n {
			return ""
		}
		return fmt.Sprintf("peer %+v, problems %v", p, problems)
	}
}

func randomKey() string {
	var k mesh.PublicKey
	_, _ = rand.Read(k[:])
	return k.String()
}

// quiet waits until half a second passes without a poke.
func quiet(t *testing.T, s started) {
	t.Helper()
	last := int64(-1)
	eventually(t, "no more pokes", func() string {
		time.Sleep(500 * time.Millisecond)
		if now := s.pokes.Load(); now != last {
			last = now
			return "still"
		}
		return ""
	})
}

// gate is a proxy before an API server that can be closed.
type gate struct {
	config *rest.Config
	server *httptest.Server
	shut   atomic.Bool
}

func (a *apiServer) gate() *gate {
	a.t.Helper()
	transport, err := rest.TransportFor(a.config)
	if err != nil {
		a.t.Fatal(err)
	}
	target, err := url.Parse(a.config.Host)
	if err != nil {
		a.t.Fatal(err)
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:     transport,
		FlushInterval: -1, // watches are streams
		ErrorLog:      slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	g := &gate{}
	g.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if g.shut.Load() {
			http.Error(w, "closed", http.StatusServiceUnavailable)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	g.config = &rest.Config{Host: g.server.URL}
	a.t.Cleanup(func() {
		g.server.CloseClientConnections()
		g.server.Close()
	})
	return g
}

// close refuses requests and cuts the watches.
func (g *gate) close() {
	g.shut.Store(true)
	g.server.CloseClientConnections()
}

func (g *gate) open() { g.shut.Store(false) }
