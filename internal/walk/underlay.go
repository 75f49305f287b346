// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"net/netip"

	"github.com/kilomesh/kilo/internal/mesh"
)

// underlay sends a packet over a segment: to the host with the next hop's
// address, or to the router.
func (w *walker) underlay(h *host, l *link, r *route, p packet) (arrival, *Death) {
	next := r.via
	if !next.IsValid() {
		next = p.dst
	}
	s := h.site
	to := s.segments[segmentAddr{l.segment, next}]
	if to == nil {
		if s.routers[next] {
			return w.router(h, s, p)
		}
		return arrival{}, w.die(h.Name, CauseNextHop, p)
	}
	if s.Strict {
		if s.owners[p.src] != h {
			return arrival{}, w.die("site "+s.Name, CauseForeignSource, p)
		}
		if s.owners[p.dst] != to {
			return arrival{}, w.die("site "+s.Name, CauseForeignDest, p)
		}
	}
	w.hop(h, to, p)
	return arrival{host: to, iif: to.segmentLink(l.segment), p: p}, nil
}

// hop notes that a packet went from host to host over the underlay.
func (w *walker) hop(from, to *host, p packet) {
	if !p.sealed && from != nil && from.Location != to.Location {
		w.trace.Clear = append(w.trace.Clear, Hop{from.Name, to.Name})
	}
}

func (h *host) segmentLink(segment string) int {
	for i := range h.links {
		if h.links[i].kind == linkUnderlay && h.links[i].segment == segment {
			return i
		}
	}
	return 0
}

// router carries a packet to where its destination is: inside the site, or
// through the internet. Without a host it comes from a machine of the site.
func (w *walker) router(h *host, s *site, p packet) (arrival, *Death) {
	where := "router of site " + s.Name
	if h != nil {
		if s.owners[p.src] != h {
			return arrival{}, w.die(where, CauseForeignSource, p)
		}
	}
	if to := s.owners[p.dst]; to != nil {
		w.hop(h, to, p)
		return arrival{host: to, iif: to.linkOf(p.dst), p: p}, nil
	}
	if s.networks.has(p.dst) {
		return arrival{site: s, p: p, final: true}, nil
	}
	if !mesh.IsPublic(p.dst) {
		return arrival{}, w.die(where, CauseUnreachable, p)
	}
	if !mesh.IsPublic(p.src) {
		was := p.src
		if p.src = s.nat(p.dst); !p.src.IsValid() {
			p.src = was
			return arrival{}, w.die(where, CauseNoNAT, p)
		}
		if w.depth == 0 && !w.reply {
			w.nat = append(w.nat, translation{site: s, was: was, is: p.src, dst: p.dst})
		}
	}
	to := w.internet(&p)
	if to == nil {
		return arrival{}, w.die(where, CauseUnreachable, p)
	}
	w.hop(h, to, p)
	return arrival{host: to, iif: to.linkOf(p.dst), p: p}, nil
}

func (h *host) linkOf(a netip.Addr) int { return h.local[a] }

func (s *site) nat(like netip.Addr) netip.Addr {
	for _, a := range s.NAT {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// internet finds who has a public destination: a host, the host that a port is
// forwarded to, or the host whose packet a NAT let out and p answers.
func (w *walker) internet(p *packet) *host {
	if f, ok := w.forward[netip.AddrPortFrom(p.dst, p.port)]; ok {
		p.dst, p.port = f.to.Addr(), f.to.Port()
		return f.site.owners[p.dst]
	}
	if to := w.public[p.dst]; to != nil {
		return to
	}
	if w.reply && w.depth == 0 {
		for i := range w.nat {
			if n := &w.nat[i]; n.site != nil && n.is == p.dst && n.dst == p.src {
				p.dst = n.was
				return n.site.owners[n.was]
			}
		}
	}
	return nil
}

// Lands returns the name of the host that gets a UDP packet sent to an address
// from inside a site, "" if nobody does. It knows the underlay alone.
func (w *World) Lands(siteName string, to netip.AddrPort) string {
	for i := range w.sites {
		s := &w.sites[i]
		if s.Name != siteName {
			continue
		}
		if h := s.owners[to.Addr()]; h != nil {
			return h.Name
		}
		if !mesh.IsPublic(to.Addr()) || !s.hasPublic(to.Addr()) {
			return ""
		}
		p := packet{dst: to.Addr(), port: to.Port()}
		if h := w.w.internet(&p); h != nil {
			return h.Name
		}
	}
	return ""
}

// hasPublic reports whether packets from the site reach the internet of that
// family. Hosts with public addresses need no NAT, so this is about sites.
func (s *site) hasPublic(like netip.Addr) bool {
	if s.nat(like).IsValid() {
		return true
	}
	for a := range s.owners {
		if a.Is4() == like.Is4() && mesh.IsPublic(a) {
			return true
		}
	}
	return false
}
