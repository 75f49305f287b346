// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/kilomesh/kilo/internal/mesh"
)

// patchServer answers PATCH requests for one Node as an API server does.
type patchServer struct {
	node    *corev1.Node
	patches []map[string]*string
	status  int // of all answers, if it is not 0
}

func (s *patchServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	body, _ := io.ReadAll(r.Body)
	switch {
	case s.status != 0:
		http.Error(w, "{}", s.status)
		return
	case r.Method != http.MethodPatch || r.URL.Path != "/api/v1/nodes/n" || r.Header.Get("Content-Type") != string(types.MergePatchType):
		http.Error(w, "{}", http.StatusNotAcceptable)
		return
	}
	var patch struct {
		Metadata struct{ Annotations map[string]*string }
	}
	if err := json.Unmarshal(body, &patch); err != nil {
		http.Error(w, "{}", http.StatusBadRequest)
		return
	}
	s.patches = append(s.patches, patch.Metadata.Annotations)
	s.touch(patch.Metadata.Annotations)
	_ = json.NewEncoder(w).Encode(s.node)
}

// touch makes a new version of the Node.
func (s *patchServer) touch(patch map[string]*string) {
	s.node = s.node.DeepCopy()
	rv, _ := strconv.Atoi(s.node.ResourceVersion)
	s.node.ResourceVersion = strconv.Itoa(rv + 1)
	for k, v := range patch {
		if v == nil {
			delete(s.node.Annotations, k)
			continue
		}
		if s.node.Annotations == nil {
			s.node.Annotations = annotations{}
		}
		s.node.Annotations[k] = *v
	}
}

// newPublisher returns a Cluster without a running watch; deliver does its work.
func newPublisher(t *testing.T, a annotations) (c *Cluster, s *patchServer, deliver func()) {
	t.Helper()
	node := testNode(a)
	node.UID, node.ResourceVersion = "u1", "9"
	s = &patchServer{node: node}
	srv := httptest.NewServer(s)
	t.Cleanup(srv.Close)
	c, err := New(&rest.Config{Host: srv.URL}, Options{NodeName: "n", TopologyLabel: topologyLabel, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	deliver = func() {
		t.Helper()
		o, err := c.transformNode(s.node)
		if err == nil {
			err = c.nodes.GetStore().Add(o)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return c, s, deliver
}

func publish(t *testing.T, c *Cluster, p mesh.Publication, wantChanged bool) {
	t.Helper()
	changed, err := c.Publish(t.Context(), p)
	if err != nil || changed != wantChanged {
		t.Fatalf("Publish: changed %t, error %v; want changed %t", changed, err, wantChanged)
	}
}

func leaderPublication(t *testing.T) mesh.Publication {
	return mesh.Publication{
		Key: testKey(t), Endpoint: mustEndpoint(t, "192.0.2.1:51820"), Granularity: mesh.GranularityLocation,
		InternalIPs: prefixes("fd00::5/64", "10.0.0.5/24"), WireGuardIPs: prefixes("10.4.0.1/16", "fd04::1/64"),
	}
}

func checkAnnotations(t *testing.T, want, got annotations) {
	t.Helper()
	if diff := cmp.Diff(want, got, compare()); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}

func TestPublishWritesOnceAndOnlyWhatDiffers(t *testing.T) {
	c, s, deliver := newPublisher(t, nil) // no annotations at all
	deliver()
	p := leaderPublication(t)
	publish(t, c, p, true)
	want := annotations{
		AnnotationKey: keyA, AnnotationEndpoint: "192.0.2.1:51820", AnnotationGranularity: "location",
		AnnotationInternalIP: "10.0.0.5/24", AnnotationInternalIPv6: "fd00::5/64",
		AnnotationWireGuardIP: "10.4.0.1/16", AnnotationWireGuardIPv6: "fd04::1/64",
	}
	checkAnnotations(t, want, s.node.Annotations)
	publish(t, c, p, false) // the cache lags behind
	deliver()
	publish(t, c, p, false)

	p.WireGuardIPs, p.InternalIPs = nil, prefixes("fd00::5/64")
	publish(t, c, p, true)
	want[AnnotationWireGuardIP], want[AnnotationInternalIP] = "", "fd00::5/64"
	delete(want, AnnotationWireGuardIPv6)
	delete(want, AnnotationInternalIPv6)
	checkAnnotations(t, want, s.node.Annotations)
	if len(s.patches) != 2 || len(s.patches[1]) != 4 {
		t.Errorf("patches %v: want two, and four keys in the second", s.patches)
	}
}

func TestPublishRepairsForeignEdits(t *testing.T) {
	c, s, deliver := newPublisher(t, annotations{"a": "b", AnnotationLocation: "x"})
	deliver()
	p := leaderPublication(t)
	publish(t, c, p, true)
	foreign := "foreign"
	s.touch(map[string]*string{AnnotationKey: &foreign, AnnotationGranularity: nil})
	publish(t, c, p, false) // not seen yet
	deliver()
	publish(t, c, p, true)
	want := annotations{AnnotationKey: keyA, AnnotationGranularity: "location", "a": "b", AnnotationLocation: "x"}
	got := annotations{}
	for k := range want {
		got[k] = s.node.Annotations[k]
	}
	checkAnnotations(t, want, got)
	if last := s.patches[len(s.patches)-1]; len(last) != 2 {
		t.Errorf("last patch %v: want the two foreign values alone", last)
	}
}

// TestPublishFailureIsNotRemembered is s10 of public bug reports.
func TestPublishFailureIsNotRemembered(t *testing.T) {
	c, s, deliver := newPublisher(t, nil)
	deliver()
	p := leaderPublication(t)
	s.status = http.StatusForbidden
	if changed, err := c.Publish(t.Context(), p); err == nil || changed {
		t.Fatalf("Publish: changed %t, error %v; want an error", changed, err)
	}
	s.status = 0
	publish(t, c, p, true)
}

func TestPublishToNodeThatWasReplaced(t *testing.T) {
	c, s, deliver := newPublisher(t, nil)
	deliver()
	p := leaderPublication(t)
	publish(t, c, p, true)
	s.node = testNode(nil)
	s.node.UID, s.node.ResourceVersion = "u2", "3" // another one, whatever the version
	deliver()
	publish(t, c, p, true)
}

func TestPublishWithoutNode(t *testing.T) {
	c, s, _ := newPublisher(t, nil)
	if _, err := c.Publish(t.Context(), leaderPublication(t)); !errors.Is(err, fs.ErrNotExist) || len(s.patches) > 0 {
		t.Errorf("error %v, patches %v; want fs.ErrNotExist and none", err, s.patches)
	}
}

func TestWithdraw(t *testing.T) {
	foreign := annotations{"a": "b", AnnotationLocation: "x", AnnotationForceEndpoint: "192.0.2.1:51820"}
	all := annotations{}
	for _, k := range publishedAnnotations() {
		all[k] = "v"
	}
	maps.Copy(all, foreign)
	c, s, deliver := newPublisher(t, all)
	for range 2 { // again, when all is absent
		if err := c.Withdraw(t.Context()); err != nil {
			t.Fatal(err)
		}
		checkAnnotations(t, foreign, s.node.Annotations)
	}
	deliver()
	publish(t, c, leaderPublication(t), true)

	s.status = http.StatusNotFound
	if err := c.Withdraw(t.Context()); err != nil {
		t.Errorf("a missing node: %v", err)
	}
	s.status = http.StatusForbidden
	if err := c.Withdraw(t.Context()); err == nil {
		t.Error("no error of a request that was refused")
	}
}
