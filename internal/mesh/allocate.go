// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

// allocate gives each location its address of each range. What its nodes
// published is honoured: first what leaders did, then what members last knew
// their location by; of two locations that claim one address with the same right
// the first by ID gets it. The lowest free
// addresses go to the others, in the order of their IDs, so a fresh cluster is
// numbered base+1, base+2 and so on. The base itself is never given.
func allocate(cidrs []netip.Prefix, locations []Location, report reportFunc) {
	room := make([]netip.Addr, len(cidrs)*len(locations))
	for i := range locations {
		locations[i].WireGuardIPs, room = room[:len(cidrs):len(cidrs)], room[len(cidrs):]
	}
	for i, cidr := range cidrs {
		allocateFrom(cidr, locations, func(l *Location) *netip.Addr { return &l.WireGuardIPs[i] }, report)
	}
	for i := range locations {
		l := &locations[i]
		l.WireGuardIPs = slices.DeleteFunc(l.WireGuardIPs, func(ip netip.Addr) bool { return !ip.IsValid() })
	}
}

// allocateFrom fills in what given says, zero where the range is exhausted.
func allocateFrom(cidr netip.Prefix, locations []Location, given func(*Location) *netip.Addr, report reportFunc) {
	claimed := addrSet{base: cidr.Addr()}
	for i := range locations {
		l := &locations[i]
		*given(l) = claimOf(l, cidr, &claimed, func(n *Node) []netip.Addr { return n.WireGuardIPs })
	}
	for i := range locations {
		if l := &locations[i]; !given(l).IsValid() {
			*given(l) = claimOf(l, cidr, &claimed, func(n *Node) []netip.Addr { return n.LocationIPs })
		}
	}
	next := cidr.Addr().Next()
	for i := range locations {
		l := &locations[i]
		if given(l).IsValid() {
			continue
		}
		for cidr.Contains(next) && claimed.has(next) {
			next = next.Next()
		}
		if !cidr.Contains(next) {
			report(l.ID(), "wireguard-ip", fmt.Errorf("%w in %s for this location; want a larger --subnet", errExhausted, cidr))
			continue
		}
		*given(l) = next
		next = next.Next()
	}
}

// claimOf returns the first address in cidr among the claims of the location's
// nodes that nobody claimed before, and marks it; zero without one.
func claimOf(l *Location, cidr netip.Prefix, claimed *addrSet, claims func(*Node) []netip.Addr) netip.Addr {
	try := func(n *Node) netip.Addr {
		for _, ip := range claims(n) {
			if cidr.Contains(ip) && ip != cidr.Addr() && claimed.add(ip) {
				return ip
			}
		}
		return netip.Addr{}
	}
	if ip := try(l.Lead()); ip.IsValid() {
		return ip
	}
	for i, n := range l.Nodes {
		if i != l.Leader {
			if ip := try(n); ip.IsValid() {
				return ip
			}
		}
	}
	return netip.Addr{}
}

// addrSet is a set of addresses, most of them close behind the base.
type addrSet struct {
	base netip.Addr
	near []uint64 // a bit for each
	far  map[netip.Addr]bool
}

// bit returns where in near the address is, ok if it belongs there.
func (s *addrSet) bit(ip netip.Addr) (word int, mask uint64, ok bool) {
	const near = 1 << 17
	base, b := s.base.As16(), ip.As16()
	if [8]byte(base[:8]) != [8]byte(b[:8]) {
		return 0, 0, false
	}
	n := binary.BigEndian.Uint64(b[8:]) - binary.BigEndian.Uint64(base[8:])
	return int(n / 64), 1 << (n % 64), n < near //nolint:gosec // only if ok
}

func (s *addrSet) has(ip netip.Addr) bool {
	word, mask, ok := s.bit(ip)
	if !ok {
		return s.far[ip]
	}
	return word < len(s.near) && s.near[word]&mask != 0
}

// add reports whether ip was not in the set before.
func (s *addrSet) add(ip netip.Addr) bool {
	if s.has(ip) {
		return false
	}
	word, mask, ok := s.bit(ip)
	if !ok {
		if s.far == nil {
			s.far = map[netip.Addr]bool{}
		}
		s.far[ip] = true
		return true
	}
	for word >= len(s.near) {
		s.near = append(s.near, 0)
	}
	s.near[word] |= mask
	return true
}
