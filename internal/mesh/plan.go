// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
)

// What a packet gains on its way through a link, in bytes.
const (
	// wireGuardOverhead: the outer IPv6 header 40, UDP 8 and WireGuard's data
	// message 32 (WireGuard whitepaper 5.4.6), so that it fits whichever family
	// the endpoint is of.
	wireGuardOverhead = 80
	// ipipOverhead is an IPv4 header, ip6tnlOverhead an IPv6 one.
	ipipOverhead   = 20
	ip6tnlOverhead = 40
	// A VXLAN packet gains an outer header, UDP 8, VXLAN 8 and Ethernet 14 (RFC 7348, section 5).
	vxlanOverhead4 = 50
	vxlanOverhead6 = 70
)

const (
	// fallbackMTU serves a host without a default route: 1500 less the overhead.
	fallbackMTU = 1500 - wireGuardOverhead
	// minMTU is the least that IPv6 works with (RFC 8200, section 5).
	minMTU = 1280
)

// State returns what the kernel of the node of that name needs. The secret key
// is the node's own. It fails if the node is not part of the mesh.
func (t *Topology) State(name string, key SecretKey, facts Facts) (State, []Problem, error) {
	i, j, ok := t.index(name)
	if !ok {
		return State{}, nil, fmt.Errorf("node/%s is not part of the mesh", name)
	}
	p := &planner{t: t, loc: &t.Locations[i], self: t.Locations[i].Nodes[j], leads: t.Locations[i].Leader == j, facts: facts}
	p.findNeighbours()
	p.links()
	p.device(key)
	if p.leads {
		p.leaderRoutes()
	} else {
		p.memberRoutes()
	}
	if t.cfg.ManageLocal {
		p.localRoutes()
	} else if p.leads {
		p.addOnRoutes()
	}
	p.firewall()
	return p.finish(), sortCompactProblems(p.problems), nil
}

// planner collects the State of one node.
type planner struct {
	t     *Topology
	loc   *Location
	self  *Node
	leads bool
	facts Facts
	// neighbours are the other nodes that we reach without the mesh.
	neighbours []neighbour
	// outerLike is of the family of outer, zero until it is asked for.
	outerLike netip.Addr
	state     State
	problems  []Problem
}

// neighbour is a node of the own site, and the Location that it is in.
type neighbour struct {
	*Node
	loc *Location
}

func (p *planner) findNeighbours() {
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		if !p.isOwnSite(l) {
			continue
		}
		for _, n := range l.Nodes {
			if n != p.self {
				p.neighbours = append(p.neighbours, neighbour{n, l})
			}
		}
	}
}

// isOwnSite reports whether the nodes of l are reached without the mesh.
func (p *planner) isOwnSite(l *Location) bool {
	// Sites differ in their ends, and most in their lengths: the last byte settles nearly all.
	a, b := l.Site, p.loc.Site
	return len(a) == len(b) && a[len(a)-1] == b[len(b)-1] && a == b
}

func (p *planner) finish() State {
	s := p.state
	slices.SortFunc(s.Links, func(a, b Link) int { return cmp.Compare(a.Name, b.Name) })
	s.Addrs = sortCompact(s.Addrs, Addr.compare)
	s.Routes = sortRoutes(s.Routes)
	s.Rules = sortCompact(s.Rules, Rule.compare)
	s.Neighs = sortCompact(s.Neighs, Neigh.compare)
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
		if p.ownsTunnel(internal.Addr()) && p.needsTunnel(internal) {
			p.tunnel(internal)
		}
	}
}

// ownsTunnel reports whether the tunnel link of that family is ours to make.
func (p *planner) ownsTunnel(like netip.Addr) bool {
	switch p.t.cfg.AddOn {
	case AddOnFlannel:
		return false
	case AddOnCilium:
		return !like.Is4() || !p.facts.CiliumTunnel
	default:
		return true
	}
}

// tunnelDev names the link that encapsulates packets to a gateway of that family.
func (p *planner) tunnelDev(like netip.Addr) string {
	cfg := p.t.cfg
	switch {
	case cfg.AddOn == AddOnFlannel && like.Is4():
		return FlannelDev4
	case cfg.AddOn == AddOnFlannel:
		return FlannelDev6
	case cfg.AddOn == AddOnCilium && like.Is4() && p.facts.CiliumTunnel:
		return CiliumTunnelDev
	case cfg.Tunnel == KindVXLAN:
		return cfg.VXLANDev
	case like.Is4():
		return cfg.TunnelDev
	default:
		return cfg.TunnelDev + "-6"
	}
}

// needsTunnel reports whether we or a neighbour encapsulates packets between us.
func (p *planner) needsTunnel(internal netip.Prefix) bool {
	if !p.t.cfg.ManageLocal && p.t.cfg.AddOn == AddOnNone {
		// Then the only packets are those between members and leader.
		return p.talksThroughTunnel(internal, func(n neighbour) bool { return p.leads || n.loc == p.loc && n.Node == p.loc.Lead() })
	}
	return p.talksThroughTunnel(internal, func(neighbour) bool { return true })
}

func (p *planner) talksThroughTunnel(internal netip.Prefix, with func(neighbour) bool) bool {
	for _, n := range p.neighbours {
		if !with(n) {
			continue
		}
		ip, ok := n.InternalIP(internal.Addr())
		there, here := p.gateway(n.Node, internal.Addr()), p.gateway(p.self, internal.Addr())
		if ok && (there.IsValid() && p.encapsulates(internal, there) || here.IsValid() && p.encapsulates(ip, here)) {
			return true
		}
	}
	return false
}

// encapsulates reports whether a node with the internal IP from sends packets
// for the gateway to through its tunnel link.
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

// tunnel plans the tunnel link of the internal IP's family and what belongs to it.
func (p *planner) tunnel(internal netip.Prefix) {
	if p.t.cfg.Tunnel == KindVXLAN {
		p.vxlan(internal)
		return
	}
	link := Link{Name: p.tunnelDev(internal.Addr()), Kind: KindIPIP, MTU: p.underlayMTU(internal.Addr()) - ipipOverhead, Up: true}
	if internal.Addr().Is6() {
		link.Kind, link.MTU = KindIP6Tnl, link.MTU+ipipOverhead-ip6tnlOverhead
	}
	link.MTU = max(link.MTU, minMTU)
	p.state.Links = append(p.state.Links, link)
	p.tunnelAddr(link.Name, internal.Addr())
	p.admit(p.self, internal.Addr())
	for _, n := range p.neighbours {
		p.admit(n.Node, internal.Addr())
	}
}

// tunnelAddr gives a tunnel link the base of the pod CIDR, which no pod gets:
// with an address of its own the link lets the host itself talk to pods.
func (p *planner) tunnelAddr(dev string, like netip.Addr) {
	if cidr, ok := ofFamily(p.self.PodCIDRs, like); ok && p.t.cfg.ManageLocal {
		p.state.Addrs = append(p.state.Addrs, Addr{dev, single(cidr.Addr())})
	}
}

// admit lets tunnel packets of a node in. In Cilium's overlay they come from the
// node's address there.
func (p *planner) admit(n *Node, like netip.Addr) {
	if ip, ok := n.InternalIP(like); ok {
		p.state.Firewall.TunnelFrom = append(p.state.Firewall.TunnelFrom, single(ip.Addr()))
	}
	if p.t.cfg.AddOn == AddOnCilium {
		for _, ip := range n.CNICompatibilityIPs {
			if ip.Is4() == like.Is4() {
				p.state.Firewall.TunnelFrom = append(p.state.Firewall.TunnelFrom, single(ip))
			}
		}
	}
}

func (p *planner) underlayMTU(internal netip.Addr) int {
	if a, ok := p.facts.LinkOf(internal); ok {
		return a.MTU
	}
	return 1500
}

// vxlan plans the one vxlan link, which carries both families of packets.
func (p *planner) vxlan(internal netip.Prefix) {
	outer, ok := p.outer(p.self)
	if !ok {
		p.reportNoOuter(p.self)
		return
	}
	dev := p.t.cfg.VXLANDev
	if !slices.ContainsFunc(p.state.Links, func(l Link) bool { return l.Name == dev }) {
		overhead := vxlanOverhead4
		if outer.Is6() {
			overhead = vxlanOverhead6
		}
		p.state.Links = append(p.state.Links, Link{
			Name: dev, Kind: KindVXLAN, MTU: max(p.underlayMTU(outer)-overhead, minMTU), Up: true, Local: outer, MAC: macOf(outer),
		})
	}
	p.tunnelAddr(dev, internal.Addr())
	p.state.Firewall.TunnelPort = VXLANPort
	p.admit(p.self, outer)
	for _, n := range p.neighbours {
		remote, ok := p.outer(n.Node)
		gateway, has := n.InternalIP(internal.Addr())
		if !ok || !has {
			continue
		}
		p.admit(n.Node, outer)
		p.state.Neighs = append(p.state.Neighs, Neigh{Dev: dev, IP: p.nextHop(n.Node, gateway.Addr()), MAC: macOf(remote), Remote: remote})
	}
}

// outer returns the address of a node of this site that vxlan packets travel
// between. They do so in one family everywhere: the one that more nodes have,
// IPv4 if as many have IPv6.
func (p *planner) outer(n *Node) (netip.Addr, bool) {
	if !p.outerLike.IsValid() {
		p.outerLike = netip.IPv4Unspecified()
		count := 0 // of those with IPv4, less those with IPv6
		for _, m := range append([]neighbour{{Node: p.self}}, p.neighbours...) {
			for _, ip := range m.InternalIPs {
				count += 1 - 2*family(ip.Addr())
			}
		}
		if count < 0 {
			p.outerLike = netip.IPv6Unspecified()
		}
	}
	ip, ok := n.InternalIP(p.outerLike)
	return ip.Addr(), ok
}

func (p *planner) reportNoOuter(n *Node) {
	p.problems = append(p.problems, Problem{"node/" + n.Name, "internal-ip", fmt.Errorf("has none for %s, which most nodes of its location have and their vxlan packets travel in, so they do not reach each other; want one",
		familyName(p.outerLike))})
}

// nextHop returns the address on the tunnel link for a gateway on the other
// side of it, zero if the link does not reach that. On the vxlan link it is
// link-local for IPv6: the kernel refuses an on-link gateway there that another
// link leads to (net/ipv6/route.c, ip6_route_check_nh_onlink).
func (p *planner) nextHop(n *Node, gateway netip.Addr) netip.Addr {
	if p.t.cfg.Tunnel != KindVXLAN {
		return gateway
	}
	_, here := p.outer(p.self)
	remote, there := p.outer(n)
	switch {
	case !here:
		p.reportNoOuter(p.self)
		return netip.Addr{}
	case !there:
		p.reportNoOuter(n)
		return netip.Addr{}
	case gateway.Is4():
		return gateway
	}
	m := macOf(remote)
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 8: m[0] ^ 0x02, 9: m[1], 10: m[2], 11: 0xff, 12: 0xfe, 13: m[3], 14: m[4], 15: m[5]}) // RFC 4291, appendix A
}

// macOf derives the address on the vxlan link from the one on the underlay, so
// that nobody has to ask for it: a locally administered unicast address (IEEE
// 802, clause 8.4).
func macOf(ip netip.Addr) MAC {
	sum := sha256.Sum256(ip.AsSlice())
	m := MAC(sum[:6])
	m[0] = m[0]&^0x01 | 0x02
	return m
}

// device plans the WireGuard device. A node that does not lead keeps its key
// in the device and nothing else.
func (p *planner) device(key SecretKey) {
	p.state.Device = Device{PrivateKey: key, ListenPort: p.self.ListenPort}
	if !p.leads {
		return
	}
	d := &p.state.Device
	d.Peers = make(map[PublicKey]DevicePeer, len(p.t.Locations)+len(p.t.Peers))
	room := make([]netip.Prefix, 0, p.t.prefixes) // in which the lists of all peers lie
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		if p.isOwnSite(l) {
			continue
		}
		lead := l.Lead()
		endpoint, _ := lead.Endpoint.AddrPort()
		if p.comesToUs(lead, endpoint) {
			endpoint = netip.AddrPort{}
		}
		start := len(room)
		room = append(l.appendKnown(room), l.AllowedLocationIPs...)
		d.Peers[lead.Key] = DevicePeer{
			Name: "node/" + lead.Name, Endpoint: endpoint, PersistentKeepalive: p.self.PersistentKeepalive,
			AllowedIPs: room[start:len(room):len(room)],
		}
	}
	for _, peer := range p.t.Peers {
		endpoint, _ := peer.Endpoint.AddrPort()
		keepalive := peer.PersistentKeepalive
		if keepalive == 0 {
			keepalive = p.self.PersistentKeepalive
		}
		d.Peers[peer.Key] = DevicePeer{Name: "peer/" + peer.Name, Endpoint: endpoint, PresharedKey: peer.PresharedKey, PersistentKeepalive: keepalive, AllowedIPs: peer.AllowedIPs}
	}
}

// comesToUs reports whether a leader is behind NAT and can be expected to
// open its way to us: then its address, which means something else here, is no
// endpoint, and packets to that address may go through the tunnel. If we have
// no public endpoint that it could come to, trying the address is the only hope;
// and in the same location it means what it says.
func (p *planner) comesToUs(lead *Node, endpoint netip.AddrPort) bool {
	return lead.PersistentKeepalive != 0 && hasPublicEndpoint(p.self) && lead.Location != p.self.Location && endpoint.IsValid() && !IsPublic(endpoint.Addr())
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
	f.MasqueradeTo = p.siteAllowedLocationIPs()
	f.Known = make([]netip.Prefix, 0, len(p.t.cfg.ServiceCIDRs)+p.t.prefixes)
	f.Known = append(f.Known, p.t.cfg.ServiceCIDRs...)
	for i := range p.t.Locations {
		f.Known = p.t.Locations[i].appendKnown(f.Known)
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
