// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
)

// What a packet gains on its way through a tunnel link, in bytes.
const (
	// ipipOverhead is an IPv4 header, ip6tnlOverhead an IPv6 one.
	ipipOverhead   = 20
	ip6tnlOverhead = 40
	// A VXLAN packet gains an outer header, UDP 8, VXLAN 8 and Ethernet 14 (RFC 7348, section 5).
	vxlanOverhead4 = 50
	vxlanOverhead6 = 70
)

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
		for m := range p.site() {
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
