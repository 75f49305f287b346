// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"net/netip"
	"slices"

	"github.com/kilomesh/kilo/internal/mesh"
)

// Pair is a packet that must arrive, and be answered.
type Pair struct {
	Packet
	// To is where it must arrive.
	To Place
	// Sealed: it must go through WireGuard, there and back. Whether or not, it may
	// never go in clear between locations.
	Sealed bool
	// Masqueraded: it must arrive with an address that the site of To knows;
	// else with the source that it was sent with.
	Masqueraded bool
	// Sources are those that the host may choose; none is no wish.
	Sources []netip.Addr
}

// Check walks the packet and the answer. The error is a *Death.
func (w *World) Check(p Pair) (Trace, error) {
	t, err := w.Ping(p.Packet)
	if err != nil {
		return t, err
	}
	fail := func(c Cause) (Trace, error) {
		return t, &Death{Cause: c, Where: t.At.String(), Src: t.Sent, Dst: p.Dst, Trace: t}
	}
	switch {
	case t.At != p.To:
		return fail(CauseMisdelivered)
	case len(t.Clear) > 0:
		return fail(CauseClear)
	case p.Sealed && t.Sealed < 2:
		return fail(CauseNotSealed)
	case !p.Masqueraded && t.Seen != t.Sent:
		return fail(CauseSource)
	case p.Masqueraded && w.byName[p.From].pods.has(t.Seen):
		return fail(CauseSource)
	}
	if len(p.Sources) == 0 || slices.Contains(p.Sources, t.Sent) {
		return t, nil
	}
	return fail(CauseSource)
}

// Inside says who routes between the nodes of a location.
type Inside uint8

// Nobody; another pod network; the mesh.
const (
	InsideNobody Inside = iota
	InsideAddOn
	InsideMesh
)

// Pairs yields all that must reach each other, judged by the Nodes, the Peers
// and the underlay alone: pods, nodes and peers to pods, internal IPs, peers and
// the machines in Sites' Networks that are allowed location IPs. The
// mesh may be relied on inside a location as far as inside says.
func (w *World) Pairs(inside Inside, yield func(Pair) bool) {
	for i := range w.hosts {
		from := &w.hosts[i]
		for j := range w.hosts {
			if i == j {
				continue
			}
			for _, to := range w.targets(&w.hosts[j]) {
				if !w.pairsTo(inside, from, to, yield) {
					return
				}
			}
		}
	}
}

// target is an address to reach.
type target struct {
	at    *host
	addr  netip.Addr
	place Place
	// by is the allowed location IP that makes the mesh go there, of a network.
	by netip.Prefix
	// network: a machine of the site; internal: the host's internal IP.
	network, internal bool
}

func (w *World) targets(h *host) []target {
	out := make([]target, 0, 8)
	for _, p := range h.PodCIDRs {
		out = append(out, target{at: h, addr: podOf(p), place: Place{h.Name, h.site.Name, true}})
	}
	if h.Peer != nil {
		for _, a := range PeerAddrs(*h.Peer) {
			out = append(out, target{at: h, addr: a, place: Place{h.Name, h.site.Name, false}})
		}
	}
	if h.Node == nil {
		return out
	}
	for _, p := range h.Node.InternalIPs {
		out = append(out, target{at: h, addr: p.Addr(), place: Place{h.Name, h.site.Name, false}, internal: true})
	}
	for _, p := range h.Reached {
		for _, n := range h.site.Networks {
			if p.Contains(n.Addr()) && p.Bits() <= n.Bits() && w.owns(h, p, n.Addr()) {
				out = append(out, target{at: h, addr: n.Addr().Next().Next(), place: Place{Site: h.site.Name}, by: p, network: true})
			}
		}
	}
	return out
}

// owns reports whether p is the longest allowed location IP that holds a.
func (w *World) owns(h *host, p netip.Prefix, a netip.Addr) bool {
	for i := range w.hosts {
		for _, q := range w.hosts[i].Reached {
			if q.Contains(a) && (q.Bits() > p.Bits() || q == p && w.hosts[i].Location != h.Location) {
				return false
			}
		}
	}
	return true
}

// podOf returns the address of a pod: not the base, nor the bridge.
func podOf(cidr netip.Prefix) netip.Addr { return cidr.Addr().Next().Next().Next() }

func (w *World) pairsTo(inside Inside, from *host, to target, yield func(Pair) bool) bool {
	between := from.Location != to.at.Location
	if between && !w.reaches(inside, from, to) || !between && !w.reachesInside(inside, from, to) {
		return true
	}
	if !between && to.internal && inside != InsideMesh {
		return true // another pod network's own affair, or nobody's
	}
	// What goes to a network may get the address of a tunnel link, the first of the pod CIDR.
	tunnelStolen := func(p netip.Prefix) bool { return w.stolen(p.Addr(), from, to.at) }
	// A gate whose range of WireGuard IPs is exhausted has no address to masquerade as.
	gateless := between && len(w.sourcesOf(w.byName[from.Gate], to.addr)) == 0
	astray := to.network && (gateless || from.hasBetter(to) || w.byName[from.Gate].hasBetter(to) || slices.ContainsFunc(from.PodCIDRs, tunnelStolen))
	if astray || w.stolen(to.addr, to.at, from) {
		return true
	}
	p := Pair{To: to.place, Sealed: between, Masqueraded: to.network}
	for _, cidr := range from.PodCIDRs {
		if cidr.Addr().Is4() != to.addr.Is4() || w.stolen(podOf(cidr), from, to.at) {
			continue
		}
		if p.Masqueraded && len(w.sourcesOf(from, to.addr)) == 0 {
			continue // its range of WireGuard IPs is exhausted
		}
		if p.Masqueraded && slices.ContainsFunc(w.sourcesOf(from, to.addr), func(a netip.Addr) bool { return w.stolen(a, from, to.at) }) {
			continue
		}
		p.Packet = Packet{From: from.Name, Src: podOf(cidr), Dst: to.addr}
		if !yield(p) {
			return false
		}
	}
	if !between && (to.internal || to.network) {
		return true // the underlay's own affair
	}
	p.Sources = w.sourcesOf(from, to.addr)
	if len(p.Sources) == 0 || slices.ContainsFunc(p.Sources, func(a netip.Addr) bool { return w.stolen(a, from, to.at) }) {
		return true
	}
	if !between {
		p.Sources = nil // another pod network may have its own wish
	}
	p.Packet = Packet{From: from.Name, Dst: to.addr}
	return yield(p)
}

// stolen reports whether packets to an address of a host go to another that has
// the same one: in the mesh it belongs to somebody else, or whoever sends to it
// finds a neighbour with it, or one of the two gates has it.
func (w *World) stolen(a netip.Addr, at, from *host) bool {
	if at.lost(a) || from.lost(a) {
		return true
	}
	for _, h := range []*host{w.byName[from.Gate], w.byName[at.Gate], from.site.owners[a]} {
		if h != nil && h != at && (h.lost(a) || h == from.site.owners[a]) {
			return true
		}
	}
	return false
}

// hasBetter reports whether the host has a way of its own to a network, which is
// more specific than what the mesh has.
func (h *host) hasBetter(to target) bool {
	better := func(p netip.Prefix) bool { return p.Bits() > to.by.Bits() && p.Contains(to.addr) }
	return slices.ContainsFunc(h.Routes, func(r Route) bool { return better(r.Dst) }) ||
		slices.ContainsFunc(h.Links, func(l Link) bool { return slices.ContainsFunc(l.Addrs, better) })
}

func (h *host) lost(a netip.Addr) bool {
	return slices.ContainsFunc(h.Lost, func(p netip.Prefix) bool { return p.Contains(a) })
}

// sourcesOf lists the addresses that a host may talk to others from: the
// internal IP, else a WireGuard IP; the peer's own.
func (w *World) sourcesOf(h *host, like netip.Addr) []netip.Addr {
	var out []netip.Addr
	if h.Node != nil {
		if ip, ok := h.Node.InternalIP(like); ok {
			if out = append(out, ip.Addr()); ip.Addr() != h.Node.Endpoint.IP && !h.lost(ip.Addr()) {
				return out // an endpoint is no good source, for answers cannot come through the tunnel
			}
			if h.lost(ip.Addr()) && h.Gate == h.Name {
				out = nil
			}
		}
	}
	if h.wireGuard < 0 {
		return out
	}
	own := h.links[h.wireGuard].addrs[family(like)]
	if len(own) == 0 && h.Gate == h.Name {
		return nil // what comes back could not go through the tunnel
	}
	for _, p := range own {
		out = append(out, p.Addr())
	}
	return out
}

func (h *host) hasInternal(like netip.Addr) bool {
	if h.Node == nil {
		return false
	}
	_, ok := h.Node.InternalIP(like)
	return ok
}

// reachesInside says so for hosts of one location.
func (w *World) reachesInside(inside Inside, from *host, to target) bool {
	if to.network {
		return from.hasInternal(to.addr)
	}
	return inside != InsideNobody && from.hasInternal(to.addr) && to.at.hasInternal(to.addr)
}

// reaches says so for hosts of different locations: their gates must know a way
// to each other, and the hosts to their gates.
func (w *World) reaches(inside Inside, from *host, to target) bool {
	g, h := w.byName[from.Gate], w.byName[to.at.Gate]
	if g == nil || h == nil {
		return true // a hole in the mesh, to be found by the walk
	}
	if from.Peer != nil && to.at.Peer != nil {
		return false // the mesh does not connect peers
	}
	if from != g && (!from.hasInternal(to.addr) || !g.hasInternal(to.addr)) {
		return false
	}
	if !to.network && to.at != h && (!to.at.hasInternal(to.addr) || !h.hasInternal(to.addr)) {
		return false
	}
	if inside == InsideNobody && (from != g || !to.network && to.at != h) {
		return false // nobody routes between a leader and its members
	}
	if to.internal && w.isEndpoint(g, to.addr) {
		return false // what carries the tunnel cannot go through it
	}
	return w.Speaks(g.Name, h.Name)
}

// isEndpoint reports whether g sends sealed packets to the address.
func (w *World) isEndpoint(g *host, a netip.Addr) bool {
	for i := range w.hosts {
		h := &w.hosts[i]
		if h.Gate != h.Name {
			continue
		}
		ap, ok := h.endpoint().AddrPort()
		if !ok || ap.Addr() != a {
			continue
		}
		// A private endpoint behind NAT means nothing to those whom it comes to,
		// but to those in the same network it does.
		public := g.endpoint().DNS != "" || mesh.IsPublic(g.endpoint().IP)
		if h.Node == nil || h.keepalive() == 0 || g.Node != nil && !public || mesh.IsPublic(a) || h.sharesNetwork(g) {
			return true
		}
	}
	return false
}

// sharesNetwork reports whether an address of h means the same to o.
func (h *host) sharesNetwork(o *host) bool {
	return h.Node != nil && o.Node != nil && h.Node.Location == o.Node.Location
}

func (h *host) endpoint() mesh.Endpoint {
	switch {
	case h.Node != nil:
		return h.Node.Endpoint
	case h.Peer != nil:
		return h.Peer.Endpoint
	default:
		return mesh.Endpoint{}
	}
}

func (h *host) keepalive() uint16 {
	switch {
	case h.Node != nil:
		return h.Node.PersistentKeepalive
	case h.Peer != nil:
		return h.Peer.PersistentKeepalive
	default:
		return 0
	}
}

// Speaks reports whether one gate can be expected to send the first packet to
// another: its endpoint leads there, or the other keeps the way open.
func (w *World) Speaks(from, to string) bool {
	g, h := w.byName[from], w.byName[to]
	if g.opens(w, h) {
		return true
	}
	return h.opens(w, g) && h.keepalive() != 0
}

func (h *host) opens(w *World, to *host) bool {
	ap, ok := to.endpoint().AddrPort()
	return ok && w.Lands(h.site.Name, ap) == to.Name
}
