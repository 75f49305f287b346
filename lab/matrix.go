// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// Cell is whether one place reaches one pod by one of its addresses.
type Cell struct {
	// Kind of From: "pod" or "node".
	Kind string     `json:"kind"`
	From string     `json:"from"`
	To   string     `json:"to"`
	Addr netip.Addr `json:"addr"`
	// RTT is the round-trip time; it means nothing if there is an error.
	RTT time.Duration `json:"rttNanoseconds"`
	// Error is "" if the pod was reached.
	Error string `json:"error,omitempty"`
}

// Matrix is the result of every pod and every node pinging every pod.
type Matrix struct {
	Cells []Cell `json:"cells"`
}

// Failed returns the cells that are not ok.
func (m Matrix) Failed() []Cell {
	var out []Cell
	for _, c := range m.Cells {
		if c.Error != "" {
			out = append(out, c)
		}
	}
	return out
}

// Err returns an error that names the first cells that failed.
func (m Matrix) Err() error {
	failed := m.Failed()
	if len(m.Cells) == 0 {
		return errors.New("there is no pod to reach")
	}
	if len(failed) == 0 {
		return nil
	}
	const shown = 3
	var some []string
	for _, c := range failed[:min(len(failed), shown)] {
		some = append(some, c.String())
	}
	if len(failed) > shown {
		some = append(some, "...")
	}
	return fmt.Errorf("%d of %d pairs fail: %s", len(failed), len(m.Cells), strings.Join(some, "; "))
}

// String describes the cell in one line.
func (c Cell) String() string {
	s := fmt.Sprintf("%s %s → pod %s (%v): ", c.Kind, c.From, c.To, c.Addr)
	if c.Error != "" {
		return s + c.Error
	}
	return s + c.RTT.Round(time.Microsecond).String()
}

// Matrix pings every pod from every pod and every node, once, all at the same
// time, and gives each timeout to answer.
func (l *Lab) Matrix(ctx context.Context, timeout time.Duration) Matrix {
	type source struct {
		kind  string
		place Place
	}
	var sources []source
	for _, p := range l.Pods() {
		sources = append(sources, source{"pod", p})
	}
	for _, h := range l.Hosts() {
		sources = append(sources, source{"node", h})
	}
	var targets []netip.Addr
	var names []string
	for _, p := range l.Pods() {
		for _, a := range p.Addrs() {
			targets = append(targets, a)
			names = append(names, p.Name())
		}
	}
	cells := make([]Cell, len(sources)*len(targets))
	var wg sync.WaitGroup
	for i, s := range sources {
		wg.Go(func() {
			for j, r := range sweepPings(ctx, s.place.Netns(), targets, timeout) {
				c := Cell{Kind: s.kind, From: s.place.Name(), To: names[j], Addr: targets[j], RTT: r.rtt}
				if r.err != nil {
					c.Error = r.err.Error()
				}
				cells[i*len(targets)+j] = c
			}
		})
	}
	wg.Wait()
	return Matrix{cells}
}

// WaitMatrix takes the matrix again and again until all of it is ok, at most
// for bound, and returns the last one. The error says what failed in it.
func (l *Lab) WaitMatrix(ctx context.Context, bound time.Duration) (Matrix, error) {
	var m Matrix
	err := WaitFor(ctx, fmt.Sprintf("every pod and node to reach every pod; logs: %s/*/kg.log", l.Dir), bound, func(ctx context.Context) error {
		if now := l.Matrix(ctx, time.Second); ctx.Err() == nil || m.Cells == nil {
			m = now // one that was cut short says little
		}
		return m.Err()
	})
	return m, err
}
