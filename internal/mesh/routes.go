// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
)

// carried yields the prefixes that are reached through the location, but for its WireGuard IPs.
func (l *Location) carried() iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for _, ps := range [][]netip.Prefix{l.PodCIDRs, l.InternalIPs, l.AllowedLocationIPs} {
			for _, p := range ps {
				if !yield(p) {
					return
				}
			}
		}
	}
}

func (p *planner) route(r Route) {
	if r.Table == 0 {
		r.Table = TableMain
	}
	r.OnLink = r.Via.IsValid() && !r.Via.IsLinkLocalUnicast()
	p.state.Routes = append(p.state.Routes, r)
}

// leaderRoutes sends what belongs to other locations and to peers into the
// WireGuard link. The source is the internal IP, which the others know as the
// node's own; without one the kernel takes the WireGuard IP.
func (p *planner) leaderRoutes() {
	var source [2]netip.Addr // of IPv4, of IPv6
	for _, ip := range p.self.InternalIPs {
		source[family(ip.Addr())] = ip.Addr()
	}
	endpoints := p.endpoints()
	add := func(dst netip.Prefix, via netip.Addr) {
		for part := range endpoints.spare(dst) {
			p.route(Route{Dst: part, Via: via, Src: source[family(dst.Addr())], Dev: p.t.cfg.WireGuardDev})
		}
	}
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		if p.isOwnSite(l) {
			continue
		}
		for dst := range l.carried() {
			add(dst, l.WireGuardIP(dst.Addr()))
		}
	}
	for _, peer := range p.t.Peers {
		for _, dst := range peer.AllowedIPs {
			add(dst, netip.Addr{})
		}
	}
}

// endpoints are the addresses that the device sends to, sorted.
type endpoints []netip.Addr

func (p *planner) endpoints() endpoints {
	out := make(endpoints, 0, len(p.state.Device.Peers))
	for _, peer := range p.state.Device.Peers {
		if peer.Endpoint.IsValid() {
			out = append(out, peer.Endpoint.Addr())
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// spare yields dst without the endpoints in it: what carries the tunnel cannot
// go through it. A prefix with an endpoint in it is cut into the halves without.
func (e endpoints) spare(dst netip.Prefix) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) { e.cut(dst, yield) }
}

func (e endpoints) cut(dst netip.Prefix, yield func(netip.Prefix) bool) bool {
	i, _ := slices.BinarySearchFunc(e, dst.Addr(), netip.Addr.Compare)
	if i == len(e) || !dst.Contains(e[i]) {
		return yield(dst)
	}
	if dst.IsSingleIP() {
		return true
	}
	low, high := halves(dst)
	return e.cut(low, yield) && e.cut(high, yield)
}

// halves cuts a prefix in two; p is not a single address.
func halves(p netip.Prefix) (low, high netip.Prefix) {
	bits := p.Bits()
	b := p.Addr().AsSlice()
	low = netip.PrefixFrom(p.Addr(), bits+1)
	b[bits/8] |= 0x80 >> (bits % 8)
	upper, _ := netip.AddrFromSlice(b)
	return low, netip.PrefixFrom(upper, bits+1)
}

// memberRoutes sends what belongs to other locations and to peers to the leader.
func (p *planner) memberRoutes() {
	lead := p.loc.Lead()
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		for _, ip := range l.WireGuardIPs {
			p.via(lead, single(ip))
		}
		if l == p.loc {
			continue
		}
		for dst := range l.carried() {
			p.via(lead, dst)
		}
	}
	for _, peer := range p.t.Peers {
		for _, dst := range peer.AllowedIPs {
			p.via(lead, dst)
		}
	}
}

// localRoutes sends what belongs to neighbours to them. Where packets between
// the two are encapsulated, so are those from our pods (and, on the leader, from
// the mesh) to the neighbour's internal IP: without that they would leave with
// a source that the underlay may not let pass.
func (p *planner) localRoutes() {
	for _, n := range p.neighbours {
		for _, cidr := range n.PodCIDRs {
			if slices.Contains(n.loc.PodCIDRs, cidr) {
				p.via(n.Node, cidr)
			}
		}
		if n.loc != p.loc { // granularity cross: its WireGuard IP is in a range that leads into our own link
			for _, ip := range n.loc.WireGuardIPs {
				p.via(n.Node, single(ip))
			}
		}
		for _, remote := range n.InternalIPs {
			local, ok := p.self.InternalIP(remote.Addr())
			if !ok || !p.encapsulates(local, remote.Addr()) {
				continue
			}
			p.divert(n.Node, remote.Addr(), local.Addr())
			if from, ok := ofFamily(p.self.PodCIDRs, remote.Addr()); ok {
				p.state.Rules = append(p.state.Rules, Rule{From: from, To: single(remote.Addr()), Table: TableTunnel})
			}
		}
	}
}

// addOnRoutes sends packets from the mesh to neighbours' internal IPs through
// the tunnel of the network that we are added to, which does the rest itself.
func (p *planner) addOnRoutes() {
	if p.t.cfg.Encapsulation == EncapsulateNever {
		return
	}
	for _, n := range p.neighbours {
		for _, remote := range n.InternalIPs {
			if _, ok := p.self.InternalIP(remote.Addr()); ok && p.gateway(n.Node, remote.Addr()) != remote.Addr() {
				p.divert(n.Node, remote.Addr(), netip.Addr{})
			}
		}
	}
}

// divert plans a route in the tunnel's table to a neighbour's internal IP, and
// on the leader the rule that leads packets from the mesh to it.
func (p *planner) divert(n *Node, remote, source netip.Addr) {
	gateway := p.gateway(n, remote)
	if gateway.IsValid() {
		gateway = p.nextHop(n, gateway)
	}
	if !gateway.IsValid() {
		return
	}
	p.route(Route{Dst: single(remote), Via: gateway, Src: source, Dev: p.tunnelDev(remote), Table: TableTunnel})
	if p.leads {
		p.state.Rules = append(p.state.Rules, Rule{IIf: p.t.cfg.WireGuardDev, To: single(remote), Table: TableTunnel})
	}
}

// gateway returns the address by which the tunnel inside the location knows a
// neighbour, zero if it knows none of that family.
func (p *planner) gateway(n *Node, like netip.Addr) netip.Addr {
	if p.t.cfg.AddOn == AddOnNone {
		ip, _ := n.InternalIP(like)
		return ip.Addr()
	}
	if p.t.cfg.AddOn == AddOnCilium {
		for _, ip := range n.CNICompatibilityIPs {
			if ip.Is4() == like.Is4() {
				return ip
			}
		}
	}
	cidr, _ := ofFamily(n.PodCIDRs, like)
	return cidr.Addr()
}

// via plans a route to dst through a neighbour: in the tunnel link where packets
// to it are encapsulated, else on the link that carries our internal IP.
func (p *planner) via(n *Node, dst netip.Prefix) {
	local, ok := p.self.InternalIP(dst.Addr())
	if !ok {
		p.reportNoInternalIP(p.self, dst)
		return
	}
	gateway := p.gateway(n, dst.Addr())
	if !gateway.IsValid() {
		p.reportNoInternalIP(n, dst)
		return
	}
	if p.encapsulates(local, gateway) {
		dev := p.tunnelDev(gateway)
		if gateway = p.nextHop(n, gateway); !gateway.IsValid() {
			p.reportNoInternalIP(n, dst)
			return
		}
		p.route(Route{Dst: dst, Via: gateway, Src: local.Addr(), Dev: dev})
		return
	}
	link, ok := p.facts.LinkOf(local.Addr())
	if !ok {
		p.problems = append(p.problems, Problem{"node/" + p.self.Name, "internal-ip", fmt.Errorf("%s is on no link of this host, so neighbours are not reached; want an address that the host has", local.Addr())})
		return
	}
	p.route(Route{Dst: dst, Via: gateway, Dev: link.Dev})
}

// reportNoInternalIP does not name dst: it would be one Problem for each of the mesh's prefixes.
func (p *planner) reportNoInternalIP(n *Node, dst netip.Prefix) {
	p.problems = append(p.problems, Problem{"node/" + n.Name, "internal-ip", fmt.Errorf("has none for %s, so the location's members do not reach %s through it; want an internal IP for each family of pods",
		familyName(dst.Addr()), familyName(dst.Addr()))})
}

// family is 0 for IPv4 and 1 for IPv6.
func family(ip netip.Addr) int {
	if ip.Is4() {
		return 0
	}
	return 1
}
