// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
)

const (
	// refreshInterval is how often a known name is looked up again.
	refreshInterval = 30 * time.Second
	// lookupTimeout bounds one look-up.
	lookupTimeout = 5 * time.Second
	// retryInterval is how often the name of an endpoint without an address is looked up.
	retryInterval = 5 * time.Second
)

// resolver looks DNS names up in the background; nobody ever waits for it. A
// name keeps its last address while its look-up fails.
type resolver struct {
	log    *slog.Logger
	poke   func()
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	wake   chan struct{}

	mu    sync.Mutex
	names map[string]*name
}

type name struct {
	addr netip.Addr
	due  time.Time
	// failed is set while the last look-up failed.
	failed bool
}

func newResolver(log *slog.Logger, poke func()) *resolver {
	return &resolver{
		log: log, poke: poke, wake: make(chan struct{}, 1), names: map[string]*name{},
		lookup: func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		},
	}
}

// resolve fills in the addresses that are known so far and has the others
// looked up. Names that no endpoint has any more are forgotten.
func (r *resolver) resolve(nodes []mesh.Node, peers []mesh.Peer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	wanted := map[string]*name{}
	added := false
	fill := func(e *mesh.Endpoint) {
		if e.DNS == "" {
			return
		}
		n := r.names[e.DNS]
		if n == nil {
			n, added = &name{addr: e.Resolved}, true // which an earlier run found
			r.names[e.DNS] = n
		}
		wanted[e.DNS] = n
		e.Resolved = n.addr
	}
	for i := range nodes {
		fill(&nodes[i].Endpoint)
	}
	for i := range peers {
		fill(&peers[i].Endpoint)
	}
	r.names = wanted
	if added {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
}

// run looks up what is due until ctx ends.
func (r *resolver) run(ctx context.Context) {
	for {
		next := r.lookUpDue(ctx)
		t := time.NewTimer(next)
		select {
		case <-t.C:
		case <-r.wake:
		case <-ctx.Done():
			t.Stop()
			return
		}
		t.Stop()
	}
}

// lookUpDue looks up all names that are due, side by side, and returns the time until the next is.
func (r *resolver) lookUpDue(ctx context.Context) time.Duration {
	now := time.Now()
	next := refreshInterval
	var due []string
	r.mu.Lock()
	for host, n := range r.names {
		if !n.due.After(now) {
			due = append(due, host)
		} else {
			next = min(next, n.due.Sub(now))
		}
	}
	r.mu.Unlock()
	if len(due) == 0 {
		return next
	}
	limit := make(chan struct{}, 16)
	var running sync.WaitGroup
	for _, host := range due {
		limit <- struct{}{}
		running.Go(func() {
			defer func() { <-limit }()
			r.lookUp(ctx, host)
		})
	}
	running.Wait()
	return min(next, retryInterval)
}

func (r *resolver) lookUp(ctx context.Context, host string) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	addrs, err := r.lookup(ctx, host)
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.names[host]
	if n == nil {
		return
	}
	if err != nil || len(addrs) == 0 {
		if !n.failed {
			r.log.Warn("endpoint's name not resolved, will be tried again", "name", host, "error", err)
		}
		n.failed, n.due = true, time.Now().Add(retryInterval)
		return
	}
	n.failed, n.due = false, time.Now().Add(refreshInterval)
	if addr := choose(addrs, n.addr); addr != n.addr {
		r.log.Info("endpoint's name resolved", "name", host, "address", addr)
		n.addr = addr
		r.poke()
	}
}

// choose keeps the current address while the name has it, so that a name with
// several does not make the endpoint jump; else the first by family and value.
func choose(addrs []netip.Addr, current netip.Addr) netip.Addr {
	var best netip.Addr
	for _, a := range addrs {
		a = a.Unmap()
		if a == current {
			return a
		}
		if !best.IsValid() || a.Less(best) {
			best = a
		}
	}
	return best
}
