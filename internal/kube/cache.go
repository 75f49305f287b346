// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/cache"

	"github.com/kilomesh/kilo/api/v1alpha1"
	"github.com/kilomesh/kilo/internal/mesh"
)

// cachedNode is what the cache holds of a Node: what ParseNode made of it.
type cachedNode struct {
	metav1.ObjectMeta // as in identity
	node              mesh.Node
	problems          []mesh.Problem
	// The own node alone has these: what it declares, and those of the
	// publishedAnnotations that it carries.
	declared    *mesh.Declared
	annotations map[string]string
}

// newCachedNode parses node; own says that it is the own one.
func newCachedNode(node *corev1.Node, topologyLabel string, own bool) *cachedNode {
	c := &cachedNode{ObjectMeta: identity(node)}
	var declared mesh.Declared
	c.node, declared, c.problems = ParseNode(node, topologyLabel)
	if own {
		c.declared = &declared
		c.annotations = make(map[string]string)
		for _, key := range publishedAnnotations() {
			v, ok := node.Annotations[key]
			if !ok {
				continue
			}
			if key == annotationLastSeen {
				v = heartbeatPresent
			}
			c.annotations[key] = v
		}
	}
	return c
}

func (c *cachedNode) same(o *cachedNode) bool {
	return c.UID == o.UID && reflect.DeepEqual(c.node, o.node) && slices.EqualFunc(c.problems, o.problems, sameProblem) &&
		reflect.DeepEqual(c.declared, o.declared) && maps.Equal(c.annotations, o.annotations)
}

// cachedPeer is what the cache holds of a Peer: what ParsePeer made of it, or
// the problems why it made nothing.
type cachedPeer struct {
	metav1.ObjectMeta // as in identity
	peer              mesh.Peer
	problems          []mesh.Problem
}

// newCachedPeer parses u. Peers are decoded one by one, and not by the client:
// a number that fits the schema but no Go type would fail a typed list as a whole.
func newCachedPeer(u *unstructured.Unstructured) *cachedPeer {
	c := &cachedPeer{ObjectMeta: identity(u)}
	var peer v1alpha1.Peer
	text, err := u.MarshalJSON()
	if err == nil {
		err = json.Unmarshal(text, &peer)
	}
	if err != nil {
		err = fmt.Errorf("want the types of the CustomResourceDefinition: %w", err)
		c.problems = []mesh.Problem{{Object: peerObject(c.Name), Field: "spec", Err: err}}
		return c
	}
	c.peer, err = ParsePeer(&peer)
	c.problems = problemsOf(err)
	return c
}

func (c *cachedPeer) same(o *cachedPeer) bool {
	return c.UID == o.UID && reflect.DeepEqual(c.peer, o.peer) && slices.EqualFunc(c.problems, o.problems, sameProblem)
}

func sameProblem(a, b mesh.Problem) bool { return a.Error() == b.Error() }

// identity returns the metadata that the caches need.
func identity(o metav1.Object) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name:              o.GetName(),
		UID:               o.GetUID(),
		ResourceVersion:   o.GetResourceVersion(),
		CreationTimestamp: o.GetCreationTimestamp(),
	}
}

// handlers poke unless an update leaves an object the same. deleted gets the
// names of objects that are gone.
func handlers[T any](poke func(), same func(a, b T) bool, deleted func(name string)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { poke() },
		UpdateFunc: func(before, after any) {
			b, okB := before.(T)
			a, okA := after.(T)
			if !okA || !okB || !same(a, b) {
				poke()
			}
		},
		DeleteFunc: func(o any) {
			if name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(o); err == nil {
				deleted(name)
			}
			poke()
		},
	}
}

// listed returns the objects of a store by name.
func listed[T metav1.Object](store cache.Store) []T {
	items := store.List()
	out := make([]T, 0, len(items))
	for _, item := range items {
		if t, ok := item.(T); ok {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b T) int { return cmp.Compare(a.GetName(), b.GetName()) })
	return out
}

// snapshot puts together what the caches hold.
func snapshot(nodes []*cachedNode, peers []*cachedPeer) mesh.Snapshot {
	s := mesh.Snapshot{Nodes: make([]mesh.Node, 0, len(nodes)), Peers: make([]mesh.Peer, 0, len(peers))}
	for _, n := range nodes {
		s.Nodes = append(s.Nodes, n.node)
		s.Problems = append(s.Problems, n.problems...)
		if n.declared != nil {
			d := *n.declared
			s.Self = &d
		}
	}
	owners := keyOwners(peers)
	for _, p := range peers {
		s.Problems = append(s.Problems, p.problems...)
		if len(p.problems) > 0 {
			continue
		}
		if o := owners[p.peer.Key]; o != p {
			s.Problems = append(s.Problems, mesh.Problem{
				Object: peerObject(p.Name), Field: "spec.publicKey",
				Err: fmt.Errorf("key %q: want one of its own, and peer %s, which is older, has it already", p.peer.Key, o.Name),
			})
			continue
		}
		s.Peers = append(s.Peers, p.peer)
	}
	return s
}

// keyOwners says which of the good peers a key belongs to: the oldest, then the
// first by name. A device knows a peer by its key alone.
func keyOwners(peers []*cachedPeer) map[mesh.PublicKey]*cachedPeer {
	owners := make(map[mesh.PublicKey]*cachedPeer, len(peers))
	for _, p := range peers {
		if len(p.problems) > 0 {
			continue
		}
		// The peers come by name, so of two with the same age the first stays.
		if o := owners[p.peer.Key]; o == nil || p.CreationTimestamp.Before(&o.CreationTimestamp) {
			owners[p.peer.Key] = p
		}
	}
	return owners
}
