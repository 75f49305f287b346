// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"
)

// Flood is a stream of pings at a fixed interval.
type Flood struct {
	pinger *pinger
	to     netip.Addr
	cancel context.CancelFunc
	done   sync.WaitGroup

	mu       sync.Mutex
	sent     int
	answered map[int]int // by number of the request: how often
	last     time.Time   // of the newest reply, at first of the start
	worst    time.Duration
	sendErr  error
}

// FloodResult is what came of a Flood.
type FloodResult struct {
	Sent       int `json:"sent"`
	Lost       int `json:"lost"`
	Duplicated int `json:"duplicated"`
	// WorstGap is the longest time without any reply.
	WorstGap time.Duration `json:"worstGap"`
	// SendErr is the last error of sending; what was not sent counts as lost.
	SendErr error `json:"-"`
}

// String is what ping(8) would say.
func (r FloodResult) String() string {
	s := fmt.Sprintf("%d sent, %d lost, %d duplicated, worst gap %v", r.Sent, r.Lost, r.Duplicated, r.WorstGap.Round(time.Millisecond))
	if r.SendErr != nil {
		s += fmt.Sprintf(", last error: %v", r.SendErr)
	}
	return s
}

// StartFlood pings to from the namespace of from, once each interval, until
// Stop or the end of ctx.
func StartFlood(ctx context.Context, from Place, to netip.Addr, interval time.Duration) (*Flood, error) {
	p, err := newPinger(from.Netns(), to.Is6())
	if err != nil {
		return nil, fmt.Errorf("flood from %s to %v: %w", from.Name(), to, err)
	}
	f := &Flood{pinger: p, to: to, answered: map[int]int{}, last: time.Now()}
	ctx, f.cancel = context.WithCancel(ctx)
	f.done.Go(func() { f.send(ctx, interval) })
	f.done.Go(func() { f.receive(ctx) })
	return f, nil
}

func (f *Flood) send(ctx context.Context, interval time.Duration) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		f.mu.Lock()
		seq := uint16(f.sent)
		f.sent++
		f.mu.Unlock()
		if err := f.pinger.send(f.to, seq); err != nil {
			f.mu.Lock()
			f.sendErr = err
			f.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// grace is how long Stop waits for late replies.
const grace = time.Second

func (f *Flood) receive(ctx context.Context) {
	var end time.Time // unknown while the flood goes on
	for {
		deadline := time.Now().Add(100 * time.Millisecond)
		if ctx.Err() != nil {
			if end.IsZero() {
				end = time.Now().Add(grace)
			}
			if f.complete() || time.Now().After(end) {
				return
			}
		}
		a, err := f.pinger.receive(deadline)
		if err != nil || a.err != nil {
			continue
		}
		f.mu.Lock()
		n := number(a.seq, f.sent)
		f.answered[n]++
		f.gap(time.Now())
		f.mu.Unlock()
	}
}

// number undoes the wrapping of seq: the newest request that has it.
func number(seq uint16, sent int) int { return sent - 1 - int(uint16(sent-1)-seq) }

func (f *Flood) gap(now time.Time) {
	f.worst = max(f.worst, now.Sub(f.last))
	f.last = now
}

// Answered returns how many requests have got a reply so far.
func (f *Flood) Answered() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.answered)
}

func (f *Flood) complete() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.answered) == f.sent
}

// Stop ends the flood, waits up to a second for late replies, and counts.
func (f *Flood) Stop() FloodResult {
	f.cancel()
	f.done.Wait()
	f.pinger.close()
	r := FloodResult{Sent: f.sent, Lost: f.sent - len(f.answered), SendErr: f.sendErr}
	for _, n := range f.answered {
		r.Duplicated += n - 1
	}
	if r.Lost > 0 { // else the time since the last reply is only the grace
		f.gap(time.Now())
	}
	r.WorstGap = f.worst
	return r
}
