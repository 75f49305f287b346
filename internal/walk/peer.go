// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"net/netip"

	"github.com/kilomesh/kilo/internal/mesh"
)

// PeerDev is the name of the WireGuard link of a VPN peer.
const PeerDev = "wg0"

// PeerState returns what a VPN peer's kernel has after it was configured for the
// mesh: every location's leader is a peer, with all that the location owns as
// its allowed IPs, and a route for each, but for addresses that are endpoints.
func PeerState(t *mesh.Topology, p mesh.Peer, secret mesh.SecretKey, port uint16) mesh.State {
	s := mesh.State{
		Links:  []mesh.Link{{Name: PeerDev, Kind: mesh.KindWireGuard, MTU: 1420, Up: true}},
		Device: mesh.Device{PrivateKey: secret, ListenPort: port},
	}
	for _, a := range PeerAddrs(p) {
		s.Addrs = append(s.Addrs, mesh.Addr{Dev: PeerDev, Prefix: netip.PrefixFrom(a, a.BitLen())})
	}
	endpoints := map[netip.Addr]bool{}
	for i := range t.Locations {
		if ap := endpointFor(t.Locations[i].Lead()); ap.IsValid() {
			endpoints[ap.Addr()] = true
		}
	}
	for i := range t.Locations {
		l := &t.Locations[i]
		lead := l.Lead()
		s.Device.Peers = append(s.Device.Peers, mesh.DevicePeer{
			Key: lead.Key, Name: lead.Name, IsNode: true, Endpoint: endpointFor(lead), PresharedKey: p.PresharedKey, PersistentKeepalive: p.PersistentKeepalive,
			AllowedIPs: l.Owned(),
		})
		for _, dst := range l.Owned() {
			for part := range without(dst, endpoints) {
				s.Routes = append(s.Routes, mesh.Route{Dst: part, Dev: PeerDev, Table: mesh.TableMain})
			}
		}
	}
	s.Sort()
	return s
}

// endpointFor returns a leader's endpoint, zero if it is behind NAT and comes to us.
func endpointFor(lead *mesh.Node) netip.AddrPort {
	ap, ok := lead.Endpoint.AddrPort()
	if !ok || lead.PersistentKeepalive != 0 && !mesh.IsPublic(ap.Addr()) {
		return netip.AddrPort{}
	}
	return ap
}

// PeerAddrs returns the addresses that a VPN peer gives its link: the first of each allowed IP.
func PeerAddrs(p mesh.Peer) []netip.Addr {
	var out []netip.Addr
	for _, ip := range p.AllowedIPs {
		a := ip.Addr()
		if !ip.IsSingleIP() {
			a = a.Next()
		}
		out = append(out, a)
	}
	return out
}

// without yields the parts of dst in which none of the addresses are.
func without(dst netip.Prefix, addrs map[netip.Addr]bool) func(yield func(netip.Prefix) bool) {
	return func(yield func(netip.Prefix) bool) { cut(dst, addrs, yield) }
}

func cut(dst netip.Prefix, addrs map[netip.Addr]bool, yield func(netip.Prefix) bool) bool {
	holds := false
	for a := range addrs {
		holds = holds || dst.Contains(a)
	}
	if !holds {
		return yield(dst)
	}
	if dst.IsSingleIP() {
		return true
	}
	bits := dst.Bits()
	b := dst.Addr().AsSlice()
	b[bits/8] |= 0x80 >> (bits % 8)
	upper, _ := netip.AddrFromSlice(b)
	return cut(netip.PrefixFrom(dst.Addr(), bits+1), addrs, yield) && cut(netip.PrefixFrom(upper, bits+1), addrs, yield)
}
