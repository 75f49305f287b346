// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/kilomesh/kilo/internal/mesh"
)

// addNode puts a node into a site: with or without public addresses, an internal
// IP, a forwarded port.
func (s *scene) addNode(r source, fam families, i, at int) {
	site := &s.sites[at]
	name := string(rune('a' + i))
	subnet := 0
	if s.cfg.Encapsulation != mesh.EncapsulateNever {
		subnet = r.IntN(2)
	}
	net, number := s.nets[at], i+1
	if net != at && chance(r, 50) { // that of a node of the other site with this network, perhaps
		number = 1 + r.IntN(i+1)
	}
	private := privateAddrs(fam, net, subnet, number)
	taken := func(n mesh.Node) bool {
		return n.Location == site.Name && s.hosts[n.Name].Links[0].Addrs[0] == private[0]
	}
	for slices.ContainsFunc(s.nodes, taken) {
		number++
		private = privateAddrs(fam, net, subnet, number)
	}
	n := mesh.Node{Name: name, Location: site.Name, WantsLead: chance(r, 20), Key: publicKeys[secrets[i]], ListenPort: pick(r, uint16(51820), 51821)}
	n.PodCIDRs = fam.of(p(addr4(10, 2, i+1, 0), 24), p(addr6(0xfd10, i+1, 0, 0), 64))
	if chance(r, 90) {
		n.InternalIPs = private
	}
	h := &Host{Name: name, Site: site.Name, PodCIDRs: n.PodCIDRs}
	h.Links = []Link{{Name: "eth0", Segment: fmt.Sprintf("%s/%d", site.Name, subnet), Addrs: private}}
	gateways := fam.of(p(addr4(10, 100+net, subnet, 254), 0), p(addr6(0xfd80+net, subnet, 0, 0xfe), 0))
	s.addEndpoint(r, fam, &n, h, i, at, private, gateways)
	for j, g := range fam.of(p(addr4(10, 100+net, 0, 0), 16), p(addr6(0xfd80+net, 0, 0, 0), 16)) {
		h.Routes = append(h.Routes, Route{Dst: g, Via: gateways[j].Addr(), Dev: "eth0"})
	}
	if chance(r, 25) {
		n.AllowedLocationIPs = pick(r, fam.of(site.Networks[0], site.Networks[2]), site.Networks[1:2], fam.of(p(addr4(10, 100+net, 0, 0), 16), site.Networks[2]))
		n.AllowedLocationIPs = slices.DeleteFunc(slices.Clone(n.AllowedLocationIPs), func(a netip.Prefix) bool { return a.Addr().Is4() && !fam.v4 })
	}
	if chance(r, 20) {
		n.WireGuardIPs = pick(r, []netip.Addr{addr4(10, 4, 0, 1+r.IntN(9))}, []netip.Addr{addr6(0xfd00, 4, 0, 1+r.IntN(9))})
	}
	s.nodes = append(s.nodes, n)
	s.hosts[name], s.secrets[name] = h, secrets[i]
}

// privateAddrs are those of a number in a subnet of a site's network.
func privateAddrs(fam families, net, subnet, number int) []netip.Prefix {
	return fam.of(p(addr4(10, 100+net, subnet, number), 24), p(addr6(0xfd80+net, subnet, 0, number), 64))
}

// addEndpoint draws how others reach the node: a public address of its own, a
// forwarded port, or not at all.
func (s *scene) addEndpoint(r source, fam families, n *mesh.Node, h *Host, i, at int, private, gateways []netip.Prefix) {
	site := &s.sites[at]
	kind := r.IntN(4)
	if kind == 0 {
		public := fam.of(p(addr4(198, 51, 100, 16*at+i+1), 28), p(addr6(0x2001, 0xdb8, at+1, i+1), 64))
		h.Links = append(h.Links, Link{Name: "eth1", Segment: site.Name + "/public", Addrs: public})
		h.addDefault("eth1", fam.of(p(addr4(198, 51, 100, 16*at+14), 0), p(addr6(0x2001, 0xdb8, at+1, 0xfe), 0)))
		n.Endpoint = mesh.Endpoint{IP: pick(r, public...).Addr(), Port: n.ListenPort}
	} else {
		h.addDefault("eth0", gateways)
	}
	switch {
	case kind == 1 || kind > 1 && len(n.InternalIPs) == 0:
		inner := pick(r, private...).Addr()
		nat := site.NAT[family(inner)]
		n.Endpoint = mesh.Endpoint{IP: nat, Port: uint16(40000 + i)}
		site.Forward[netip.AddrPortFrom(nat, n.Endpoint.Port)] = netip.AddrPortFrom(inner, n.ListenPort)
		if chance(r, 20) {
			n.Endpoint.DNS, n.Endpoint.Resolved, n.Endpoint.IP = n.Name+".example", nat, netip.Addr{}
		}
	case kind > 1: // behind NAT
		n.Endpoint = mesh.Endpoint{IP: pick(r, private...).Addr(), Port: n.ListenPort}
	}
	if kind > 1 && chance(r, 80) || chance(r, 10) {
		n.PersistentKeepalive = 25
	}
}

// addDefault gives a host its default routes.
func (h *Host) addDefault(dev string, gateways []netip.Prefix) {
	for _, g := range gateways {
		h.Routes = append(h.Routes, Route{Dst: g.Masked(), Via: g.Addr(), Dev: dev})
	}
}

func (s *scene) addPeer(r source, fam families, i int) {
	name := fmt.Sprintf("peer%d", i)
	q := mesh.Peer{Name: name, Key: publicKeys[secrets[maxNodes+i]]}
	q.AllowedIPs = fam.of(p(addr4(10, 5, 0, 16*i+1), 32), p(addr6(0xfd05, 0, i+1, 1), 128))
	if chance(r, 30) {
		q.AllowedIPs = fam.of(p(addr4(10, 5, 0, 16*i), 28), p(addr6(0xfd05, 0, i+1, 0), 64))
	}
	if chance(r, 50) {
		q.PresharedKey = mesh.NewSecretKey([mesh.KeySize]byte{7, 7, byte(i)})
	}
	if chance(r, 60) {
		q.PersistentKeepalive = 25
	}
	home := Site{Name: name, NAT: []netip.Addr{addr4(203, 0, 113, 220+i), addr6(0x2001, 0xdb8, 0xff, 0x20+i)}}
	h := &Host{Name: "peer/" + name, Site: name, Links: []Link{{Name: "eth0", Segment: name}}}
	addrs := []netip.Prefix{p(addr4(172, 16, i, 2), 24), p(addr6(0xfd70, i, 0, 2), 64)}
	home.Routers = []netip.Addr{addr4(172, 16, i, 1), addr6(0xfd70, i, 0, 1)}
	if chance(r, 30) {
		addrs = []netip.Prefix{p(addr4(192, 0, 2, 16*i+2), 28), p(addr6(0x2001, 0xdb8, 0xee00+i, 2), 64)}
		home.Routers = []netip.Addr{addr4(192, 0, 2, 16*i+1), addr6(0x2001, 0xdb8, 0xee00+i, 1)}
		if chance(r, 80) {
			q.Endpoint = mesh.Endpoint{IP: pick(r, fam.of(addrs[0], addrs[1])...).Addr(), Port: 51822}
		}
	}
	h.Links[0].Addrs = addrs
	h.addDefault("eth0", []netip.Prefix{p(home.Routers[0], 0), p(home.Routers[1], 0)})
	s.peers = append(s.peers, q)
	s.sites = append(s.sites, home)
	s.hosts[h.Name], s.secrets[h.Name] = h, secrets[maxNodes+i]
}
