// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"net/netip"
)

// tunnelState is what is known of sealed packets from one host to another.
type tunnelState struct {
	opened, answered bool
	// opens: the host can start the session. The receiver sees observed.
	opens    *Death
	observed netip.Addr
	// answers: the host can send to where the other's packets come from.
	answers *Death
}

// maxDepth is how many tunnels may carry each other.
const maxDepth = 4

// outerResult is what became of a tunnel's outer packet.
type outerResult struct {
	to   *host
	p    packet
	died *Death
}

// seal sends a packet into the WireGuard link.
func (w *walker) seal(h *host, l *link, p packet) (arrival, *Death) {
	n := h.allowed.get(p.dst)
	if n < 0 {
		return arrival{}, w.die(h.Name, CauseNoAllowedIP, p)
	}
	to := w.byKey[h.peers[n]]
	if to == nil {
		return arrival{}, w.die(h.Name, CauseNoPeer, p)
	}
	if d := w.session(h, to, p); d != nil {
		return arrival{}, d
	}
	w.step(Step{Host: h.Name, What: "seal", Dev: l.name, Peer: to.Name, Addr: h.State.Device.Peer(to.key).Endpoint.Addr(), Src: p.src, Dst: p.dst})
	w.spoken = append(w.spoken, pair{h, to})
	if w.depth == 0 {
		w.trace.Sealed++
	}
	if from := to.allowed.get(p.src); from < 0 || to.peers[from] != h.key {
		return arrival{}, w.die(to.Name, CauseWrongSource, p)
	}
	return arrival{host: to, iif: to.wireGuard, p: p}, nil
}

// session reports why sealed packets do not get from h to another host, nil if they do.
func (w *walker) session(h, to *host, p packet) *Death {
	open, comes := w.open(h, to, p), w.open(to, h, p)
	switch {
	case open == nil && comes == nil: // the kernel sends to where it heard the other from last
		if d := w.answer(h, to); d != nil {
			return w.outerDied(h, d, p)
		}
		return nil
	case open == nil:
		return nil
	case comes != nil:
		return w.outerDied(h, open, p)
	}
	// The other can come to us. It does so if it sends keepalives, or has just spoken.
	spoke := to.State.Device.Peer(h.key).PersistentKeepalive != 0
	for _, s := range w.spoken {
		spoke = spoke || s == pair{to, h}
	}
	if !spoke {
		return w.outerDied(h, open, p)
	}
	if d := w.answer(h, to); d != nil {
		return w.outerDied(h, d, p)
	}
	return nil
}

// outerDied makes the death of p from that of its outer packet, which is shared.
func (w *walker) outerDied(h *host, outer *Death, p packet) *Death {
	d := w.die(h.Name, outer.Cause, p)
	d.outer = outer
	return d
}

// open walks, once for each pair of hosts, an outer packet to the endpoint that h knows of another.
func (w *walker) open(h, to *host, p packet) *Death {
	t := &h.tunnels[to.id]
	if !t.opened {
		t.opened = true
		t.observed, t.opens = w.handshake(h, to, p)
	}
	return t.opens
}

func (w *walker) handshake(h, to *host, p packet) (netip.Addr, *Death) {
	peer, back := h.State.Device.Peer(to.key), to.State.Device.Peer(h.key)
	if peer == nil {
		return netip.Addr{}, w.die(h.Name, CauseNoPeer, p)
	}
	switch {
	case to.wireGuard < 0 || !to.links[to.wireGuard].up:
		return netip.Addr{}, w.die(to.Name, CausePeerDown, p)
	case back == nil:
		return netip.Addr{}, w.die(to.Name, CauseNotMutual, p)
	case back.PresharedKey != peer.PresharedKey:
		return netip.Addr{}, w.die(to.Name, CausePresharedKey, p)
	case !peer.Endpoint.IsValid():
		return netip.Addr{}, w.die(h.Name, CauseNoEndpoint, p)
	}
	out := packet{dst: peer.Endpoint.Addr(), port: peer.Endpoint.Port(), sealed: true}
	a, d := w.outer(h, h.wireGuard, out)
	switch {
	case d != nil:
		return netip.Addr{}, d
	case a.host != to:
		return netip.Addr{}, w.die(placeOf(a).String(), CauseWrongEndpoint, a.p)
	case a.p.port != to.State.Device.ListenPort:
		return netip.Addr{}, w.die(to.Name, CausePort, a.p)
	}
	return a.p.src, nil
}

// answer looks, once for each pair, for h's way to where the other's packets come
// from. A NAT on that way lets answers in.
func (w *walker) answer(h, to *host) *Death {
	t := &h.tunnels[to.id]
	if !t.answered {
		t.answered = true
		out := packet{dst: to.tunnels[h.id].observed, sealed: true}
		r := h.route(out, loopback)
		switch {
		case r == nil:
			t.answers = w.die(h.Name, CauseNoRoute, out)
		case r.link == h.wireGuard:
			t.answers = w.die(h.Name, CauseTunnelLoop, out)
		case r.link < 0:
			t.answers = w.die(h.Name, CauseNoLink, out)
		}
	}
	return t.answers
}

// outer walks a tunnel's own packet until a host gets it.
func (w *walker) outer(h *host, dev int, p packet) (arrival, *Death) {
	if r := h.route(p, loopback); r != nil && r.link == dev {
		w.step(Step{Host: h.Name, What: "route the outer packet", Dev: r.dev, Addr: r.via, Src: p.src, Dst: p.dst})
		return arrival{}, w.die(h.Name, CauseTunnelLoop, p)
	}
	if w.depth == maxDepth {
		return arrival{}, w.die(h.Name, CauseTunnelLoop, p)
	}
	w.depth++
	a, d := w.output(h, p)
	w.depth--
	if d != nil {
		return arrival{}, d
	}
	if a.host == nil || a.pod {
		return arrival{}, w.die(placeOf(a).String(), CauseWrongEndpoint, a.p)
	}
	return a, nil
}

// tunnelTo is outer with the results kept, for tunnels whose packets are not sealed.
func (w *walker) tunnelTo(h *host, dev int, p packet) outerResult {
	clear := len(w.trace.Clear)
	if r, ok := h.outers[p.dst]; ok {
		return r
	}
	a, d := w.outer(h, dev, p)
	r := outerResult{a.host, a.p, d}
	if h.outers == nil {
		h.outers = map[netip.Addr]outerResult{}
	}
	if len(w.trace.Clear) == clear { // else it must be noted each time
		h.outers[p.dst] = r
	}
	return r
}

// encapsulate sends a packet into an ipip or ip6tnl link.
func (w *walker) encapsulate(h *host, l *link, r *route, p packet) (arrival, *Death) {
	gateway := r.via
	if !gateway.IsValid() {
		gateway = p.dst
	}
	w.step(Step{Host: h.Name, What: "encapsulate", Dev: l.name, Addr: gateway, Src: p.src, Dst: p.dst})
	o := w.tunnelTo(h, r.link, packet{dst: gateway})
	if o.died != nil {
		return arrival{}, w.outerDied(h, o.died, p)
	}
	in := o.to.linkOfKind(l.kind)
	if in < 0 {
		return arrival{}, w.die(o.to.Name, CauseNoTunnelLink, p)
	}
	if !o.to.admits(o.p.src) {
		return arrival{}, w.die(o.to.Name, CauseTunnelFrom, o.p)
	}
	return arrival{host: o.to, iif: in, p: p}, nil
}

// admits reports whether the firewall lets tunnel packets from src in.
func (h *host) admits(src netip.Addr) bool {
	return h.tunnelFrom.empty(src) || h.tunnelFrom.has(src)
}

// linkOfKind returns the link that is up and decapsulates, -1 without one.
func (h *host) linkOfKind(kind linkKind) int {
	for i := range h.links {
		if h.links[i].kind == kind && h.links[i].up {
			return i
		}
	}
	return -1
}

// vxlan sends a packet into the agent's vxlan link.
func (w *walker) vxlan(h *host, l *link, r *route, p packet) (arrival, *Death) {
	next := r.via
	if !next.IsValid() {
		next = p.dst
	}
	n := h.neighs[next]
	if n == nil || n.Dev != l.name {
		return arrival{}, w.die(h.Name, CauseNoNeigh, p)
	}
	w.step(Step{Host: h.Name, What: "encapsulate", Dev: l.name, Addr: n.Remote, Src: p.src, Dst: p.dst})
	o := w.tunnelTo(h, r.link, packet{src: l.own.Local, dst: n.Remote})
	if o.died != nil {
		return arrival{}, w.outerDied(h, o.died, p)
	}
	in := o.to.linkOfKind(linkVXLAN)
	switch {
	case in < 0 || o.to.links[in].own.Local != o.p.dst:
		return arrival{}, w.die(o.to.Name, CauseNoTunnelLink, p)
	case o.to.links[in].own.MAC != n.MAC:
		return arrival{}, w.die(o.to.Name, CauseWrongMAC, p)
	case !o.to.admits(o.p.src):
		return arrival{}, w.die(o.to.Name, CauseTunnelFrom, o.p)
	}
	return arrival{host: o.to, iif: in, p: p}, nil
}

// overlay sends a packet into another pod network's tunnel, whose outer packets
// go between hosts of one site.
func (w *walker) overlay(h *host, l *link, r *route, p packet) (arrival, *Death) {
	next := r.via
	if !next.IsValid() {
		next = p.dst
	}
	to := w.byName[l.overlay[next]]
	if to == nil || to.site != h.site {
		return arrival{}, w.die(h.Name, CauseOverlay, p)
	}
	in := to.linkIndex(l.name)
	if in < 0 {
		return arrival{}, w.die(to.Name, CauseOverlay, p)
	}
	w.hop(h, to, p)
	return arrival{host: to, iif: in, p: p}, nil
}
