// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"fmt"
	"iter"
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
	// pods and wireGuard count the claims of nodes, of which they are the first.
	pods, wireGuard int
	nodeClaims
	// claimants are the nodes of all claims, nil until somebody asks.
	claimants []*Node
	// others own allowed location IPs and what peers have.
	others map[netip.Prefix]owner
}

// nodeClaims say where the prefixes are that nodes own, but for allowed location IPs.
type nodeClaims struct {
	// v4 are the prefixes of IPv4, as sorted numbers above the places of their
	// claims; v6 are the places by prefix.
	v4 []uint64
	v6 map[netip.Prefix]int
	// where are the indices of the locations of all claims, those that got nothing too.
	where []int32
}

// owner is a node or a peer.
type owner struct {
	kind, name string
	// site is where several owners may claim one prefix together, zero for none.
	site place
}

func (o owner) String() string { return o.kind + "/" + o.name }

func newOwnership(locations []Location, report reportFunc) *ownership {
	return &ownership{report: report, locations: locations, nodeClaims: nodeClaims{v6: map[netip.Prefix]int{}}, others: map[netip.Prefix]owner{}}
}

// claims yields what nodes want for being what they are, the strongest first.
func (o *ownership) claims() iter.Seq2[claimant, netip.Prefix] {
	return func(yield func(claimant, netip.Prefix) bool) {
		for i := range o.locations {
			for _, n := range o.locations[i].Nodes {
				for _, p := range n.PodCIDRs {
					if !yield(claimant{i, n}, p) {
						return
					}
				}
			}
		}
		for i := range o.locations {
			for _, ip := range o.locations[i].WireGuardIPs {
				if !yield(claimant{i, o.locations[i].Lead()}, single(ip)) {
					return
				}
			}
		}
		for i := range o.locations {
			for _, n := range o.locations[i].Nodes {
				for _, p := range n.InternalIPs {
					if !yield(claimant{i, n}, single(p.Addr())) {
						return
					}
				}
			}
		}
	}
}

// claimant is a node, and the index of its location.
type claimant struct {
	location int
	*Node
}

// count returns how many claims there are.
func (o *ownership) count() int {
	internals := 0
	for i := range o.locations {
		l := &o.locations[i]
		o.wireGuard += len(l.WireGuardIPs)
		for _, n := range l.Nodes {
			o.pods += len(n.PodCIDRs)
			internals += len(n.InternalIPs)
		}
	}
	return o.pods + o.wireGuard + internals
}

// nodes gives the locations the pod CIDRs, WireGuard IPs and internal IPs of
// their nodes. Narrower prefixes inside another's are legitimate here: the
// longest prefix carries the packet.
func (o *ownership) nodes() {
	count := o.count()
	lost := o.settle(count)
	keep := func(place int) bool { _, ok := lost[place]; return !ok }
	room := make([]netip.Prefix, 0, count) // in which the lists of all locations lie
	pod, wireGuard, internal := 0, o.pods, o.pods+o.wireGuard
	for i := range o.locations {
		l, start := &o.locations[i], len(room)
		for _, n := range l.Nodes {
			for _, p := range n.PodCIDRs {
				if keep(pod) {
					room = append(room, p)
				}
				pod++
			}
		}
		l.pods = int32(len(room) - start) //nolint:gosec // no mesh has 2^31 prefixes
		for _, n := range l.Nodes {
			for _, p := range n.InternalIPs {
				if keep(internal) {
					room = append(room, single(p.Addr()))
				}
				internal++
			}
		}
		l.internals = int32(len(room)-start) - l.pods //nolint:gosec // as above
		l.WireGuardIPs = slices.DeleteFunc(l.WireGuardIPs, func(netip.Addr) bool {
			wireGuard++
			return !keep(wireGuard - 1)
		})
		for _, ip := range l.WireGuardIPs {
			room = append(room, single(ip))
		}
		l.owned = room[start:len(room):len(room)]
	}
}

// settle decides about the claims of nodes, and returns those that are lost.
func (o *ownership) settle(count int) (lost map[int]int) {
	o.v4, o.where = make([]uint64, 0, count), make([]int32, 0, count)
	place := 0
	lose := func(place, to int) {
		if lost == nil {
			lost = map[int]int{}
		}
		lost[place] = to
	}
	for c, p := range o.claims() {
		o.where = append(o.where, int32(c.location)) //nolint:gosec // no mesh has 2^31 locations
		if p.Addr().Is4() {
			o.v4 = append(o.v4, number(p)<<placeBits|uint64(place)) //nolint:gosec // not negative
		} else if first, ok := o.v6[p]; ok {
			lose(place, first)
		} else {
			o.v6[p] = place
		}
		place++
	}
	slices.Sort(o.v4)
	got := o.v4[:0]
	for _, n := range o.v4 {
		if len(got) > 0 && sameBits(got[len(got)-1], n) {
			lose(placeOf(n), placeOf(got[len(got)-1]))
			continue
		}
		got = append(got, n)
	}
	o.v4 = got
	o.reportLost(lost)
	return lost
}

func (o *ownership) reportLost(lost map[int]int) {
	if len(lost) == 0 {
		return
	}
	place := 0
	for c, p := range o.claims() {
		if by, ok := lost[place]; ok {
			field := "internal-ip"
			switch {
			case place < o.pods:
				field = "spec.podCIDRs"
			case place < o.pods+o.wireGuard:
				field = "wireguard-ip"
			}
			o.report("node/"+c.Name, field, fmt.Errorf("%s is not used: it already belongs to %s; want prefixes that only one node has", p, o.claimant(by)))
		}
		place++
	}
}

// claimant returns whose claim of a node that is.
func (o *ownership) claimant(place int) owner {
	if o.claimants == nil {
		for c := range o.claims() {
			o.claimants = append(o.claimants, c.Node)
		}
	}
	return owner{kind: "node", name: o.claimants[place].Name}
}

// owner returns who owns exactly p.
func (o *ownership) owner(p netip.Prefix) (owner, bool) {
	if by, ok := o.others[p]; ok {
		return by, true
	}
	if place, ok := o.place(p); ok {
		return o.claimant(place), true
	}
	return owner{}, false
}

// place returns which claim has got exactly p.
func (c *nodeClaims) place(p netip.Prefix) (place int, ok bool) {
	if p.Addr().Is6() {
		place, ok = c.v6[p]
		return place, ok
	}
	want := number(p) << placeBits
	if i, _ := slices.BinarySearch(c.v4, want); i < len(c.v4) && sameBits(c.v4[i], want) {
		return placeOf(c.v4[i]), true
	}
	return 0, false
}

// location returns the index of the location that owns exactly p.
func (c *nodeClaims) location(p netip.Prefix) (index int, ok bool) {
	place, ok := c.place(p)
	if !ok {
		return 0, false
	}
	return int(c.where[place]), true
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

// allowedLocationIPs gives the locations the prefixes that their nodes announce,
// unless one lies within what another already owns. Broader ones are fine.
func (o *ownership) allowedLocationIPs() {
	for i := range o.locations {
		l := &o.locations[i]
		known := len(l.owned)
		for _, n := range l.Nodes {
			self := owner{kind: "node", name: n.Name, site: l.site}
			for _, p := range n.AllowedLocationIPs {
				if by, within, ok := o.within(p); ok {
					if by.site != l.site { // the neighbours may announce it too
						o.report(self.String(), "allowed-location-ips", fmt.Errorf("%s is not used: it lies within %s of %s; want a prefix that is broader, or nobody else's", p, within, by))
					}
					continue
				}
				o.others[p] = self
				l.owned = append(l.owned, p)
			}
		}
		SortPrefixes(l.owned[known:])
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
		var owned []netip.Prefix
		for _, ip := range p.AllowedIPs {
			if by, within, ok := o.within(ip); ok {
				if by != self {
					o.report(self.String(), "spec.allowedIPs", fmt.Errorf("%s is not used: it lies within %s of %s; want a prefix that is nobody else's", ip, within, by))
				}
				continue
			}
			o.others[ip] = self
			owned = append(owned, ip)
		}
		p.AllowedIPs = owned
		out = append(out, p)
	}
	return out
}
