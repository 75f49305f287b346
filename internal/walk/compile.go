// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"net/netip"

	"github.com/kilomesh/kilo/internal/mesh"
)

const (
	bridgeDev = "kube-bridge"
)

// compile builds what walks look up.
func (h *host) compile(hosts int) {
	h.compileLinks()
	h.compileRoutes()
	h.compileRules()
	h.pods = tableOf(h.PodCIDRs)
	f := &h.State.Firewall
	h.sealed = tableOf(f.Sealed)
	h.masqFrom, h.masqTo, h.known, h.tunnelFrom = tableOf(f.MasqueradeFrom), tableOf(f.MasqueradeTo), tableOf(f.Known), tableOf(f.TunnelFrom)
	for _, peer := range h.State.Device.Peers {
		for _, p := range peer.AllowedIPs {
			h.allowed.add(p, len(h.peers))
		}
		h.peers = append(h.peers, peer.Key)
	}
	h.allowed.sort()
	if len(h.State.Neighs) > 0 {
		h.neighs = make(map[netip.Addr]*mesh.Neigh, len(h.State.Neighs))
		for i := range h.State.Neighs {
			n := &h.State.Neighs[i]
			h.neighs[n.IP] = n
		}
	}
	h.tunnels = make([]tunnelState, hosts)
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

func (h *host) compileLinks() {
	h.local = make(map[netip.Addr]int, 8)
	bridge := link{name: bridgeDev, kind: linkBridge, up: true}
	for _, p := range h.PodCIDRs {
		bridge.addrs[family(p.Addr())] = []netip.Prefix{netip.PrefixFrom(p.Addr().Next(), p.Bits())}
	}
	h.links = append(make([]link, 0, len(h.Links)+len(h.State.Links)+1), bridge)
	for _, l := range h.Links {
		c := link{name: l.Name, up: true, segment: l.Segment, overlay: l.Overlay}
		switch {
		case l.Overlay != nil:
			c.kind = linkOverlay
		case l.Kind == mesh.KindIPIP:
			c.kind = linkTunnel4
		case l.Kind == mesh.KindIP6Tnl:
			c.kind = linkTunnel6
		}
		for _, p := range l.Addrs {
			c.addrs[family(p.Addr())] = append(c.addrs[family(p.Addr())], p)
		}
		h.links = append(h.links, c)
	}
	for _, l := range h.State.Links {
		c := link{name: l.Name, up: l.Up, own: l}
		switch l.Kind {
		case mesh.KindWireGuard:
			c.kind, h.wireGuard = linkWireGuard, len(h.links)
		case mesh.KindIPIP:
			c.kind = linkTunnel4
		case mesh.KindIP6Tnl:
			c.kind = linkTunnel6
		case mesh.KindVXLAN:
			c.kind = linkVXLAN
		}
		h.links = append(h.links, c)
	}
	for _, a := range h.State.Addrs {
		if i := h.linkIndex(a.Dev); i >= 0 {
			f := family(a.Prefix.Addr())
			h.links[i].addrs[f] = append(h.links[i].addrs[f], a.Prefix)
		}
	}
	for i := range h.links {
		for _, ps := range h.links[i].addrs {
			for _, p := range ps {
				h.local[p.Addr()] = i
			}
		}
	}
}

func (h *host) linkIndex(name string) int {
	for i := range h.links {
		if h.links[i].name == name {
			return i
		}
	}
	return -1
}

// compileRoutes fills the tables: routes of others first, for the agent never
// takes the place of one to the same destination.
func (h *host) compileRoutes() {
	add := func(t *table, dst netip.Prefix, r route) {
		t.add(dst, len(h.routes))
		h.routes = append(h.routes, r)
	}
	h.routes = make([]route, 0, len(h.State.Routes)+len(h.Routes)+8)
	for _, r := range h.Routes {
		add(h.table(mesh.TableMain), r.Dst, route{via: r.Via, link: h.linkIndex(r.Dev), dev: r.Dev})
	}
	for i := range h.links {
		l := &h.links[i]
		if !l.up {
			continue
		}
		for _, ps := range l.addrs {
			for _, p := range ps {
				if !p.IsSingleIP() {
					add(h.table(mesh.TableMain), p.Masked(), route{src: p.Addr(), link: i, dev: l.name})
				}
			}
		}
	}
	for _, r := range h.State.Routes {
		add(h.table(r.Table), r.Dst, route{via: r.Via, src: r.Src, link: h.linkIndex(r.Dev), dev: r.Dev})
	}
	for i := range h.tables {
		h.tables[i].sort()
	}
}

// table returns the routing table of that number.
func (h *host) table(number int) *table {
	switch number {
	case mesh.TableTunnel:
		return &h.tables[1]
	case mesh.TableAddOn:
		return &h.tables[2]
	case mesh.TableSealed:
		return &h.tables[3]
	default:
		return &h.tables[0]
	}
}

func (h *host) compileRules() {
	for _, r := range h.State.Rules {
		c := rule{Rule: r}
		f := 0
		if r.From.IsValid() {
			c.from, c.hasFrom, f = entryOf(r.From, 0), true, family(r.From.Addr())
		}
		if r.To.IsValid() {
			c.to, c.hasTo, f = entryOf(r.To, 0), true, family(r.To.Addr())
		}
		h.rules[f] = append(h.rules[f], c)
	}
}

// loopback is the iif of packets that the host itself sends.
const loopback = -1

// route looks up the way of a packet, as the kernel does: the rules, then table main.
func (h *host) route(p packet, iif int) *route {
	src, dst := p.src, p.dst
	rules := h.rules[family(dst)]
	if len(rules) > 0 {
		to, from := bitsOf(dst), bits128{}
		if src.IsValid() {
			from = bitsOf(src)
		}
		for i := range rules {
			r := &rules[i]
			if r.hasTo && !r.to.contains(to) || r.hasFrom && (!src.IsValid() || !r.from.contains(from)) {
				continue
			}
			if r.Protocol != 0 && !p.isOf(r.Protocol, r.SourcePorts, h.State.Device.ListenPort) {
				continue
			}
			if r.IIf != "" && (iif == loopback || h.links[iif].name != r.IIf) {
				continue
			}
			if n := h.table(r.Table).get(dst); n >= 0 {
				return &h.routes[n]
			}
		}
	}
	if n := h.table(mesh.TableMain).get(dst); n >= 0 {
		return &h.routes[n]
	}
	return nil
}

// isOf reports whether a packet is of a protocol, and from one of the ports:
// WireGuard's own are, the others are taken for TCP.
func (p packet) isOf(protocol mesh.Protocol, ports mesh.PortRange, listen uint16) bool {
	if p.sealed {
		return protocol == mesh.ProtocolUDP && ports.Has(listen)
	}
	return protocol == mesh.ProtocolTCP
}

// source chooses the address of packets that the host sends over a link to a
// gateway or destination (inet_select_addr of net/ipv4/devinet.c; RFC 6724 for IPv6).
func (h *host) source(out int, via, dst netip.Addr) netip.Addr {
	next := via
	if !next.IsValid() {
		next = dst
	}
	f := family(dst)
	if out >= 0 {
		if a := choose(h.links[out].addrs[f], next, dst); a.IsValid() {
			return a
		}
	}
	for n := range h.links {
		i := (n + 1) % len(h.links) // the bridge came last
		if !h.links[i].up {
			continue
		}
		if a := choose(h.links[i].addrs[f], next, dst); a.IsValid() {
			return a
		}
	}
	return netip.Addr{}
}

func choose(addrs []netip.Prefix, next, dst netip.Addr) netip.Addr {
	if len(addrs) == 0 {
		return netip.Addr{}
	}
	best := addrs[0].Addr()
	if dst.Is4() {
		for _, p := range addrs {
			if p.Contains(next) {
				return p.Addr()
			}
		}
		return best
	}
	for _, p := range addrs[1:] {
		if a := p.Addr(); better6(a, best, dst) {
			best = a
		}
	}
	return best
}

// better6 compares by label (RFC 6724, rule 6), then by the longest common prefix (rule 8).
func better6(a, b, dst netip.Addr) bool {
	if x, y := a.IsPrivate() == dst.IsPrivate(), b.IsPrivate() == dst.IsPrivate(); x != y {
		return x
	}
	return commonBits(a, dst) > commonBits(b, dst)
}
