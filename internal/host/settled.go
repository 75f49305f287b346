// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"go4.org/netipx"

	"github.com/kilomesh/kilo/internal/mesh"
)

// trustFor is how long passes may go by what the last full one read. WireGuard
// devices tell nobody that they changed, so it is shorter than any resync period
// that makes sense.
const trustFor = 25 * time.Second

// settled is what the kernel is known to hold: the State of a pass without an
// error, for as long as Watch runs and tells of nothing.
type settled struct {
	// state is nil if nothing is known.
	state *mesh.State
	// read is when a pass last read everything.
	read time.Time
	// watches counts the Watches that run; disturbed says that one told of
	// something since the pass began that read everything, or began or ended itself.
	watches   atomic.Int32
	disturbed atomic.Bool
}

// disturb makes the next pass read everything.
func (s *settled) disturb() { s.disturbed.Store(true) }

// watching counts a Watch; it calls the returned function at its end.
func (s *settled) watching() (ended func()) {
	s.watches.Add(1)
	s.disturb()
	return func() {
		s.disturb()
		s.watches.Add(-1)
	}
}

// begin returns what the pass that begins may take for what routes, firewall and
// device are now, nil if it must read them. A State with other links or addresses
// is such a case, since what the kernel does along with them is its own affair.
func (s *settled) begin(want *mesh.State, now time.Time) *mesh.State {
	base := s.state
	s.state = nil
	trusted := base != nil && s.watches.Load() > 0 && !s.disturbed.Load() && now.Sub(s.read) < trustFor &&
		slices.Equal(base.Links, want.Links) && slices.Equal(base.Addrs, want.Addrs)
	if trusted {
		return base
	}
	s.disturbed.Store(false)
	s.read = now
	return nil
}

// since returns the peers of want that differ from those of base, beside what
// the device then has of them. The endpoints are the configured ones; whether a
// silent peer is to be sought there again is for a pass that reads the device.
func since(want, base mesh.Device, now time.Time) (mesh.Device, device) {
	have := device{privateKey: base.PrivateKey, listenPort: base.ListenPort}
	changed, gone := difference(want.Peers, base.Peers, func(a, b *mesh.DevicePeer) int { return a.Key.Compare(b.Key) }, equalPeers)
	for _, p := range gone {
		have.peers = append(have.peers, devicePeer{
			key: p.Key, endpoint: unmap(p.Endpoint), presharedKey: p.PresharedKey, keepalive: p.PersistentKeepalive,
			lastHandshake: now, allowedIPs: sortedPrefixes(p.AllowedIPs),
		})
	}
	want.Peers = changed
	return want, have
}

func equalPeers(a, b *mesh.DevicePeer) bool {
	return a.Endpoint == b.Endpoint && a.PresharedKey == b.PresharedKey && a.PersistentKeepalive == b.PersistentKeepalive && slices.Equal(a.AllowedIPs, b.AllowedIPs)
}

// sortedPrefixes returns ps as devicePeer has them.
func sortedPrefixes(ps []netip.Prefix) []netip.Prefix {
	ps = slices.Clone(ps)
	mesh.SortPrefixes(ps)
	return ps
}

// routesSince returns the routes of want that differ from those of base, beside
// what the kernel then has to the same destinations and others that are to go.
func (p *pass) routesSince(base *mesh.State) (want []mesh.Route, have []*ownRoute) {
	want, gone := difference(p.want.Routes, base.Routes, (*mesh.Route).CompareTarget, func(a, b *mesh.Route) bool { return *a == *b })
	for _, r := range gone {
		l, ok := p.links[r.Dev]
		if !ok {
			continue // the link took it along
		}
		o := &ownRoute{Route: r, key: keyOf(r), raw: *rawRoute(r, l)}
		o.raw.Priority, o.raw.Family = o.key.metric, familyOf(r.Dst.Addr())
		have = append(have, o)
	}
	return want, have
}

// tableOf returns the table as the kernel has it after a pass for f.
func tableOf(f mesh.Firewall) *observedTable {
	o := &observedTable{chains: map[string]fwChain{}, rules: map[string][]string{}, sets: map[string]observedSet{}}
	t := firewallTable(f)
	for _, c := range t.chains {
		o.chains[c.name] = c
		for _, r := range c.rules {
			o.rules[c.name] = append(o.rules[c.name], r.String())
		}
	}
	for _, s := range t.sets {
		o.sets[s.name] = observedSet{s.v6, slices.Collect[netipx.IPRange](s.ranges)}
	}
	return o
}

// difference returns the elements of two sorted slices that the other one does
// not have as they are.
func difference[T any](want, have []T, compare func(a, b *T) int, equal func(a, b *T) bool) (added, gone []T) {
	for len(want) > 0 && len(have) > 0 {
		switch order := compare(&want[0], &have[0]); {
		case order < 0:
			added, want = append(added, want[0]), want[1:]
		case order > 0:
			gone, have = append(gone, have[0]), have[1:]
		default:
			if !equal(&want[0], &have[0]) {
				added, gone = append(added, want[0]), append(gone, have[0])
			}
			want, have = want[1:], have[1:]
		}
	}
	return append(added, want...), append(gone, have...)
}
