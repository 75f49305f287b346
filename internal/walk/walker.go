// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"net/netip"
	"slices"
)

// maxTTL is far beyond what any path in a mesh needs.
const maxTTL = 16

// walker is the state of one walk: of a packet and its answer.
type walker struct {
	*World
	trace Trace
	// nat are the translations that the packet met, for the answer to undo.
	nat []translation
	// spoken are the pairs of hosts that sealed a packet, so that the receiver
	// knows how to answer; reply says that the answer is under way.
	spoken []pair
	reply  bool
	// depth counts outer packets inside outer packets.
	depth int
}

// translation is a source that a host, or a site if host is nil, replaced.
type translation struct {
	host         *host
	site         *site
	was, is, dst netip.Addr
}

type pair struct{ from, to *host }

// packet is a packet under way. sealed packets are WireGuard's own.
type packet struct {
	src, dst netip.Addr
	port     uint16
	sealed   bool
}

// arrival is where a packet is: received by a host through a link, or, if
// final, at its end.
type arrival struct {
	host *host
	site *site
	iif  int
	p    packet
	// final: at a pod, at the host itself, or (host is nil) at a machine of the site.
	final, pod bool
}

// Send walks a packet. The error is a *Death.
func (w *World) Send(p Packet) (Trace, error) {
	w.w.reset(p)
	_, d := w.w.send(p)
	if d != nil {
		d.Trace = w.w.trace
		return w.w.trace, d
	}
	return w.w.trace, nil
}

// Ping walks a packet and the answer to it. The error is a *Death.
func (w *World) Ping(p Packet) (Trace, error) {
	w.w.reset(p)
	d := w.w.ping(p)
	if d != nil {
		d.Trace = w.w.trace
		return w.w.trace, d
	}
	return w.w.trace, nil
}

func (w *walker) reset(p Packet) {
	w.trace = Trace{Packet: p, Steps: w.trace.Steps[:0], Clear: w.trace.Clear[:0]}
	w.nat, w.spoken, w.reply, w.depth = w.nat[:0], w.spoken[:0], false, 0
}

func (w *walker) step(s Step) { w.trace.Steps = append(w.trace.Steps, s) }

func (w *walker) die(where string, c Cause, p packet) *Death {
	return &Death{Cause: c, Where: where, Reply: w.reply, Src: p.src, Dst: p.dst}
}

func (w *walker) send(p Packet) (arrival, *Death) {
	h := w.byName[p.From]
	pk := packet{src: p.Src, dst: p.Dst}
	if h == nil {
		return arrival{}, w.die(p.From, CauseNoHost, pk)
	}
	a, d := w.leave(h, pk)
	if d != nil {
		return arrival{}, d
	}
	w.trace.Seen = a.p.src
	w.trace.At = placeOf(a)
	return a, nil
}

func placeOf(a arrival) Place {
	if a.host == nil {
		return Place{Site: a.site.Name}
	}
	return Place{Host: a.host.Name, Site: a.host.site.Name, Pod: a.pod}
}

// leave walks a packet from a pod of the host, or from the host itself.
func (w *walker) leave(h *host, p packet) (arrival, *Death) {
	if _, local := h.local[p.src]; p.src.IsValid() && !local && h.pods.has(p.src) {
		w.trace.sent(p.src, w.reply)
		return w.run(arrival{host: h, iif: 0, p: p})
	}
	return w.output(h, p)
}

func (t *Trace) sent(src netip.Addr, reply bool) {
	if !reply {
		t.Sent = src
	}
}

func (w *walker) ping(p Packet) *Death {
	a, d := w.send(p)
	if d != nil {
		return d
	}
	w.reply = true
	back := packet{src: a.p.dst, dst: a.p.src}
	var b arrival
	if a.host == nil {
		next, d := w.router(nil, a.site, back)
		if d != nil {
			return d
		}
		if b, d = w.run(next); d != nil {
			return d
		}
	} else if b, d = w.leave(a.host, back); d != nil {
		return d
	}
	if b.host == nil || b.host.Name != p.From || b.p.dst != w.trace.Sent || b.p.src != p.Dst {
		return w.die(placeOf(b).String(), CauseMisdelivered, b.p)
	}
	return nil
}

// output walks a packet that the host itself sends.
func (w *walker) output(h *host, p packet) (arrival, *Death) {
	p = w.restore(h, p)
	if _, ok := h.local[p.dst]; ok {
		if !p.src.IsValid() {
			p.src = p.dst
		}
		w.sentOuter(p)
		return arrival{host: h, p: p, final: true}, nil
	}
	r := h.route(p, loopback)
	if r == nil {
		return arrival{}, w.die(h.Name, CauseNoRoute, p)
	}
	if !p.src.IsValid() {
		if p.src = r.src; !p.src.IsValid() {
			p.src = h.source(r.link, r.via, p.dst)
		}
		if !p.src.IsValid() {
			return arrival{}, w.die(h.Name, CauseNoSource, p)
		}
	}
	w.sentOuter(p)
	a, d := w.transmit(h, r, p)
	if d != nil {
		return arrival{}, d
	}
	return w.run(a)
}

// sentOuter notes the source of the packet that the walk is about.
func (w *walker) sentOuter(p packet) {
	if w.depth == 0 {
		w.trace.sent(p.src, w.reply)
	}
}

// run walks a packet on from where a host receives it.
func (w *walker) run(a arrival) (arrival, *Death) {
	for ttl := maxTTL; ttl > 0; ttl-- {
		if a.final {
			return a, nil
		}
		h := a.host
		if h.sealed.has(a.p.src) && !slices.Contains(h.State.Firewall.SealedDevs, h.links[a.iif].name) {
			return arrival{}, w.die(h.Name, CauseSealed, a.p)
		}
		a.p = w.restore(h, a.p)
		if _, ok := h.local[a.p.src]; ok {
			return arrival{}, w.die(h.Name, CauseMartian, a.p)
		}
		if _, ok := h.local[a.p.dst]; ok {
			return arrival{host: h, site: h.site, iif: a.iif, p: a.p, final: true}, nil
		}
		r := h.route(a.p, a.iif)
		if r == nil {
			return arrival{}, w.die(h.Name, CauseNoRoute, a.p)
		}
		if a.p.dst.Is4() && !h.State.Forward4 || a.p.dst.Is6() && !h.State.Forward6 {
			return arrival{}, w.die(h.Name, CauseNotForwarding, a.p)
		}
		var d *Death
		if a, d = w.transmit(h, r, a.p); d != nil {
			return arrival{}, d
		}
	}
	return arrival{}, w.die(a.host.Name, CauseTTL, a.p)
}

// transmit sends a packet out by a route, through postrouting.
func (w *walker) transmit(h *host, r *route, p packet) (arrival, *Death) {
	if r.link < 0 {
		w.step(Step{Host: h.Name, What: "route", Dev: r.dev, Addr: r.via, Src: p.src, Dst: p.dst})
		return arrival{}, w.die(h.Name, CauseNoLink, p)
	}
	l := &h.links[r.link]
	p = w.postrouting(h, r, p)
	w.step(Step{Host: h.Name, What: "route", Dev: l.name, Addr: r.via, Src: p.src, Dst: p.dst})
	if !l.up {
		return arrival{}, w.die(h.Name, CauseLinkDown, p)
	}
	if h.sealed.has(p.dst) && !slices.Contains(h.State.Firewall.SealedDevs, l.name) {
		return arrival{}, w.die(h.Name, CauseSealed, p)
	}
	switch l.kind {
	case linkBridge:
		if h.pods.has(p.dst) {
			return arrival{host: h, site: h.site, p: p, final: true, pod: true}, nil
		}
		return arrival{}, w.die(h.Name, CauseNoPod, p)
	case linkWireGuard:
		return w.seal(h, l, p)
	case linkTunnel4, linkTunnel6:
		return w.encapsulate(h, l, r, p)
	case linkVXLAN:
		return w.vxlan(h, l, r, p)
	case linkOverlay:
		return w.overlay(h, l, r, p)
	default:
		return w.underlay(h, l, r, p)
	}
}

// postrouting masquerades as the table "inet kilo" does. Conntrack decides at a
// connection's first packet, so an answer is never masqueraded.
func (w *walker) postrouting(h *host, r *route, p packet) packet {
	if w.reply || h.known.has(p.dst) || !h.masqFrom.has(p.src) && !h.masqTo.has(p.dst) {
		return p
	}
	src := h.source(r.link, r.via, p.dst)
	if !src.IsValid() || src == p.src {
		return p
	}
	w.step(Step{Host: h.Name, What: "masquerade as " + src.String(), Src: p.src, Dst: p.dst})
	if w.depth == 0 {
		w.nat = append(w.nat, translation{host: h, was: p.src, is: src, dst: p.dst})
	}
	p.src = src
	return p
}

// restore undoes what the host did to the packet that p answers.
func (w *walker) restore(h *host, p packet) packet {
	if !w.reply || w.depth > 0 {
		return p
	}
	for i := range slices.Backward(w.nat) {
		if n := &w.nat[i]; n.host == h && n.is == p.dst && n.dst == p.src {
			w.step(Step{Host: h.Name, What: "restore " + n.was.String(), Src: p.src, Dst: p.dst})
			p.dst = n.was
		}
	}
	return p
}
