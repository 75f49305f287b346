// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// TestAPIEvents: whoever describes an object finds what is wrong with it.
func TestAPIEvents(t *testing.T) {
	a := api(t)
	a.applyCRD()
	own := a.name("own")
	node := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": own}}}
	if err := a.create(a.nodes(), node); err != nil {
		t.Fatal(err)
	}
	s := a.start(own)
	defer s.stop()
	s.sync(t)
	s.Warn("node/"+own, "KiloProblem", "one")
	s.Warn("node/"+own, "KiloProblem", "one")
	s.Warn("peer/"+a.name("nobody"), "KiloProblem", "two")
	events := a.Resource(schema.GroupVersionResource{Version: "v1", Resource: "events"}).Namespace("default")
	made, err := a.nodes().Get(t.Context(), own, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "events of the node", func() string {
		list, err := events.List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + own})
		if err != nil {
			return err.Error()
		}
		var texts []string
		for _, e := range list.Items {
			message, _, _ := unstructured.NestedString(e.Object, "message")
			count, _, _ := unstructured.NestedInt64(e.Object, "count")
			of, _, _ := unstructured.NestedString(e.Object, "involvedObject", "uid")
			if of != string(made.GetUID()) {
				return "an event is of another object: " + of
			}
			texts = append(texts, fmt.Sprint(count, " ", message))
		}
		if all := strings.Join(texts, "\n"); len(texts) != 2 || !strings.Contains(all, "2 one") || !strings.Contains(all, "1 peer/"+a.name("nobody")+": two") {
			return fmt.Sprintf("events %q", texts)
		}
		return ""
	})
}
