// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/kilomesh/kilo/api/v1alpha1"
)

// Warn records an Event of type Warning about an object, named as in
// mesh.Problem.Object: "node/a", "peer/laptop". One that is neither, or unknown,
// is told of at the own Node. It does not wait: events are sent while Run runs,
// those of one object that come too fast are left out, and those that the API server never takes are lost.
func (c *Cluster) Warn(object, reason, message string) {
	recorder := c.events.Load()
	if recorder == nil {
		return
	}
	ref := c.reference(object)
	if ref == nil {
		if ref = c.reference("node/" + c.options.NodeName); ref == nil {
			return
		}
		message = object + ": " + message
	}
	(*recorder).Event(ref, corev1.EventTypeWarning, reason, message)
}

// reference names an object for an Event, nil if it is not in the caches.
func (c *Cluster) reference(object string) *corev1.ObjectReference {
	kind, name, _ := strings.Cut(object, "/")
	var store cache.Store
	ref := &corev1.ObjectReference{Name: name}
	switch kind {
	case "node":
		store, ref.Kind, ref.APIVersion = c.nodes.GetStore(), "Node", "v1"
	case "peer":
		store, ref.Kind, ref.APIVersion = c.peers.GetStore(), "Peer", v1alpha1.GroupVersion().String()
	default:
		return nil
	}
	item, _, _ := store.GetByKey(name)
	known, ok := item.(metav1.Object)
	if !ok {
		return nil
	}
	ref.UID = known.GetUID()
	return ref
}

// recordEvents sends events until ctx ends and the returned function is called.
func (c *Cluster) recordEvents(ctx context.Context) (end func()) {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(eventSink{ctx, c.core})
	recorder := record.EventRecorder(broadcaster.NewRecorder(runtime.NewScheme(), corev1.EventSource{Component: "kilo", Host: c.options.NodeName}))
	c.events.Store(&recorder)
	return func() {
		c.events.Store(nil)
		broadcaster.Shutdown()
	}
}

// eventSink implements record.EventSink. The interface has no contexts.
type eventSink struct {
	ctx  context.Context //nolint:containedctx // see above
	core rest.Interface
}

// Create implements record.EventSink.
func (s eventSink) Create(e *corev1.Event) (*corev1.Event, error) {
	return s.send(s.core.Post().Body(e), e.Namespace)
}

// Update implements record.EventSink.
func (s eventSink) Update(e *corev1.Event) (*corev1.Event, error) {
	return s.send(s.core.Put().Name(e.Name).Body(e), e.Namespace)
}

// Patch implements record.EventSink.
func (s eventSink) Patch(old *corev1.Event, data []byte) (*corev1.Event, error) {
	return s.send(s.core.Patch(types.StrategicMergePatchType).Name(old.Name).Body(data), old.Namespace)
}

func (s eventSink) send(r *rest.Request, namespace string) (*corev1.Event, error) {
	var out corev1.Event
	err := r.Namespace(namespace).Resource("events").Do(s.ctx).Into(&out)
	return &out, err
}
