// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

// The tables of policy routing that a State uses.
const (
	// TableMain is the kernel's main routing table (rtnetlink(7), RT_TABLE_MAIN).
	TableMain = 254
	// TableTunnel holds the routes to the internal IPs of nodes of the own
	// location that must go through the tunnel link; only rules lead to it.
	TableTunnel = 1107
	// TableAddOn holds the routes to pod CIDRs in the add-on modes, where the other
	// pod network has routes to the same destinations in table main. A rule that
	// matches every packet leads to it.
	TableAddOn = 1108
	// TableSealed holds routes into the WireGuard link to addresses from which
	// WireGuard itself hears its peers; the rules of SealingRules lead to it.
	TableSealed = 1109
)

// State is everything that one node's kernel needs for the mesh, and the whole
// contract between the core and host.Apply. Slices are sorted and free of
// duplicates, so equal meshes give equal States. The zero State is a node
// without Kilo.
type State struct {
	// Links that must exist, at most one of each Kind.
	Links []Link
	// Addrs are all the addresses of Links; others on them are to go.
	Addrs []Addr
	// Routes of Kilo.
	Routes []Route
	// Rules of Kilo.
	Rules []Rule
	// Neighs are all the next hops of the link of KindVXLAN.
	Neighs []Neigh
	// Device is the WireGuard configuration of the link of KindWireGuard.
	Device Device
	// Firewall is the content of the nftables table "inet kilo".
	Firewall Firewall
	// PodMTU is the MTU in bytes for the links of pods: the least of those of the links
	// that their packets leave this node through, so that none is too large; 0 without Kilo.
	PodMTU int
	// Forward4 and Forward6 ask for packet forwarding by address family.
	Forward4, Forward6 bool
	// AcceptForward are prefixes that packets from and to are accepted in the chain
	// FORWARD of iptables, where there is one. They are masked and sorted, and none contains another.
	AcceptForward []netip.Prefix
}

// Sort brings the slices of a State that is being put together into their order.
func (s *State) Sort() {
	slices.SortFunc(s.Links, func(a, b Link) int { return cmp.Compare(a.Name, b.Name) })
	s.Addrs = sortCompact(s.Addrs, Addr.compare)
	sortRoutes(s.Routes)
	s.Rules = sortCompact(s.Rules, Rule.compare)
	s.Neighs = sortCompact(s.Neighs, Neigh.compare)
	sortPeers(s.Device.Peers)
	f := &s.Firewall
	for _, ps := range []*[]netip.Prefix{&f.MasqueradeFrom, &f.MasqueradeTo, &f.Known, &f.TunnelFrom, &f.Sealed, &s.AcceptForward} {
		*ps = compactPrefixes(*ps)
	}
	for _, devs := range []*[]string{&f.ClampDevs, &f.SealedDevs} {
		*devs = sortCompact(*devs, strings.Compare)
	}
}

// LinkKind says what a Link is.
type LinkKind string

// The kinds of Link.
const (
	KindWireGuard LinkKind = "wireguard"
	// KindIPIP carries IPv4 in IPv4 (RFC 2003), KindIP6Tnl both families in IPv6 (RFC 2473).
	KindIPIP   LinkKind = "ipip"
	KindIP6Tnl LinkKind = "ip6tnl"
	// KindVXLAN carries both families in UDP over either (RFC 7348).
	KindVXLAN LinkKind = "vxlan"
)

// Link is a network link of Kilo's own.
type Link struct {
	Name string
	Kind LinkKind
	// MTU in bytes, 1280 to 65535.
	MTU int
	// Up is the administrative state.
	Up bool
	// Local is the own address on the underlay and MAC the own one on the link,
	// of KindVXLAN alone.
	Local netip.Addr
	MAC   MAC
}

// What tells the link of KindVXLAN from others on the underlay.
const (
	// VXLANPort is the UDP port (RFC 7348, section 5).
	VXLANPort = 4789
	// VXLANID is the network identifier: unlike those that Flannel (1) and others start from.
	VXLANID = 0x4b494c
)

// MAC is an Ethernet address.
type MAC [6]byte

// Neigh is a next hop on the link of KindVXLAN: packets to the gateway IP
// leave with the destination MAC, in an outer packet to Remote.
type Neigh struct {
	Dev    string
	IP     netip.Addr
	MAC    MAC
	Remote netip.Addr
}

func (n Neigh) compare(o Neigh) int {
	return cmp.Or(cmp.Compare(n.Dev, o.Dev), n.IP.Compare(o.IP), n.Remote.Compare(o.Remote))
}

// Addr is an address on one of Kilo's links, with its prefix length.
type Addr struct {
	Dev    string
	Prefix netip.Prefix
}

func (a Addr) compare(o Addr) int {
	return cmp.Or(cmp.Compare(a.Dev, o.Dev), ComparePrefix(a.Prefix, o.Prefix))
}

// Route is a unicast route. Two Routes are the same if they are ==.
type Route struct {
	// Dst is masked.
	Dst netip.Prefix
	// Via is the gateway, zero for a destination that is on the link itself.
	Via netip.Addr
	// Src is the preferred source address, zero for the kernel's choice.
	Src netip.Addr
	// Dev is the name of the link; host resolves it at the last moment.
	Dev string
	// Table is one of the Table constants.
	Table int
	// OnLink makes the kernel take Via as directly reachable over Dev.
	OnLink bool
}

// Compare orders routes by their targets, then the rest.
func (r Route) Compare(o Route) int {
	return cmp.Or(r.CompareTarget(&o), r.Via.Compare(o.Via), cmp.Compare(r.Dev, o.Dev), r.Src.Compare(o.Src))
}

// CompareTarget orders routes by what a packet is matched with: family, table and destination.
func (r *Route) CompareTarget(o *Route) int {
	if r.Table == o.Table || r.Dst.Addr().Is4() != o.Dst.Addr().Is4() {
		return ComparePrefix(r.Dst, o.Dst)
	}
	return cmp.Compare(r.Table, o.Table)
}

// Rule is a policy-routing rule that sends packets to a table. Zero fields
// match everything. Both prefixes are masked, and To has the family of the
// packets also if it is all of them.
type Rule struct {
	From, To netip.Prefix
	// IIf is the link that the packet came in through.
	IIf      string
	Protocol Protocol
	// SourcePorts are those of TCP, UDP or SCTP.
	SourcePorts PortRange
	Table       int
}

// Protocol is a number of the IANA's registry of internet protocols, 0 for all.
type Protocol uint8

// The protocols that rules know.
const (
	ProtocolICMP   Protocol = 1
	ProtocolTCP    Protocol = 6
	ProtocolUDP    Protocol = 17
	ProtocolICMPv6 Protocol = 58
	ProtocolSCTP   Protocol = 132
)

// PortRange is a range of ports, both from 1 to 65535 and part of it; zero for all.
type PortRange struct{ First, Last uint16 }

// Has reports whether the range has the port.
func (r PortRange) Has(port uint16) bool {
	return r == PortRange{} || r.First <= port && port <= r.Last
}

func (r Rule) compare(o Rule) int {
	return cmp.Or(ComparePrefix(r.To, o.To), ComparePrefix(r.From, o.From), cmp.Compare(r.IIf, o.IIf), cmp.Compare(r.Protocol, o.Protocol), cmp.Compare(r.SourcePorts.First, o.SourcePorts.First), cmp.Compare(r.Table, o.Table))
}

// Device is the configuration of a WireGuard device, see wg(8).
type Device struct {
	PrivateKey SecretKey
	// ListenPort is a UDP port, 1 to 65535.
	ListenPort uint16
	// Peers by key, which no two share.
	Peers []DevicePeer
}

// Peer returns the peer of that key, nil without one.
func (d Device) Peer(key PublicKey) *DevicePeer {
	i, ok := slices.BinarySearchFunc(d.Peers, key, func(p DevicePeer, key PublicKey) int { return p.Key.Compare(key) })
	if !ok {
		return nil
	}
	return &d.Peers[i]
}

// DevicePeer is one [Peer] section of a WireGuard device.
type DevicePeer struct {
	Key PublicKey
	// Name of the Node, if IsNode, or of the Peer.
	Name   string
	IsNode bool
	// Endpoint is where to find the peer at first; zero if it will come to us.
	// WireGuard follows a peer that roams, and apply lets it.
	Endpoint     netip.AddrPort
	PresharedKey SecretKey
	// PersistentKeepalive in seconds, 0 (off) to 65535.
	PersistentKeepalive uint16
	// AllowedIPs are masked, and no two peers of a device have the same.
	AllowedIPs []netip.Prefix
}

// Object says in messages who the peer is: "node/a1" or "peer/laptop".
func (p DevicePeer) Object() string {
	if p.IsNode {
		return "node/" + p.Name
	}
	return "peer/" + p.Name
}

// Firewall is what changes in Kilo's nftables table; its rules are constant.
// All prefixes are masked and sorted as SortPrefixes does, and none contains another.
type Firewall struct {
	// MasqueradeFrom: packets from here get the node's address, unless they go to Known.
	MasqueradeFrom []netip.Prefix
	// MasqueradeTo: packets to here get the node's address, unless they go to Known.
	MasqueradeTo []netip.Prefix
	// Known destinations keep the packet's source.
	Known []netip.Prefix
	// TunnelPort is the UDP port of tunnel packets, 0 for those that are IP in IP.
	TunnelPort uint16
	// TunnelFrom are the only sources from which tunnel packets (to TunnelPort;
	// else IP protocol 4 over IPv4, 4 and 41 over IPv6) are let in, if there is a tunnel link of
	// that family: of each family alone, no source means no check.
	TunnelFrom []netip.Prefix
	// ClampDevs are links over which the maximum segment size that TCP connections
	// announce (RFC 9293, section 3.7.1) is lowered to what the path carries.
	ClampDevs []string
	// Sealed are pod CIDRs of other locations: packets to and from there that go
	// through other links than SealedDevs are dropped.
	Sealed     []netip.Prefix
	SealedDevs []string
}

// ComparePrefix orders masked prefixes by family, address and length.
func ComparePrefix(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return cmp.Compare(a.Bits(), b.Bits())
}

// compactPrefixes sorts masked prefixes and drops every one that another
// contains, in place.
func compactPrefixes(ps []netip.Prefix) []netip.Prefix {
	SortPrefixes(ps)
	// In this order whatever contains p comes before it, and only the last kept prefix can.
	out := ps[:0]
	for _, p := range ps {
		if n := len(out); n > 0 && out[n-1].Bits() <= p.Bits() && out[n-1].Contains(p.Addr()) {
			continue
		}
		out = append(out, p)
	}
	return out
}

// sortCompact sorts s and drops duplicates.
func sortCompact[T comparable](s []T, compare func(a, b T) int) []T {
	slices.SortFunc(s, compare)
	return slices.Compact(s)
}
