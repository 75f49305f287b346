// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// wireGuardOverhead is what a packet gains in the WireGuard link, in bytes:
// the outer IPv6 header 40, UDP 8 and WireGuard's data message 32 (WireGuard
// whitepaper 5.4.6), so that it fits whichever family the endpoint is of.
const wireGuardOverhead = 80

// fallbackMTU serves a host without a default route: 1500 less the overhead.
const fallbackMTU = 1420

// minMTU is the least that IPv6 works with (RFC 8200, section 5).
const minMTU = 1280

// State returns what the kernel of the node of that name needs. The secret key
// is the node's own. It fails if the node is not part of the mesh.
func (t *Topology) State(name string, key SecretKey, facts Facts) (State, []Problem, error) {
	i, j, ok := t.index(name)
	if !ok {
		return State{}, nil, fmt.Errorf("node/%s is not part of the mesh", name)
	}
	p := &planner{t: t, loc: &t.Locations[i], self: &t.Locations[i].Nodes[j], leads: t.Locations[i].Leader == j, facts: facts}
	p.links()
	p.device(key)
	if p.leads {
		p.leaderRoutes()
	} else {
		p.memberRoutes()
	}
	if t.cfg.ManageLocal {
		p.localRoutes()
	}
	p.firewall()
	return p.finish(), sortCompactProblems(p.problems), nil
}

// planner collects the State of one node.
type planner struct {
	t        *Topology
	loc      *Location
	self     *Node
	leads    bool
	facts    Facts
	state    State
	problems []Problem
}

func (p *planner) finish() State {
	s := p.state
	slices.SortFunc(s.Links, func(a, b Link) int { return cmp.Compare(a.Name, b.Name) })
	s.Addrs = sortCompact(s.Addrs, Addr.compare)
	s.Routes = sortCompact(s.Routes, Route.compare)
	s.Rules = sortCompact(s.Rules, Rule.compare)
	for _, cidr := range p.self.PodCIDRs {
		if cidr.Addr().Is4() {
			s.Forward4 = true
		} else {
			s.Forward6 = true
		}
	}
	return s
}

// links plans the WireGuard link, which only a leader's traffic uses, and the
// tunnel links of those families in which some packet inside the location needs one.
func (p *planner) links() {
	cfg := p.t.cfg
	mtu := cfg.MTU
	if mtu == 0 {
		mtu = fallbackMTU
		if p.facts.DefaultMTU != 0 {
			mtu = max(p.facts.DefaultMTU-wireGuardOverhead, minMTU)
		}
	}
	p.state.Links = append(p.state.Links, Link{Name: cfg.WireGuardDev, Kind: KindWireGuard, MTU: mtu, Up: p.leads})
	if p.leads {
		for _, ip := range p.loc.WireGuardIPs {
			cidr, _ := ofFamily(cfg.WireGuardCIDRs, ip)
			p.state.Addrs = append(p.state.Addrs, Addr{cfg.WireGuardDev, netip.PrefixFrom(ip, cidr.Bits())})
		}
	}
	for _, internal := range p.self.InternalIPs {
		if p.needsTunnel(internal) {
			p.tunnel(internal)
		}
	}
}

func (p *planner) tunnel(internal netip.Prefix) {
	link := Link{Name: p.tunnelDev(internal.Addr()), Kind: KindIPIP, MTU: 1500, Up: true}
	overhead := 20 // an IPv4 header
	if internal.Addr().Is6() {
		link.Kind, overhead = KindIP6Tnl, 40
	}
	if a, ok := p.facts.LinkOf(internal.Addr()); ok {
		link.MTU = a.MTU
	}
	link.MTU = max(link.MTU-overhead, minMTU)
	p.state.Links = append(p.state.Links, link)
	// An address of its own lets the host itself talk through the link to pods
	// (the base of the pod CIDR is given to no pod).
	if cidr, ok := ofFamily(p.self.PodCIDRs, internal.Addr()); ok && p.t.cfg.ManageLocal {
		p.state.Addrs = append(p.state.Addrs, Addr{link.Name, single(cidr.Addr())})
	}
	for i := range p.loc.Nodes {
		if ip, ok := p.loc.Nodes[i].InternalIP(internal.Addr()); ok {
			p.state.Firewall.TunnelFrom = append(p.state.Firewall.TunnelFrom, single(ip.Addr()))
		}
	}
}

func (p *planner) tunnelDev(like netip.Addr) string {
	if like.Is4() {
		return p.t.cfg.TunnelDev
	}
	return p.t.cfg.TunnelDev + "-6"
}

// needsTunnel reports whether we or a neighbour encapsulates packets between us.
func (p *planner) needsTunnel(internal netip.Prefix) bool {
	for i := range p.loc.Nodes {
		n := &p.loc.Nodes[i]
		if n.Name == p.self.Name {
			continue
		}
		if ip, ok := n.InternalIP(internal.Addr()); ok && (p.encapsulates(internal, ip.Addr()) || p.encapsulates(ip, internal.Addr())) {
			return true
		}
	}
	return false
}

// encapsulates reports whether a node with the internal IP from sends to the internal IP to through its tunnel link.
func (p *planner) encapsulates(from netip.Prefix, to netip.Addr) bool {
	switch p.t.cfg.Encapsulation {
	case EncapsulateAlways:
		return true
	case EncapsulateCrossSubnet:
		return !from.Masked().Contains(to)
	default:
		return false
	}
}

// device plans the WireGuard device. A node that does not lead keeps its key
// in the device and nothing else.
func (p *planner) device(key SecretKey) {
	p.state.Device = Device{PrivateKey: key, ListenPort: p.self.ListenPort}
	if !p.leads {
		return
	}
	d := &p.state.Device
	d.Peers = map[PublicKey]DevicePeer{}
	d.AllowedIPs = map[netip.Prefix]PublicKey{}
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		if l == p.loc {
			continue
		}
		lead := l.Lead()
		endpoint, _ := lead.Endpoint.AddrPort()
		if p.comesToUs(lead, endpoint) {
			endpoint = netip.AddrPort{}
		}
		d.Peers[lead.Key] = DevicePeer{Name: "node/" + lead.Name, Endpoint: endpoint, PersistentKeepalive: p.self.PersistentKeepalive}
		for _, prefix := range slices.Concat(l.known(), l.AllowedLocationIPs) {
			d.AllowedIPs[prefix] = lead.Key
		}
	}
	for _, peer := range p.t.Peers {
		endpoint, _ := peer.Endpoint.AddrPort()
		keepalive := peer.PersistentKeepalive
		if keepalive == 0 {
			keepalive = p.self.PersistentKeepalive
		}
		d.Peers[peer.Key] = DevicePeer{Name: "peer/" + peer.Name, Endpoint: endpoint, PresharedKey: peer.PresharedKey, PersistentKeepalive: keepalive}
		for _, prefix := range peer.AllowedIPs {
			d.AllowedIPs[prefix] = peer.Key
		}
	}
}

// comesToUs reports whether a leader is behind NAT and can be expected to
// open its way to us: then its address, which means something else here, is no
// endpoint, and packets to that address may go through the tunnel. If we are
// behind NAT too, trying the address is the only hope.
func (p *planner) comesToUs(lead *Node, endpoint netip.AddrPort) bool {
	return lead.PersistentKeepalive != 0 && p.self.PersistentKeepalive == 0 && endpoint.IsValid() && !IsPublic(endpoint.Addr())
}

func (p *planner) route(r Route) {
	if r.Table == 0 {
		r.Table = TableMain
	}
	r.OnLink = r.Via.IsValid()
	p.state.Routes = append(p.state.Routes, r)
}

// leaderRoutes sends what belongs to other locations and to peers into the
// WireGuard link. The source is the internal IP, which the others know as the
// node's own; without one the kernel takes the WireGuard IP.
func (p *planner) leaderRoutes() {
	dev := p.t.cfg.WireGuardDev
	source := func(dst netip.Prefix) netip.Addr {
		ip, _ := p.self.InternalIP(dst.Addr())
		return ip.Addr()
	}
	endpoints := p.endpoints()
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		if l == p.loc {
			continue
		}
		for _, dst := range slices.Concat(l.PodCIDRs, l.InternalIPs, l.AllowedLocationIPs) {
			if endpoints[dst.Addr()] && dst.IsSingleIP() {
				continue // what carries the tunnel cannot go through it
			}
			p.route(Route{Dst: dst, Via: l.WireGuardIP(dst.Addr()), Src: source(dst), Dev: dev})
		}
	}
	for _, peer := range p.t.Peers {
		for _, dst := range peer.AllowedIPs {
			if endpoints[dst.Addr()] && dst.IsSingleIP() {
				continue
			}
			p.route(Route{Dst: dst, Src: source(dst), Dev: dev})
		}
	}
}

// endpoints lists the addresses that the device sends to.
func (p *planner) endpoints() map[netip.Addr]bool {
	out := make(map[netip.Addr]bool, len(p.state.Device.Peers))
	for _, peer := range p.state.Device.Peers {
		if peer.Endpoint.IsValid() {
			out[peer.Endpoint.Addr()] = true
		}
	}
	return out
}

// memberRoutes sends what belongs to other locations and to peers to the leader.
func (p *planner) memberRoutes() {
	lead := p.loc.Lead()
	var dsts []netip.Prefix
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		for _, ip := range l.WireGuardIPs {
			dsts = append(dsts, single(ip))
		}
		if l != p.loc {
			dsts = append(dsts, slices.Concat(l.PodCIDRs, l.InternalIPs, l.AllowedLocationIPs)...)
		}
	}
	for _, peer := range p.t.Peers {
		dsts = append(dsts, peer.AllowedIPs...)
	}
	for _, dst := range dsts {
		p.via(lead, dst)
	}
}

// localRoutes sends what belongs to neighbours in the own location to them.
// Where packets between the two are encapsulated, so are those from our pods
// (and, on the leader, from the mesh) to the neighbour's internal IP: without
// that they would leave with a source that the underlay may not let pass.
func (p *planner) localRoutes() {
	for i := range p.loc.Nodes {
		n := &p.loc.Nodes[i]
		if n.Name == p.self.Name {
			continue
		}
		for _, cidr := range n.PodCIDRs {
			if slices.Contains(p.loc.PodCIDRs, cidr) {
				p.via(n, cidr)
			}
		}
		for _, remote := range n.InternalIPs {
			local, ok := p.self.InternalIP(remote.Addr())
			if !ok || !p.encapsulates(local, remote.Addr()) {
				continue
			}
			to := single(remote.Addr())
			p.route(Route{Dst: to, Via: remote.Addr(), Src: local.Addr(), Dev: p.tunnelDev(remote.Addr()), Table: TableTunnel})
			if from, ok := ofFamily(p.self.PodCIDRs, remote.Addr()); ok {
				p.state.Rules = append(p.state.Rules, Rule{From: from, To: to, Table: TableTunnel})
			}
			if p.leads {
				p.state.Rules = append(p.state.Rules, Rule{IIf: p.t.cfg.WireGuardDev, To: to, Table: TableTunnel})
			}
		}
	}
}

// reportNoInternalIP does not name dst: it would be one Problem for each of the mesh's prefixes.
func (p *planner) reportNoInternalIP(n *Node, dst netip.Prefix) {
	p.problems = append(p.problems, Problem{"node/" + n.Name, "internal-ip", fmt.Errorf("has none for %s, so the location's members do not reach %s through it; want an internal IP for each family of pods",
		familyName(dst.Addr()), familyName(dst.Addr()))})
}

// via plans a route to dst through a neighbour in the own location: in the
// tunnel link where packets to it are encapsulated, else on the link that
// carries our internal IP.
func (p *planner) via(n *Node, dst netip.Prefix) {
	local, ok := p.self.InternalIP(dst.Addr())
	if !ok {
		p.reportNoInternalIP(p.self, dst)
		return
	}
	remote, ok := n.InternalIP(dst.Addr())
	if !ok {
		p.reportNoInternalIP(n, dst)
		return
	}
	if p.encapsulates(local, remote.Addr()) {
		p.route(Route{Dst: dst, Via: remote.Addr(), Src: local.Addr(), Dev: p.tunnelDev(remote.Addr())})
		return
	}
	link, ok := p.facts.LinkOf(local.Addr())
	if !ok {
		p.problems = append(p.problems, Problem{"node/" + p.self.Name, "internal-ip", fmt.Errorf("%s is on no link of this host, so neighbours are not reached; want an address that the host has", local.Addr())})
		return
	}
	p.route(Route{Dst: dst, Via: remote.Addr(), Dev: link.Dev})
}

// firewall plans what keeps its source and what does not: what leaves our pods
// or comes from a peer keeps it on the way to everything that the mesh knows,
// and gets the node's address on the way to the rest; what goes to our
// location's further prefixes gets it too, for the way back.
func (p *planner) firewall() {
	f := &p.state.Firewall
	if p.t.cfg.ManageCNI {
		f.MasqueradeFrom = append(f.MasqueradeFrom, p.self.PodCIDRs...)
	}
	f.MasqueradeTo = p.loc.AllowedLocationIPs
	f.Known = append(f.Known, p.t.cfg.ServiceCIDRs...)
	for i := range p.t.Locations {
		f.Known = append(f.Known, p.t.Locations[i].known()...)
	}
	for _, peer := range p.t.Peers {
		f.MasqueradeFrom = append(f.MasqueradeFrom, peer.AllowedIPs...)
		f.Known = append(f.Known, peer.AllowedIPs...)
	}
	f.MasqueradeFrom = compactPrefixes(f.MasqueradeFrom)
	f.MasqueradeTo = compactPrefixes(f.MasqueradeTo)
	f.Known = compactPrefixes(f.Known)
	f.TunnelFrom = compactPrefixes(f.TunnelFrom)
}
