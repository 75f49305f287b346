// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// allocate gives each location its address of each range. What its nodes
// published is honoured, the leader's claim before its members'; of two
// locations that claim one address the first by ID gets it. The lowest free
// addresses go to the others, in the order of their IDs, so a fresh cluster is
// numbered base+1, base+2 and so on. The base itself is never given.
func allocate(cidrs []netip.Prefix, locations []Location, report reportFunc) {
	for _, cidr := range cidrs {
		allocateFrom(cidr, locations, report)
	}
}

func allocateFrom(cidr netip.Prefix, locations []Location, report reportFunc) {
	given := make([]netip.Addr, len(locations))
	taken := make(map[netip.Addr]bool, len(locations))
	for i := range locations {
		for _, claim := range claimsOf(&locations[i], cidr) {
			if !taken[claim] {
				taken[claim] = true
				given[i] = claim
				break
			}
		}
	}
	next := cidr.Addr().Next()
	for i := range locations {
		if !given[i].IsValid() {
			for cidr.Contains(next) && taken[next] {
				next = next.Next()
			}
			if !cidr.Contains(next) {
				report(locations[i].ID, "wireguard-ip", fmt.Errorf("%w in %s for this location; want a larger --subnet", errExhausted, cidr))
				continue
			}
			taken[next] = true
			given[i] = next
		}
		locations[i].WireGuardIPs = append(locations[i].WireGuardIPs, given[i])
	}
}

// claimsOf lists the addresses in cidr that the location's nodes published, the best claim first.
func claimsOf(l *Location, cidr netip.Prefix) []netip.Addr {
	var claims []netip.Addr
	add := func(n *Node) {
		for _, ip := range n.WireGuardIPs {
			if cidr.Contains(ip) && ip != cidr.Addr() {
				claims = append(claims, ip)
			}
		}
	}
	add(l.Lead())
	for i := range l.Nodes {
		if i != l.Leader {
			add(&l.Nodes[i])
		}
	}
	return claims
}

// ownership says who owns each prefix: the object of the owner by prefix.
type ownership map[netip.Prefix]owner

type owner struct {
	// object is what messages name; group is the set of objects that may claim a prefix together.
	object, group string
}

// nodes gives the locations the pod CIDRs, WireGuard IPs and internal IPs of
// their nodes. Narrower prefixes inside another's are legitimate here: the
// longest prefix carries the packet.
func (o ownership) nodes(locations []Location, report reportFunc) {
	claim := func(n *Node, field string, p netip.Prefix) bool {
		if by, ok := o[p]; ok {
			report("node/"+n.Name, field, fmt.Errorf("%s is not used: it already belongs to %s; want prefixes that only one node has", p, by.object))
			return false
		}
		o[p] = owner{object: "node/" + n.Name}
		return true
	}
	for i := range locations {
		l := &locations[i]
		for j := range l.Nodes {
			for _, p := range l.Nodes[j].PodCIDRs {
				if claim(&l.Nodes[j], "spec.podCIDRs", p) {
					l.PodCIDRs = append(l.PodCIDRs, p)
				}
			}
		}
	}
	for i := range locations {
		l := &locations[i]
		l.WireGuardIPs = slices.DeleteFunc(l.WireGuardIPs, func(ip netip.Addr) bool {
			return !claim(l.Lead(), "wireguard-ip", single(ip))
		})
	}
	for i := range locations {
		l := &locations[i]
		for j := range l.Nodes {
			for _, p := range l.Nodes[j].InternalIPs {
				if ip := single(p.Addr()); claim(&l.Nodes[j], "internal-ip", ip) {
					l.InternalIPs = append(l.InternalIPs, ip)
				}
			}
		}
	}
}

// allowedLocationIPs gives the locations the prefixes that their nodes announce,
// unless one lies within what another already owns. Broader ones are fine.
func (o ownership) allowedLocationIPs(locations []Location, report reportFunc) {
	for i := range locations {
		l := &locations[i]
		for _, n := range l.Nodes {
			for _, p := range n.AllowedLocationIPs {
				object := "node/" + n.Name
				if by, within, ok := o.within(p); ok {
					if by.group != l.Site { // the neighbours may announce it too
						report(object, "allowed-location-ips", fmt.Errorf("%s is not used: it lies within %s of %s; want a prefix that is broader, or nobody else's", p, within, by.object))
					}
					continue
				}
				o[p] = owner{object, l.Site}
				l.AllowedLocationIPs = append(l.AllowedLocationIPs, p)
			}
		}
		slices.SortFunc(l.AllowedLocationIPs, comparePrefix)
	}
}

// peers returns the peers that can take part, each with the allowed IPs that no one before it owns.
func (o ownership) peers(peers []Peer, keys map[PublicKey]string, report reportFunc) []Peer {
	sorted := slices.SortedFunc(slices.Values(peers), func(a, b Peer) int { return cmp.Compare(a.Name, b.Name) })
	out := sorted[:0]
	for _, p := range sorted {
		object := "peer/" + p.Name
		if by, ok := keys[p.Key]; ok {
			report(object, "spec.publicKey", fmt.Errorf("public key %s is left out of the mesh: it is that of %s; want a key of its own", p.Key, by))
			continue
		}
		keys[p.Key] = object
		var owned []netip.Prefix
		for _, ip := range p.AllowedIPs {
			if by, within, ok := o.within(ip); ok {
				if by.object != object {
					report(object, "spec.allowedIPs", fmt.Errorf("%s is not used: it lies within %s of %s; want a prefix that is nobody else's", ip, within, by.object))
				}
				continue
			}
			o[ip] = owner{object: object}
			owned = append(owned, ip)
		}
		p.AllowedIPs = owned
		out = append(out, p)
	}
	return out
}

// within finds the broadest owned prefix that p equals or lies in.
func (o ownership) within(p netip.Prefix) (owner, netip.Prefix, bool) {
	for bits := range p.Bits() + 1 {
		outer := netip.PrefixFrom(p.Addr(), bits).Masked()
		if by, ok := o[outer]; ok {
			return by, outer, true
		}
	}
	return owner{}, netip.Prefix{}, false
}
