// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"net/netip"
	"slices"

	"github.com/kilomesh/kilo/internal/mesh"
)

// hazards does to a scene what people do by mistake: copied keys, ranges used
// twice, prefixes that cover more than they should, families that a node lacks.
func (s *scene) hazards(r source, fam families) {
	if s.cfg.AddOn == mesh.AddOnNone { // the other pod network would not work either, or go on with nodes that we leave out
		if chance(r, 8) {
			s.copyKey(r)
		}
		if chance(r, 8) {
			s.repeatPods(r)
		}
		if chance(r, 10) {
			s.dropFamily(r)
		}
	}
	if chance(r, 15) {
		i := r.IntN(len(s.nodes))
		s.nodes[i].AllowedLocationIPs = slices.Concat(s.nodes[i].AllowedLocationIPs, s.broad(r, fam))
	}
	if len(s.peers) > 0 && chance(r, 25) {
		i := r.IntN(len(s.peers))
		s.peers[i].AllowedIPs = slices.Concat(s.peers[i].AllowedIPs, pick(r, s.broad(r, fam), s.taken(r)))
	}
}

// copyKey gives a node or a peer the key of another one.
func (s *scene) copyKey(r source) {
	from := s.nodes[r.IntN(len(s.nodes))]
	if len(s.peers) > 0 && chance(r, 50) {
		i := r.IntN(len(s.peers))
		q := &s.peers[i]
		q.Key, s.secrets["peer/"+q.Name] = from.Key, s.secrets[from.Name]
		return
	}
	i := r.IntN(len(s.nodes))
	n := &s.nodes[i]
	n.Key, s.secrets[n.Name] = from.Key, s.secrets[from.Name]
}

// repeatPods gives a node the pod CIDRs of another one.
func (s *scene) repeatPods(r source) {
	from, i := s.nodes[r.IntN(len(s.nodes))], r.IntN(len(s.nodes))
	s.nodes[i].PodCIDRs = from.PodCIDRs
	s.hosts[s.nodes[i].Name].PodCIDRs = from.PodCIDRs
}

// dropFamily takes one of two families from the internal IPs or pods of a node.
func (s *scene) dropFamily(r source) {
	n := &s.nodes[r.IntN(len(s.nodes))]
	if !s.dual {
		return
	}
	i := r.IntN(2)
	if chance(r, 50) && len(n.InternalIPs) == 2 {
		n.InternalIPs = n.InternalIPs[i : i+1]
		return
	}
	n.PodCIDRs = n.PodCIDRs[i : i+1]
	s.hosts[n.Name].PodCIDRs = n.PodCIDRs
}

// broad draws prefixes that cover what others have: pods, peers, public
// addresses of nodes and of their networks' routers, everything.
func (s *scene) broad(r source, fam families) []netip.Prefix {
	return pick(r,
		fam.of(p(addr4(10, 2, 0, 0), 16), p(addr6(0xfd10, 0, 0, 0), 16)),
		fam.of(p(addr4(10, 5, 0, 0), 22), p(addr6(0xfd05, 0, 0, 0), 32)),
		fam.of(p(addr4(198, 51, 100, 0), 22), p(addr6(0x2001, 0xdb8, 0, 0), 32)),
		fam.of(p(addr4(203, 0, 112, 0), 22), p(addr6(0x2001, 0xdb8, 0xff, 0), 48)),
		fam.of(p(addr4(10, 0, 0, 0), 8), p(addr6(0xfd00, 0, 0, 0), 8)),
		fam.of(p(addr4(0, 0, 0, 0), 0), p(addr6(0, 0, 0, 0), 0)))
}

// taken draws prefixes that a node has.
func (s *scene) taken(r source) []netip.Prefix {
	n := s.nodes[r.IntN(len(s.nodes))]
	if len(n.InternalIPs) > 0 && chance(r, 50) {
		return singles(n.InternalIPs)
	}
	return n.PodCIDRs
}

func singles(ps []netip.Prefix) []netip.Prefix {
	out := make([]netip.Prefix, len(ps))
	for i, ip := range ps {
		out[i] = p(ip.Addr(), ip.Addr().BitLen())
	}
	return out
}

// lost lists what each node lacks because another has it: pod CIDRs come first,
// then WireGuard IPs, then internal IPs, each in the order of locations and names.
func lost(locations []mesh.Location) map[string][]netip.Prefix {
	owners, out := map[netip.Prefix]string{}, map[string][]netip.Prefix{}
	claim := func(n *mesh.Node, ps []netip.Prefix) {
		for _, p := range ps {
			if by, ok := owners[p]; ok && by != n.Name {
				out[n.Name] = append(out[n.Name], p)
				continue
			}
			owners[p] = n.Name
		}
	}
	for i := range locations {
		for _, n := range locations[i].Nodes {
			claim(n, n.PodCIDRs)
		}
	}
	for i := range locations {
		for _, ip := range locations[i].WireGuardIPs {
			claim(locations[i].Lead(), []netip.Prefix{p(ip, ip.BitLen())})
		}
	}
	for i := range locations {
		for _, n := range locations[i].Nodes {
			claim(n, singles(n.InternalIPs))
		}
	}
	return out
}
