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
// its allowed IPs, and a route for each, for all but WireGuard's own packets.
func PeerState(t *mesh.Topology, p mesh.Peer, secret mesh.SecretKey, port uint16) mesh.State {
	s := mesh.State{
		Links:  []mesh.Link{{Name: PeerDev, Kind: mesh.KindWireGuard, MTU: 1420, Up: true}},
		Device: mesh.Device{PrivateKey: secret, ListenPort: port},
	}
	for _, a := range PeerAddrs(p) {
		s.Addrs = append(s.Addrs, mesh.Addr{Dev: PeerDev, Prefix: netip.PrefixFrom(a, a.BitLen())})
	}
	for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		s.Rules = append(s.Rules, mesh.SealingRules(netip.PrefixFrom(all, 0), port)...)
	}
	for i := range t.Locations {
		l := &t.Locations[i]
		lead := l.Lead()
		s.Device.Peers = append(s.Device.Peers, mesh.DevicePeer{
			Key: lead.Key, Name: lead.Name, IsNode: true, Endpoint: endpointFor(lead), PresharedKey: p.PresharedKey, PersistentKeepalive: p.PersistentKeepalive,
			AllowedIPs: l.Owned(),
		})
		for _, dst := range l.Owned() {
			s.Routes = append(s.Routes, mesh.Route{Dst: dst, Dev: PeerDev, Table: mesh.TableSealed})
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

// PeerAddrs returns the addresses that a VPN peer gives its link: the first of
// each allowed IP, but for those broader than a /24 or /64, which are networks behind it.
func PeerAddrs(p mesh.Peer) []netip.Addr {
	var out []netip.Addr
	for _, ip := range p.AllowedIPs {
		if ip.Bits() < 24 || ip.Addr().Is6() && ip.Bits() < 64 {
			continue
		}
		a := ip.Addr()
		if !ip.IsSingleIP() {
			a = a.Next()
		}
		out = append(out, a)
	}
	return out
}
