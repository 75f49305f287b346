// SPDX-License-Identifier: Apache-2.0

package mesh

import "net/netip"

// strict seals the pods of other locations: their packets come and go by the links
// that lead to them. For a member without a tunnel to its leader that is the
// underlay, where strictness can tell nothing. A leader hears of them by its
// tunnel links too: until all others know it, the leader before it gets what is
// for our pods, and passes it on. They let in nobody but nodes of this site.
func (p *planner) strict() {
	f := &p.state.Firewall
	var pods []netip.Prefix
	for i := range p.t.Locations {
		if l := &p.t.Locations[i]; !p.isOwnSite(l) {
			pods = append(pods, l.PodCIDRs()...)
		}
	}
	SortPrefixes(pods)
	here := p.inClear()
	remote := make(map[netip.Prefix]bool, len(pods))
	for _, cidr := range pods {
		remote[cidr] = true
		here.from(cidr)
		around(here, cidr, func(part netip.Prefix) { f.Sealed = append(f.Sealed, part) })
	}
	f.SealedDevs = append(f.SealedDevs, p.t.cfg.WireGuardDev)
	for i := range p.state.Routes {
		if r := &p.state.Routes[i]; remote[r.Dst] {
			f.SealedDevs = append(f.SealedDevs, r.Dev)
		}
	}
	if p.leads {
		f.SealedDevs = append(f.SealedDevs, p.tunnelDevs()...)
		return
	}
	if p.t.cfg.AddOn == AddOnCilium {
		f.SealedDevs = append(f.SealedDevs, CiliumDev) // by which Cilium brings the leader's packets to pods
	}
	// What the leader sends need not come the way that we send: subnets differ, and
	// what is for the host may come otherwise than what is for pods.
	for _, own := range p.self.InternalIPs {
		internal, ok := p.loc.Lead().InternalIP(own.Addr())
		gateway := p.gateway(p.self, own.Addr())
		link, here := p.facts.LinkOf(own.Addr())
		if !ok || !gateway.IsValid() || !here {
			continue
		}
		toHost := p.encapsulates(internal, own.Addr())
		if !p.t.cfg.ManageLocal { // see addOnRoutes
			toHost = p.t.cfg.AddOn != AddOnNone && p.t.cfg.Encapsulation != EncapsulateNever && gateway != own.Addr()
		}
		for _, tunnel := range []bool{p.encapsulates(internal, gateway), toHost} {
			if tunnel {
				f.SealedDevs = append(f.SealedDevs, p.tunnelDev(gateway))
			} else {
				f.SealedDevs = append(f.SealedDevs, link.Dev)
			}
		}
	}
}

// inClear is what is reached from here without the mesh, though it may be inside
// pod CIDRs of other locations.
func (p *planner) inClear() holes {
	h := p.holes()
	for _, cidr := range p.self.PodCIDRs { // whoever owns them
		h.add(cidr)
	}
	for i := range p.t.Locations {
		if l := &p.t.Locations[i]; p.isOwnSite(l) {
			for _, cidr := range l.PodCIDRs() {
				h.add(cidr)
			}
		}
	}
	h.sort()
	return h
}

// tunnelDevs names our tunnel links.
func (p *planner) tunnelDevs() (names []string) {
	for _, l := range p.state.Links {
		if l.Kind != KindWireGuard {
			names = append(names, l.Name)
		}
	}
	return names
}
