// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/kilomesh/kilo/internal/mesh"
)

// Publish writes p into the annotations of the own Node, in one request and
// only if the API server is not known to have it already; changed says that it
// wrote. Other annotations stay as they are. After an error nothing is taken
// for published: call it again. The error is fs.ErrNotExist if there is no such
// Node, or the cache does not have it yet.
func (c *Cluster) Publish(ctx context.Context, p mesh.Publication) (changed bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.own()
	if own == nil {
		return false, fmt.Errorf("publish: node %q: %w", c.options.NodeName, fs.ErrNotExist)
	}
	want := annotationsOf(p)
	if c.options.Heartbeat {
		want[annotationLastSeen] = heartbeatPresent
	}
	patch := difference(own.annotations, want)
	if len(patch) == 0 {
		return false, nil
	}
	if c.options.Heartbeat {
		patch[annotationLastSeen] = c.heartbeat()
	}
	var node corev1.Node
	if err := c.patch(ctx, patch, &node); err != nil {
		if apierrors.IsNotFound(err) {
			err = errors.Join(fs.ErrNotExist, err)
		}
		return false, fmt.Errorf("publish: node %q: %w", c.options.NodeName, err)
	}
	c.published = newCachedNode(&node, c.options.TopologyLabel, true)
	c.options.Log.Info("annotations published", "node", c.options.NodeName, "annotations", slices.Sorted(maps.Keys(patch)))
	return true, nil
}

// Withdraw removes all annotations that Kilo writes, those of releases up to
// 0.7 included, from the own Node. What is gone already, even the Node, is no
// error. It needs no cache, so it may be called after Run has ended.
func (c *Cluster) Withdraw(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.options.NodeName == "" {
		return nil
	}
	patch := make(map[string]*string)
	for _, key := range publishedAnnotations() {
		patch[key] = nil
	}
	var node corev1.Node
	err := c.patch(ctx, patch, &node)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("withdraw: node %q: %w", c.options.NodeName, err)
	}
	c.published = newCachedNode(&node, c.options.TopologyLabel, true)
	return nil
}

// own returns the newest that is known of the own node, nil for nothing. The
// cache lags behind our own writes: asking it alone would repeat them.
func (c *Cluster) own() *cachedNode {
	item, _, _ := c.nodes.GetStore().GetByKey(c.options.NodeName)
	cached, ok := item.(*cachedNode)
	if !ok {
		return nil
	}
	if c.published != nil && c.published.UID == cached.UID {
		if order, err := resourceversion.CompareResourceVersion(c.published.ResourceVersion, cached.ResourceVersion); err == nil && order > 0 {
			return c.published
		}
	}
	c.published = nil
	return cached
}

// patch sets annotations of the own node, and removes those that are nil.
//
// It is a JSON merge patch (RFC 7386): keys that it does not name stay, null
// removes, also what is not there, and a Node without annotations is as good
// as any. Server-side apply would not do in a cluster where nodes move from an
// earlier release: that one wrote the same keys under another manager's name,
// and apply removes no key that another manager owns, too.
func (c *Cluster) patch(ctx context.Context, annotations map[string]*string, into *corev1.Node) error {
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return err
	}
	return c.core.Patch(types.MergePatchType).Resource("nodes").Name(c.options.NodeName).
		VersionedParams(&metav1.PatchOptions{FieldManager: "kilo"}, metav1.ParameterCodec).
		Body(body).Do(ctx).Into(into)
}

// difference returns the patch that makes the publishedAnnotations in have like want.
func difference(have, want map[string]string) map[string]*string {
	patch := make(map[string]*string)
	for _, key := range publishedAnnotations() {
		h, has := have[key]
		w, wants := want[key]
		switch {
		case wants && (!has || h != w):
			patch[key] = &w
		case has && !wants:
			patch[key] = nil
		}
	}
	return patch
}

// annotationsOf returns the annotations that say p. Those of publishedAnnotations
// that it lacks must not be there. Earlier releases expect internal-ip and
// wireguard-ip always, empty if there is no address.
func annotationsOf(p mesh.Publication) map[string]string {
	a := make(map[string]string)
	set := func(key, value string) {
		if value != "" {
			a[key] = value
		}
	}
	set(AnnotationKey, p.Key.String())
	set(AnnotationEndpoint, p.Endpoint.String())
	set(AnnotationGranularity, string(p.Granularity))
	var second string
	a[AnnotationInternalIP], second = pair(p.InternalIPs)
	set(AnnotationInternalIPv6, second)
	a[AnnotationWireGuardIP], second = pair(p.WireGuardIPs)
	set(AnnotationWireGuardIPv6, second)
	first, second := pair(p.LocationIPs)
	set(AnnotationLocationIP, first)
	set(AnnotationLocationIPv6, second)
	first, second = pair(p.CNICompatibilityIPs)
	set(AnnotationCNICompatibilityIP, first)
	set(AnnotationCNICompatibilityIPv6, second)
	return a
}

// pair returns the text of the first prefix of each family, IPv4 first; second
// is "" unless there are both.
func pair(ips []netip.Prefix) (first, second string) {
	var v4, v6 string
	for _, ip := range ips {
		switch {
		case ip.Addr().Is4() && v4 == "":
			v4 = ip.String()
		case ip.Addr().Is6() && v6 == "":
			v6 = ip.String()
		}
	}
	if v4 == "" {
		return v6, ""
	}
	return v4, v6
}
