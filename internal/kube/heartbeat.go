// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// The heartbeat of releases up to 0.7 is a time in the annotation last-seen of
// each Node. Agents here write it only if asked to.
const (
	heartbeatInterval = 30 * time.Second
	// silence is how long a node that has a heartbeat may miss it, as those releases have it.
	silence = 2 * heartbeatInterval
	// silenceLook lies between two looks at who fell silent.
	silenceLook = 5 * time.Second
)

// heartbeatPresent stands for any heartbeat of the own node in cachedNode: that
// it is there matters, and each new one would cost a pass. One that an earlier
// release left must go, for a heartbeat that stays the same is that of a dead node.
const heartbeatPresent = ""

// heartbeats judges which nodes live. The written times say nothing, for clocks
// differ: what counts is when a value was seen to change here. The clock is that of the
// news about nodes, whichever they are: while none come, nobody falls silent.
type heartbeats struct {
	now func() time.Time

	mu     sync.Mutex
	nodes  map[string]heartbeat
	newest time.Time // when the last news came
	lost   bool      // whether news were missed
}

type heartbeat struct {
	value string
	at    time.Time
}

func newHeartbeats() *heartbeats {
	return &heartbeats{now: time.Now, nodes: map[string]heartbeat{}} //nolint:forbidigo // the only clock here
}

// saw takes note of news about a node. One without a heartbeat never falls silent.
func (h *heartbeats) saw(name, value string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.newest = h.now()
	switch old, known := h.nodes[name]; {
	case value == "":
		delete(h.nodes, name)
	case !known || old.value != value:
		h.nodes[name] = heartbeat{value, h.newest}
	}
}

func (h *heartbeats) forget(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.nodes, name)
}

// heard takes note of whether the API server answers. Nobody could write
// while it did not, so all have their time again afterwards.
func (h *heartbeats) heard(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil && h.lost {
		for name, b := range h.nodes {
			b.at = h.now()
			h.nodes[name] = b
		}
	}
	h.lost = err != nil
}

// silent returns the nodes that fell silent.
func (h *heartbeats) silent() map[string]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out map[string]bool
	for name, b := range h.nodes {
		if h.newest.Sub(b.at) > silence {
			if out == nil {
				out = map[string]bool{}
			}
			out[name] = true
		}
	}
	return out
}

// watchSilence pokes when a node falls silent or speaks again, until ctx ends.
func (c *Cluster) watchSilence(ctx context.Context) {
	tick := time.NewTicker(silenceLook)
	defer tick.Stop()
	before := c.beats.silent()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		after := c.beats.silent()
		if !maps.Equal(before, after) {
			c.options.Log.Info("nodes without a heartbeat", "nodes", slices.Sorted(maps.Keys(after)))
			c.options.Poke()
		}
		before = after
	}
}

// beat writes the heartbeat of the own node until ctx ends.
func (c *Cluster) beat(ctx context.Context) {
	tick := time.NewTicker(heartbeatInterval)
	defer tick.Stop()
	failed := false
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		err := c.beatOnce(ctx)
		if (err != nil) != failed && ctx.Err() == nil {
			if failed = err != nil; failed {
				c.options.Log.Warn("heartbeat not written, will be tried again", "error", err)
			} else {
				c.options.Log.Info("heartbeat written again")
			}
		}
	}
}

// beatOnce writes one heartbeat, unless the node has published nothing, or no more.
func (c *Cluster) beatOnce(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	own := c.own()
	if own == nil || own.annotations[AnnotationKey] == "" {
		return nil
	}
	var node corev1.Node
	if err := c.patch(ctx, map[string]*string{annotationLastSeen: c.heartbeat()}, &node); err != nil {
		return err
	}
	c.published = newCachedNode(&node, c.options.TopologyLabel, true)
	return nil
}

// heartbeat is the value of the annotation: Unix time in seconds.
func (c *Cluster) heartbeat() *string { return new(strconv.FormatInt(c.beats.now().Unix(), 10)) }
