// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
)

const (
	// wireGuardOverhead is what a packet gains in the WireGuard link, in bytes:
	// the outer IPv6 header 40, UDP 8 and WireGuard's data message 32 (WireGuard
	// whitepaper 5.4.6), so that it fits whichever family the endpoint is of.
	wireGuardOverhead = 80
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
	if t.cfg.ManageLocal {
		p.localRoutes()
	} else if p.leads {
		p.addOnRoutes()
	}
	p.local, p.state.Routes = p.state.Routes, nil
	sortRoutes(p.local)
	if p.leads {
		p.leaderRoutes()
	} else {
		p.memberRoutes()
	}
	p.cut()
	p.state.Routes = mergeRoutes(p.state.Routes, p.local)
	if t.cfg.AddOn != AddOnNone {
		p.besideAddOn()
	}
	p.firewall()
	p.clamp()
	if t.cfg.StrictEncryption {
		p.strict()
	}
	p.forwarding()
	p.acceptForward()
	p.state.Sort()
	return p.state, sortCompactProblems(p.problems), nil
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
	// local are the planned routes inside the site, sorted, while those that lead
	// away from it are planned.
	local    []Route
	state    State
	problems []Problem
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

// site yields the nodes that reach each other without the mesh: us and our neighbours.
func (p *planner) site() iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		if !yield(p.self) {
			return
		}
		for _, n := range p.neighbours {
			if !yield(n.Node) {
				return
			}
		}
	}
}

// isOwnSite reports whether the nodes of l are reached without the mesh.
func (p *planner) isOwnSite(l *Location) bool { return l.site == p.loc.site }

// forwarding finds the families of what passes through: packets of the own pods,
// and on the leader those to the rest of the location.
func (p *planner) forwarding() {
	var through [2]bool
	for n := range p.site() {
		if n != p.self && !p.leads {
			continue
		}
		for _, cidr := range n.PodCIDRs {
			through[family(cidr.Addr())] = true
		}
		for _, ip := range n.InternalIPs {
			through[family(ip.Addr())] = through[family(ip.Addr())] || n != p.self
		}
	}
	if p.leads {
		for _, alip := range p.loc.AllowedLocationIPs() {
			through[family(alip.Addr())] = true
		}
	}
	p.state.Forward4, p.state.Forward6 = through[0], through[1]
}

// acceptForward accepts what is forwarded on a leader for its location, on another node for its pods.
func (p *planner) acceptForward() {
	switch {
	case !p.t.cfg.ForwardRules || !p.t.cfg.ManageCNI:
	case p.leads:
		p.state.AcceptForward = slices.Concat(p.loc.PodCIDRs(), p.loc.InternalIPs(), p.loc.AllowedLocationIPs())
	default:
		p.state.AcceptForward = slices.Clone(p.self.PodCIDRs)
	}
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
	p.podMTU()
}

// podMTU finds the least MTU that packets of our pods meet here: that of our
// links, and of the one by which we reach neighbours in clear. What is smaller
// further on, they learn from ICMP and the segments that leaders clamp.
func (p *planner) podMTU() {
	least := p.state.Links[0].MTU
	for _, l := range p.state.Links {
		least = min(least, l.MTU)
	}
	for _, internal := range p.self.InternalIPs {
		inClear := func(n neighbour) bool {
			gateway := p.gateway(n.Node, internal.Addr())
			return gateway.IsValid() && !p.encapsulates(internal, gateway)
		}
		if slices.ContainsFunc(p.neighbours, inClear) {
			least = min(least, p.underlayMTU(internal.Addr()))
		}
	}
	p.state.PodMTU = least
}

// device plans the WireGuard device. A node that does not lead keeps its key
// in the device and nothing else.
func (p *planner) device(key SecretKey) {
	p.state.Device = Device{PrivateKey: key, ListenPort: p.self.ListenPort}
	if !p.leads {
		return
	}
	peers := make([]DevicePeer, 0, len(p.t.Locations)+len(p.t.Peers))
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
		peers = append(peers, DevicePeer{
			Key: lead.Key, Name: lead.Name, IsNode: true, Endpoint: endpoint, PersistentKeepalive: p.self.PersistentKeepalive, AllowedIPs: l.Owned(),
		})
	}
	for _, peer := range p.t.Peers {
		endpoint, _ := peer.Endpoint.AddrPort()
		keepalive := peer.PersistentKeepalive
		if keepalive == 0 {
			keepalive = p.self.PersistentKeepalive
		}
		peers = append(peers, DevicePeer{Key: peer.Key, Name: peer.Name, Endpoint: endpoint, PresharedKey: peer.PresharedKey, PersistentKeepalive: keepalive, AllowedIPs: peer.AllowedIPs})
	}
	p.state.Device.Peers = peers
}

// comesToUs reports whether a leader is behind NAT and can be expected to
// open its way to us: then its address, which means something else here, is no
// endpoint, and packets to that address may go through the tunnel. If we have
// no public endpoint that it could come to, trying the address is the only hope;
// and in the same location it means what it says.
func (p *planner) comesToUs(lead *Node, endpoint netip.AddrPort) bool {
	return lead.PersistentKeepalive != 0 && hasPublicEndpoint(p.self) && lead.Location != p.self.Location && endpoint.IsValid() && !IsPublic(endpoint.Addr())
}

// clamp finds the links that have room for less than others on the way: ours.
func (p *planner) clamp() {
	for _, l := range p.state.Links {
		if l.Up {
			p.state.Firewall.ClampDevs = append(p.state.Firewall.ClampDevs, l.Name)
		}
	}
}

// firewall plans what keeps its source and what does not: what leaves our pods
// or comes from a peer keeps it on the way to everything that the mesh knows,
// and gets the node's address on the way to the rest; what goes to our
// location's further prefixes gets it too, for the way back. Of prefixes within
// each other the narrowest counts.
func (p *planner) firewall() {
	f := &p.state.Firewall
	if p.t.cfg.ManageCNI {
		f.MasqueradeFrom = append(f.MasqueradeFrom, p.self.PodCIDRs...)
	}
	elsewhere := p.t.allowedLocationIPs(func(l *Location) bool { return !p.isOwnSite(l) })
	for _, alip := range p.siteAllowedLocationIPs() {
		around(elsewhere, alip, func(part netip.Prefix) { f.MasqueradeTo = append(f.MasqueradeTo, part) })
	}
	rest := slices.Clone(p.t.cfg.ServiceCIDRs)
	announced := p.t.allowedLocationIPs(func(*Location) bool { return true })
	for _, peer := range p.t.Peers {
		f.MasqueradeFrom = append(f.MasqueradeFrom, peer.AllowedIPs...)
		for _, ip := range peer.AllowedIPs {
			around(announced, ip, func(part netip.Prefix) { rest = append(rest, part) })
		}
	}
	for i := range p.t.Locations {
		l := &p.t.Locations[i]
		for _, known := range l.owned[:l.known()] {
			if known.Addr().Is6() {
				rest = append(rest, known)
			}
		}
	}
	SortPrefixes(rest)
	f.Known = make([]netip.Prefix, 0, len(p.t.claims.v4)+len(rest))
	for _, n := range p.t.claims.v4 {
		known := prefixOf(n >> placeBits)
		for len(rest) > 0 && ComparePrefix(rest[0], known) < 0 {
			f.Known, rest = append(f.Known, rest[0]), rest[1:]
		}
		f.Known = append(f.Known, known)
	}
	f.Known = append(f.Known, rest...)
}
