// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

// ownership says who owns each prefix, so that no prefix has two owners.
// Earlier claims win: nodes' pod CIDRs, then WireGuard IPs, then internal IPs,
// then allowed location IPs, then peers; each in the order of locations, nodes
// and peers by name.
type ownership struct {
	report reportFunc
	owners []owner
	// current is the index of the one that claims.
	current int32
	// The index in owners by prefix. IPv4 prefixes fit into a number, which is
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
	prefixes := 0
	for i := range locations {
		for _, n := range locations[i].Nodes {
			prefixes += len(n.PodCIDRs) + len(n.InternalIPs)
		}
		prefixes += len(locations[i].WireGuardIPs)
	}
	return &ownership{report: report, v4: make(map[uint64]int32, prefixes), v6: map[netip.Prefix]int32{}}
}

// number is a masked IPv4 prefix as a number that sorts like comparePrefix does.
func number(p netip.Prefix) uint64 {
	b := p.Addr().As4()
	return uint64(binary.BigEndian.Uint32(b[:]))<<8 | uint64(p.Bits()) //nolint:gosec // 0 to 32
}

// prefixOf is the reverse of number.
func prefixOf(n uint64) netip.Prefix {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], uint32(n>>8)) //nolint:gosec // the upper bits are zero
	return netip.PrefixFrom(netip.AddrFrom4(b), int(n&0xff))
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
	return o.owners[i], true
}

// claimant makes ow the one that add and take give to.
func (o *ownership) claimant(ow owner) {
	o.owners = append(o.owners, ow)
	o.current = int32(len(o.owners) - 1) //nolint:gosec // no mesh has 2^31 nodes
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
		o.report(o.owners[o.current].String(), field, fmt.Errorf("%s is not used: it already belongs to %s; want prefixes that only one node has", p, by))
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
	nodes, pods, internals := 0, 0, 0
	for i := range locations {
		nodes += len(locations[i].Nodes)
		for _, n := range locations[i].Nodes {
			pods += len(n.PodCIDRs)
			internals += len(n.InternalIPs)
		}
	}
	o.owners = make([]owner, 0, nodes) // in the order of locations and nodes
	room := make([]netip.Prefix, 0, pods+internals)
	for i := range locations {
		l, start := &locations[i], len(room)
		for _, n := range l.Nodes {
			o.claimant(owner{kind: "node", name: n.Name})
			for _, p := range n.PodCIDRs {
				if o.take(p, "spec.podCIDRs") {
					room = append(room, p)
				}
			}
		}
		l.PodCIDRs = room[start:len(room):len(room)]
	}
	first := int32(0) // of the location's nodes in owners
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
		slices.SortFunc(l.AllowedLocationIPs, comparePrefix)
	}
}

// peers returns the peers that can take part, each with the allowed IPs that no one before it owns.
func (o *ownership) peers(peers []Peer, nodes map[PublicKey]*Node) []Peer {
	sorted := slices.SortedFunc(slices.Values(peers), func(a, b Peer) int { return cmp.Compare(a.Name, b.Name) })
	keys := make(map[PublicKey]string, len(peers))
	out := sorted[:0]
	for _, p := range sorted {
		self := owner{kind: "peer", name: p.Name}
		by, taken := keys[p.Key]
		if n, ok := nodes[p.Key]; ok {
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
		p.AllowedIPs = owned
		out = append(out, p)
	}
	return out
}
