// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
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
		locations[i].WireGuardIPs, room = room[:0:len(cidrs)], room[len(cidrs):]
	}
	for _, cidr := range cidrs {
		allocateFrom(cidr, locations, report)
	}
}

func allocateFrom(cidr netip.Prefix, locations []Location, report reportFunc) {
	given := make([]netip.Addr, len(locations))
	claimed := make(map[netip.Addr]bool, len(locations))
	for i := range locations {
		given[i] = claimOf(&locations[i], cidr, claimed, func(n *Node) []netip.Addr { return n.WireGuardIPs })
	}
	for i := range locations {
		if !given[i].IsValid() {
			given[i] = claimOf(&locations[i], cidr, claimed, func(n *Node) []netip.Addr { return n.LocationIPs })
		}
	}
	next := cidr.Addr().Next()
	for i := range locations {
		l := &locations[i]
		if !given[i].IsValid() {
			for cidr.Contains(next) && claimed[next] {
				next = next.Next()
			}
			if !cidr.Contains(next) {
				report(l.ID, "wireguard-ip", fmt.Errorf("%w in %s for this location; want a larger --subnet", errExhausted, cidr))
				continue
			}
			given[i] = next
			next = next.Next()
		}
		l.WireGuardIPs = append(l.WireGuardIPs, given[i])
	}
}

// claimOf returns the first address in cidr among the claims of the location's
// nodes that nobody claimed before, and marks it; zero without one.
func claimOf(l *Location, cidr netip.Prefix, claimed map[netip.Addr]bool, claims func(*Node) []netip.Addr) netip.Addr {
	try := func(n *Node) netip.Addr {
		for _, ip := range claims(n) {
			if cidr.Contains(ip) && ip != cidr.Addr() && !claimed[ip] {
				claimed[ip] = true
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
