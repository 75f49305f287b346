// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/kilomesh/kilo/api/v1alpha1"
	"github.com/kilomesh/kilo/internal/mesh"
)

// Options of a Cluster.
type Options struct {
	// NodeName is the name of the own Node, "" for a program that is on none:
	// then a Snapshot has no Self and nothing can be published.
	NodeName string
	// TopologyLabel names the Node label that holds the location.
	TopologyLabel string
	// Heartbeat makes the own Node look alive to agents of releases up to 0.7, at
	// the price of a write every 30 s that all nodes hear of.
	Heartbeat bool
	// Log is required.
	Log *slog.Logger
	// Poke is called whenever a new Snapshot may differ from the last one. It
	// must not block; nil for a program that does not care.
	Poke func()
}

// Cluster is a connection to the API server. Its methods may be called from
// several goroutines.
type Cluster struct {
	options      Options
	core         rest.Interface
	nodes, peers cache.SharedIndexInformer
	crd          *crdWatch
	beats        *heartbeats
	events       atomic.Pointer[record.EventRecorder] // nil unless Run runs

	mu        sync.Mutex
	published *cachedNode // what our last write returned, until the cache is as new
}

// New prepares a Cluster for the API server of config, and sends nothing yet.
func New(config *rest.Config, o Options) (*Cluster, error) {
	if o.Log == nil {
		return nil, errors.New("kube: no logger")
	}
	if o.Poke == nil {
		o.Poke = func() {}
	}
	c := &Cluster{options: o, beats: newHeartbeats()}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("API server client: %w", err)
	}
	config = rest.CopyConfig(config)
	if config.WarningHandler == nil && config.WarningHandlerWithContext == nil {
		config.WarningHandlerWithContext = warnings{o.Log}
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("API server client: %w", err)
	}
	core := rest.CopyConfig(config)
	core.APIPath = "/api"
	core.GroupVersion = &corev1.SchemeGroupVersion
	core.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	core.ContentType = runtime.ContentTypeProtobuf
	core.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	if c.core, err = rest.RESTClientForConfigAndClient(core, client); err != nil {
		return nil, fmt.Errorf("API server client: %w", err)
	}
	dyn, err := dynamic.NewForConfigAndClient(config, client)
	if err != nil {
		return nil, fmt.Errorf("API server client: %w", err)
	}
	c.crd = &crdWatch{client: c.core, log: o.Log, poke: o.Poke}
	if err := c.newInformers(dyn); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *Cluster) newInformers(dyn dynamic.Interface) error {
	reach := &reachability{log: c.options.Log, resource: "nodes"}
	seenNodes := func(ctx context.Context, err error) {
		reach.report(ctx, err)
		c.beats.heard(err)
	}
	nodes := cache.NewFilteredListWatchFromClient(c.core, "nodes", metav1.NamespaceAll, func(*metav1.ListOptions) {})
	c.nodes = cache.NewSharedIndexInformerWithOptions(observed(nodes, seenNodes), &corev1.Node{}, cache.SharedIndexInformerOptions{})

	peersReach := &reachability{log: c.options.Log, resource: v1alpha1.PeerResource}
	resource := dyn.Resource(v1alpha1.GroupVersion().WithResource(v1alpha1.PeerResource))
	peers := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return resource.List(ctx, o)
		},
		WatchFuncWithContext: resource.Watch,
	}
	seen := func(ctx context.Context, err error) {
		if !c.crd.report(ctx, err) {
			peersReach.report(ctx, err)
		}
	}
	c.peers = cache.NewSharedIndexInformerWithOptions(observed(peers, seen), &unstructured.Unstructured{}, cache.SharedIndexInformerOptions{})

	// observed has reported every error already.
	quiet := func(context.Context, *cache.Reflector, error) {}
	_, err1 := c.nodes.AddEventHandler(handlers(c.options.Poke, (*cachedNode).same, c.beats.forget))
	_, err2 := c.peers.AddEventHandler(handlers(c.options.Poke, (*cachedPeer).same, func(string) {}))
	err := errors.Join(err1, err2,
		c.nodes.SetTransform(c.transformNode), c.nodes.SetWatchErrorHandlerWithContext(quiet),
		c.peers.SetTransform(transformPeer), c.peers.SetWatchErrorHandlerWithContext(quiet))
	if err != nil {
		return fmt.Errorf("informers: %w", err)
	}
	return nil
}

// transformNode is a cache.TransformFunc.
func (c *Cluster) transformNode(o any) (any, error) {
	if node, ok := o.(*corev1.Node); ok {
		c.beats.saw(node.Name, node.Annotations[annotationLastSeen])
		return newCachedNode(node, c.options.TopologyLabel, node.Name == c.options.NodeName), nil
	}
	return o, nil
}

// transformPeer is a cache.TransformFunc.
func transformPeer(o any) (any, error) {
	if u, ok := o.(*unstructured.Unstructured); ok {
		return newCachedPeer(u), nil
	}
	return o, nil
}

// Run keeps the caches filled until ctx is done and all its goroutines have
// ended. It must be called once; whatever fails in between is retried and
// logged, with up to a minute between two tries.
func (c *Cluster) Run(ctx context.Context) error {
	// client-go's own messages, too, go to our logger.
	ctx = klog.NewContext(ctx, logr.FromSlogHandler(c.options.Log.Handler()))
	defer c.recordEvents(ctx)()
	var wg sync.WaitGroup
	wg.Go(func() { c.nodes.RunWithContext(ctx) })
	wg.Go(func() { c.peers.RunWithContext(ctx) })
	wg.Go(func() { c.watchSilence(ctx) })
	if c.options.Heartbeat {
		wg.Go(func() { c.beat(ctx) })
	}
	wg.Wait()
	return nil
}

// WaitForSync blocks until a Snapshot is whole: the API server has told of all
// Nodes and all Peers, or that it knows no Peers because their
// CustomResourceDefinition is missing. Its error is that of ctx.
func (c *Cluster) WaitForSync(ctx context.Context) error {
	peersSynced := func() bool { return c.peers.HasSynced() || c.crd.missing() }
	if !cache.WaitForCacheSync(ctx.Done(), c.nodes.HasSynced, peersSynced) {
		return fmt.Errorf("wait for the nodes and peers of the API server: %w", context.Cause(ctx))
	}
	return nil
}

// Snapshot returns the cluster as the API server last told it; call WaitForSync
// before the first one. Nodes and Peers are sorted by name, Problems by object,
// Nodes first. A Peer with a fault is left out, and so is one that has the
// public key of an older one. The caller must not change what slices hold.
func (c *Cluster) Snapshot() mesh.Snapshot {
	var peers []*cachedPeer
	missing := c.crd.missing()
	if !missing {
		peers = listed[*cachedPeer](c.peers.GetStore())
	}
	s := snapshot(listed[*cachedNode](c.nodes.GetStore()), peers)
	silent := c.beats.silent()
	for i := range s.Nodes {
		s.Nodes[i].Silent = silent[s.Nodes[i].Name]
	}
	if missing {
		s.Problems = append(s.Problems, crdProblem())
	}
	return s
}
