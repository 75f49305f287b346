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
		for i, p := range l.owned {
			if (i < int(l.pods+l.internals) || i >= l.known()) && !yield(p) {
				return
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
// node's own; without one the kernel takes the WireGuard IP. So it does if
// another node owns the internal IP, and if that is the node's endpoint: the
// others do not send it into their tunnels, and answers would leave in clear.
func (p *planner) leaderRoutes() {
	var source [2]netip.Addr // of IPv4, of IPv6
	for _, ip := range p.self.InternalIPs {
		answered := ip.Addr() != p.self.Endpoint.IP && slices.Contains(p.loc.InternalIPs(), single(ip.Addr()))
		if answered || !p.loc.WireGuardIP(ip.Addr()).IsValid() {
			source[family(ip.Addr())] = ip.Addr()
		}
	}
	add := func(dst netip.Prefix, via netip.Addr) {
		p.route(Route{Dst: dst, Via: via, Src: source[family(dst.Addr())], Dev: p.t.cfg.WireGuardDev})
	}
	p.state.Routes = make([]Route, 0, p.t.prefixes-len(p.t.Locations)+len(p.t.Peers)+len(p.local))
	for _, n := range p.t.claims.v4 { // in their order, which saves sorting them
		l := &p.t.Locations[p.t.claims.where[placeOf(n)]]
		dst := prefixOf(n >> placeBits)
		if via := l.WireGuardIP(dst.Addr()); via != dst.Addr() && !p.isOwnSite(l) {
			add(dst, via)
		}
	}
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		if p.isOwnSite(l) {
			continue
		}
		for i, dst := range l.owned {
			via := l.WireGuardIP(dst.Addr())
			if known := i < l.known(); known && dst.Addr().Is4() || dst == single(via) {
				continue
			}
			add(dst, via)
		}
	}
	for _, peer := range p.t.Peers {
		for _, dst := range peer.AllowedIPs {
			add(dst, netip.Addr{})
		}
	}
	for _, cidr := range p.t.cfg.WireGuardCIDRs {
		if !p.loc.WireGuardIP(cidr.Addr()).IsValid() { // whose subnet would be this route
			add(cidr, netip.Addr{})
		}
	}
}

// holes lists them, for routes that are sorted and not cut yet.
func (p *planner) holes() holes {
	h := holes{v4: make([]uint64, 0, len(p.state.Device.Peers)+len(p.neighbours)+1)}
	for _, peer := range p.state.Device.Peers {
		if peer.Endpoint.IsValid() && !p.isAnothers(peer) {
			h.add(single(peer.Endpoint.Addr()))
		}
	}
	for _, hole := range p.siteAllowedLocationIPs() {
		h.add(hole)
	}
	for n := range p.site() {
		for _, ip := range n.InternalIPs {
			h.add(single(ip.Addr()))
		}
	}
	h.sort()
	return h
}

// allowedLocationIPs lists those of some locations.
func (t *Topology) allowedLocationIPs(of func(*Location) bool) holes {
	var h holes
	for i := range t.Locations {
		if !of(&t.Locations[i]) {
			continue
		}
		for _, alip := range t.Locations[i].AllowedLocationIPs() {
			h.add(alip)
		}
	}
	h.sort()
	return h
}

// isAnothers reports whether the private endpoint of a peer is an address that in
// the mesh belongs to a node of another location: in another network they mean another.
func (p *planner) isAnothers(peer DevicePeer) bool {
	ip := peer.Endpoint.Addr()
	if !ip.IsValid() || IsPublic(ip) {
		return false
	}
	location, ok := p.t.claims.location(single(ip))
	return ok && p.t.Locations[location].Lead().Key != peer.Key
}

// sealed plans the ways to where peers are heard from, if not at their endpoints,
// and to endpoints that are also another's address, and adds these to the holes.
// What carries the tunnel cannot go through it, but all else that is for such an
// address in the mesh must. So the ways are in TableSealed, which only
// WireGuard's own packets pass by.
func (p *planner) sealed(h *holes) (sealed []Route) {
	var lengths [2][]bool // once somebody asks
	seal := func(ip netip.Addr) {
		if lengths[0] == nil {
			lengths = p.lengths()
		}
		r := p.longest(ip, lengths[family(ip)])
		if r == nil || r.Dev != p.t.cfg.WireGuardDev || h.has(single(ip)) {
			return
		}
		way := *r
		way.Dst, way.Table = single(ip), TableSealed
		sealed = append(sealed, way)
	}
	for _, peer := range p.state.Device.Peers {
		if p.isAnothers(peer) {
			seal(peer.Endpoint.Addr())
		}
		if seen, ok := p.facts.PeerAddrs[peer.Key]; ok && seen != peer.Endpoint.Addr() {
			seal(seen)
		}
	}
	sortRoutes(sealed)
	sealed = slices.CompactFunc(sealed, func(a, b Route) bool { return a.Dst == b.Dst })
	for _, r := range sealed {
		h.add(r.Dst)
	}
	h.sort()
	return sealed
}

// lengths tells which prefix lengths the planned routes have, of IPv4 and IPv6.
func (p *planner) lengths() [2][]bool {
	have := [2][]bool{make([]bool, 32+1), make([]bool, 128+1)}
	for _, routes := range [][]Route{p.state.Routes, p.local} {
		for i := range routes {
			have[family(routes[i].Dst.Addr())][routes[i].Dst.Bits()] = true
		}
	}
	return have
}

// longest returns the planned route in table main that carries packets to ip, nil
// without one, if there are only prefixes of certain lengths.
func (p *planner) longest(ip netip.Addr, lengths []bool) *Route {
	for bits, have := range slices.Backward(lengths) {
		if have {
			if r := p.planned(netip.PrefixFrom(ip, bits).Masked()); r != nil {
				return r
			}
		}
	}
	return nil
}

// siteAllowedLocationIPs are the further prefixes that are reached from here without the mesh.
func (p *planner) siteAllowedLocationIPs() []netip.Prefix {
	ps := slices.Clone(p.loc.AllowedLocationIPs())
	for _, n := range p.neighbours {
		if n.loc != p.loc { // granularity cross
			ps = append(ps, n.loc.AllowedLocationIPs()...)
		}
	}
	return ps
}

// cut takes the holes out of the routes to other locations, and sorts these.
func (p *planner) cut() {
	sortRoutes(p.state.Routes)
	h := p.holes()
	sealed := p.sealed(&h)
	var parts []Route
	cut := map[netip.Prefix]bool{}
	for i := range p.state.Routes {
		r := &p.state.Routes[i]
		h.from(r.Dst)
		if r.Dst.Bits() == 0 || h.hits(r.Dst) {
			cut[r.Dst] = true
			parts = append(parts, p.around(h, *r)...)
		}
	}
	if len(cut) > 0 {
		p.state.Routes = append(slices.DeleteFunc(p.state.Routes, func(r Route) bool { return cut[r.Dst] }), parts...)
	}
	p.state.Routes = append(p.state.Routes, sealed...)
	sortRoutes(p.state.Routes)
	for i, all := range everything() {
		if slices.ContainsFunc(sealed, func(r Route) bool { return family(r.Dst.Addr()) == i }) {
			p.state.Rules = append(p.state.Rules, SealingRules(all, p.self.ListenPort)...)
		}
	}
}

// around returns the routes to what of r.Dst is no hole. Where a narrower prefix
// has a route of its own, that carries the packet.
func (p *planner) around(h holes, r Route) (parts []Route) {
	whole := []netip.Prefix{r.Dst}
	if r.Dst.Bits() == 0 { // to which the host has a route of its own, perhaps
		low, high := halves(r.Dst)
		whole = []netip.Prefix{low, high}
	}
	narrower := func(dst netip.Prefix) bool { return p.planned(dst) != nil }
	for _, dst := range whole {
		h.spare(dst, narrower, func(part netip.Prefix) {
			r.Dst = part
			parts = append(parts, r)
		})
	}
	return parts
}

// lastRulePort is the greatest that the kernel takes in a rule (fib_rule_port_range_valid
// of net/core/fib_rules.c). Nothing is sent from 65535 unless somebody asks for it.
const lastRulePort = 65534

// SealingRules lead everything but what WireGuard sends from its port to
// TableSealed. They name the protocols, for a rule that is about all would be about
// ARP too, and a strict reverse path filter would drop that (rp_filter in ip-sysctl);
// of what comes to WireGuard's port the filter turns the ports round.
func SealingRules(all netip.Prefix, port uint16) []Rule {
	icmp := ProtocolICMP
	if all.Addr().Is6() {
		icmp = ProtocolICMPv6
	}
	var rules []Rule
	for _, protocol := range []Protocol{ProtocolTCP, icmp, ProtocolSCTP} {
		rules = append(rules, Rule{To: all, Protocol: protocol, Table: TableSealed})
	}
	for _, ports := range []PortRange{{1, port - 1}, {port + 1, lastRulePort}} {
		if ports.First <= ports.Last && ports.First > 0 {
			rules = append(rules, Rule{To: all, Protocol: ProtocolUDP, SourcePorts: ports, Table: TableSealed})
		}
	}
	return rules
}

// everything returns the prefixes of length 0, of IPv4 and IPv6.
func everything() [2]netip.Prefix {
	return [2]netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
}

// planned returns the planned route to dst in table main, nil without one.
func (p *planner) planned(dst netip.Prefix) *Route {
	for _, routes := range [][]Route{p.state.Routes, p.local} {
		i, ok := slices.BinarySearchFunc(routes, Route{Dst: dst, Table: TableMain}, func(r, want Route) int { return r.CompareTarget(&want) })
		if ok {
			return &routes[i]
		}
	}
	return nil
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
	// Of two nodes with one prefix the first has it, or we.
	taken := make(map[netip.Prefix]bool, len(p.neighbours))
	for _, cidr := range p.self.PodCIDRs {
		taken[cidr] = true
	}
	for _, n := range p.neighbours {
		for _, cidr := range n.PodCIDRs {
			if !taken[cidr] && slices.Contains(n.loc.PodCIDRs(), cidr) {
				taken[cidr] = true
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
			if remote.Addr() == local.Addr() || taken[single(remote.Addr())] {
				continue
			}
			taken[single(remote.Addr())] = true
			if !p.divert(n.Node, remote.Addr(), local.Addr()) {
				continue
			}
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
// on the leader the rule that leads packets from the mesh to it. It reports
// whether there is a way.
func (p *planner) divert(n *Node, remote, source netip.Addr) bool {
	gateway := p.gateway(n, remote)
	if gateway.IsValid() {
		gateway = p.nextHop(n, gateway)
	}
	if !gateway.IsValid() {
		return false
	}
	p.route(Route{Dst: single(remote), Via: gateway, Src: source, Dev: p.tunnelDev(remote), Table: TableTunnel})
	if p.leads {
		p.state.Rules = append(p.state.Rules, Rule{IIf: p.t.cfg.WireGuardDev, To: single(remote), Table: TableTunnel})
	}
	return true
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
		if hop := p.nextHop(n, gateway); hop.IsValid() {
			p.route(Route{Dst: dst, Via: hop, Src: local.Addr(), Dev: p.tunnelDev(gateway)})
		}
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

// besideAddOn moves the routes to pod CIDRs out of table main, where those of
// the other pod network are, which sends what is for any node into its own tunnel.
func (p *planner) besideAddOn() {
	pods := map[netip.Prefix]bool{}
	for i := range p.t.Locations {
		for _, cidr := range p.t.Locations[i].PodCIDRs() {
			pods[cidr] = true
		}
	}
	var wanted [2]bool // of IPv4, of IPv6
	for _, cidr := range p.self.PodCIDRs {
		wanted[family(cidr.Addr())] = true
	}
	for i := range p.state.Routes {
		if r := &p.state.Routes[i]; r.Table == TableMain && pods[r.Dst] {
			r.Table, wanted[family(r.Dst.Addr())] = TableAddOn, true
		}
	}
	for i, all := range everything() {
		if wanted[i] {
			p.state.Rules = append(p.state.Rules, Rule{To: all, Table: TableAddOn})
		}
	}
}
