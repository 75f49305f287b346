// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// ownership says who owns each prefix, so that no prefix has two owners.
// Earlier claims win: nodes' pod CIDRs, then WireGuard IPs, then internal IPs,
// then allowed location IPs, then peers; each in the order of locations, nodes
// and peers by name.
type ownership struct {
	report    reportFunc
	locations []Location
	// others own prefixes beside the nodes as such.
	others []owner
	// current is the number of the one that claims: the nodes in the order of
	// their locations come first, then others.
	current, nodeCount int32
	// The number of the owner by prefix. IPv4 prefixes fit into a number, which is
	// several times faster to look up.
	v4 map[uint64]int32
	v6 map[netip.Prefix]int32
}

// owner is a node or a peer.
type owner struct {
	kind, name string
	// group is the set of owners that may claim a prefix together, "" for none.
	group string
}

func (o owner) String() string { return o.kind + "/" + o.name }

func newOwnership(locations []Location, report reportFunc) *ownership {
	o := &ownership{report: report, locations: locations, v6: map[netip.Prefix]int32{}}
	prefixes := 0
	for i := range locations {
		for _, n := range locations[i].Nodes {
			prefixes += len(n.PodCIDRs) + len(n.InternalIPs)
		}
		prefixes += len(locations[i].WireGuardIPs)
		o.nodeCount += int32(len(locations[i].Nodes)) //nolint:gosec // no mesh has 2^31 nodes
	}
	o.v4 = make(map[uint64]int32, prefixes)
	return o
}

// numbered returns the owner of that number.
func (o *ownership) numbered(i int32) owner {
	if i >= o.nodeCount {
		return o.others[i-o.nodeCount]
	}
	at := int(i)
	for _, l := range o.locations {
		if at < len(l.Nodes) {
			return owner{kind: "node", name: l.Nodes[at].Name}
		}
		at -= len(l.Nodes)
	}
	return owner{}
}

// owner returns who owns exactly p.
func (o *ownership) owner(p netip.Prefix) (owner, bool) {
	var i int32
	var ok bool
	if p.Addr().Is4() {
		i, ok = o.v4[number(p)]
	} else {
		i, ok = o.v6[p]
	}
	if !ok {
		return owner{}, false
	}
	return o.numbered(i), true
}

// claimant makes ow the one that add and take give to.
func (o *ownership) claimant(ow owner) {
	o.current = o.nodeCount + int32(len(o.others)) //nolint:gosec // no mesh has 2^31 nodes
	o.others = append(o.others, ow)
}

// add gives p to the claimant.
func (o *ownership) add(p netip.Prefix) {
	if p.Addr().Is4() {
		o.v4[number(p)] = o.current
	} else {
		o.v6[p] = o.current
	}
}

// within finds the broadest owned prefix that p equals or lies in.
func (o *ownership) within(p netip.Prefix) (owner, netip.Prefix, bool) {
	for bits := range p.Bits() + 1 {
		outer := netip.PrefixFrom(p.Addr(), bits).Masked()
		if by, ok := o.owner(outer); ok {
			return by, outer, true
		}
	}
	return owner{}, netip.Prefix{}, false
}

// take gives p to the claimant, unless somebody has exactly it.
func (o *ownership) take(p netip.Prefix, field string) bool {
	if by, ok := o.owner(p); ok {
		o.report(o.numbered(o.current).String(), field, fmt.Errorf("%s is not used: it already belongs to %s; want prefixes that only one node has", p, by))
		return false
	}
	o.add(p)
	return true
}

// nodes gives the locations the pod CIDRs, WireGuard IPs and internal IPs of
// their nodes. Narrower prefixes inside another's are legitimate here: the
// longest prefix carries the packet.
func (o *ownership) nodes(locations []Location) {
	// The lists of all locations lie in two arrays.
	pods, internals := 0, 0
	for i := range locations {
		for _, n := range locations[i].Nodes {
			pods += len(n.PodCIDRs)
			internals += len(n.InternalIPs)
		}
	}
	room := make([]netip.Prefix, 0, pods+internals)
	o.current = -1
	for i := range locations {
		l, start := &locations[i], len(room)
		for _, n := range l.Nodes {
			o.current++
			for _, p := range n.PodCIDRs {
				if o.take(p, "spec.podCIDRs") {
					room = append(room, p)
				}
			}
		}
		l.PodCIDRs = room[start:len(room):len(room)]
	}
	first := int32(0) // number of the location's nodes
	for i := range locations {
		l := &locations[i]
		o.current = first + int32(l.Leader) //nolint:gosec // as above
		first += int32(len(l.Nodes))        //nolint:gosec // as above
		l.WireGuardIPs = slices.DeleteFunc(l.WireGuardIPs, func(ip netip.Addr) bool { return !o.take(single(ip), "wireguard-ip") })
	}
	o.current = -1
	for i := range locations {
		l, start := &locations[i], len(room)
		for _, n := range l.Nodes {
			o.current++
			for _, p := range n.InternalIPs {
				if ip := single(p.Addr()); o.take(ip, "internal-ip") {
					room = append(room, ip)
				}
			}
		}
		l.InternalIPs = room[start:len(room):len(room)]
	}
}

// allowedLocationIPs gives the locations the prefixes that their nodes announce,
// unless one lies within what another already owns. Broader ones are fine.
func (o *ownership) allowedLocationIPs(locations []Location) {
	for i := range locations {
		l := &locations[i]
		for _, n := range l.Nodes {
			if len(n.AllowedLocationIPs) == 0 {
				continue
			}
			self := owner{kind: "node", name: n.Name, group: l.Site}
			o.claimant(self)
			for _, p := range n.AllowedLocationIPs {
				if by, within, ok := o.within(p); ok {
					if by.group != l.Site { // the neighbours may announce it too
						o.report(self.String(), "allowed-location-ips", fmt.Errorf("%s is not used: it lies within %s of %s; want a prefix that is broader, or nobody else's", p, within, by))
					}
					continue
				}
				o.add(p)
				l.AllowedLocationIPs = append(l.AllowedLocationIPs, p)
			}
		}
		slices.SortFunc(l.AllowedLocationIPs, ComparePrefix)
	}
}

// peers returns the peers that can take part, each with the allowed IPs that no one before it owns.
func (o *ownership) peers(peers []Peer, nodes keyring) []Peer {
	sorted := slices.SortedFunc(slices.Values(peers), func(a, b Peer) int { return cmp.Compare(a.Name, b.Name) })
	keys := make(map[PublicKey]string, len(peers))
	out := sorted[:0]
	for _, p := range sorted {
		self := owner{kind: "peer", name: p.Name}
		by, taken := keys[p.Key]
		if n := nodes.find(p.Key); n != nil {
			by, taken = "node/"+n.Name, true
		}
		if taken {
			o.report(self.String(), "spec.publicKey", fmt.Errorf("public key %s is left out of the mesh: it is that of %s; want a key of its own", p.Key, by))
			continue
		}
		keys[p.Key] = self.String()
		o.claimant(self)
		var owned []netip.Prefix
		for _, ip := range p.AllowedIPs {
			if by, within, ok := o.within(ip); ok {
				if by != self {
					o.report(self.String(), "spec.allowedIPs", fmt.Errorf("%s is not used: it lies within %s of %s; want a prefix that is nobody else's", ip, within, by))
				}
				continue
			}
			o.add(ip)
			owned = append(owned, ip)
		}
		SortPrefixes(owned)
		p.AllowedIPs = owned
		out = append(out, p)
	}
	return out
}
