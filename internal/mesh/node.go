// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Node is a Kubernetes Node as a member of the mesh: parsed values, whose
// producers masked and checked them.
type Node struct {
	Name string
	// Location as the user gave it; nodes of one location reach each other without the mesh.
	Location string
	// WantsLead is the leader annotation.
	WantsLead bool
	// Endpoint is where other locations reach the node's WireGuard port.
	Endpoint Endpoint
	// ListenPort is the local UDP port of WireGuard; only the own node's matters.
	ListenPort uint16
	// InternalIPs are the node's addresses inside its location with the length
	// of the subnet they are in, at most one for each family.
	InternalIPs []netip.Prefix
	// PodCIDRs of the node, masked, at most one for each family.
	PodCIDRs []netip.Prefix
	Key      PublicKey
	// PersistentKeepalive in seconds, 0 to 65535; not 0 marks a node behind NAT.
	PersistentKeepalive uint16
	// AllowedLocationIPs are further prefixes that are reached through the node's location.
	AllowedLocationIPs []netip.Prefix
	// CNICompatibilityIPs are the node's addresses in the network that Kilo is
	// added to, at most one for each family; Cilium's alone matter.
	CNICompatibilityIPs []netip.Addr
	// WireGuardIPs that the node published as leader: its claim on them for its location.
	WireGuardIPs []netip.Addr
	// LocationIPs are the WireGuard IPs that the node last knew its location by.
	// They claim them too, should the leader and its Node be gone.
	LocationIPs []netip.Addr
	// Silent says that the node used to tell of its life and does so no more, as
	// judged here: it leads nobody who speaks.
	Silent bool
	// Granularity as the node published it, "" if it did not, or one that is not known.
	Granularity Granularity
}

// missing names what a node must publish before it can be part of the mesh.
func (n Node) missing() error {
	var errs []error
	if n.Key.IsZero() {
		errs = append(errs, errors.New("has no public key yet"))
	}
	if !n.Endpoint.IsValid() {
		errs = append(errs, errors.New("has no endpoint yet"))
	}
	if len(n.PodCIDRs) == 0 {
		errs = append(errs, errors.New("has no pod CIDR in spec.podCIDRs"))
	}
	return errors.Join(errs...)
}

// InternalIP returns the node's internal IP of the family of like; ok is false without one.
func (n Node) InternalIP(like netip.Addr) (ip netip.Prefix, ok bool) {
	return ofFamily(n.InternalIPs, like)
}

// Peer is a WireGuard participant that is not a Node, from a Peer object.
type Peer struct {
	Name string
	Key  PublicKey
	// AllowedIPs are masked.
	AllowedIPs   []netip.Prefix
	Endpoint     Endpoint
	PresharedKey SecretKey
	// PersistentKeepalive in seconds, 0 to 65535.
	PersistentKeepalive uint16
}

// Endpoint is a host and a UDP port. The host is an IP address or a DNS name
// (RFC 1123); Resolved is the address of the name, once it is known.
// The zero Endpoint is none.
type Endpoint struct {
	IP       netip.Addr
	DNS      string
	Resolved netip.Addr
	Port     uint16
}

// ParseEndpoint reads "IPv4:port", "[IPv6]:port" or "name:port", port 1 to 65535.
func ParseEndpoint(s string) (Endpoint, error) {
	bad := func(why string) (Endpoint, error) {
		return Endpoint{}, fmt.Errorf("endpoint %q: %s; want IPv4:port, [IPv6]:port or name:port with a port of 1 to 65535", s, why)
	}
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return bad("no port")
	}
	port, err := strconv.ParseUint(s[i+1:], 10, 16)
	if err != nil || port == 0 {
		return bad("bad port")
	}
	host := s[:i]
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if inner, ok = strings.CutSuffix(inner, "]"); !ok {
			return bad("unbalanced brackets")
		}
		ip, err := netip.ParseAddr(inner)
		if err != nil || !ip.Is6() || ip.Zone() != "" { // a zone means nothing on another host
			return bad("no IPv6 address between the brackets")
		}
		return Endpoint{IP: ip.Unmap(), Port: uint16(port)}, nil
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if !ip.Is4() {
			return bad("IPv6 address without brackets")
		}
		return Endpoint{IP: ip, Port: uint16(port)}, nil
	}
	if !IsDNSName(host) {
		return bad("bad host")
	}
	return Endpoint{DNS: host, Port: uint16(port)}, nil
}

// IsDNSName reports whether s is a lower-case RFC 1123 subdomain of at most
// 253 characters that cannot be mistaken for an IPv4 address.
func IsDNSName(s string) bool {
	if s == "" || len(s) > 253 {
		return false
	}
	labels := strings.Split(s, ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
			return false
		}
		for _, c := range l {
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
				return false
			}
		}
	}
	// RFC 1123 2.1: the top label is alphabetic, so all-numeric text is a broken address.
	_, err := strconv.Atoi(labels[len(labels)-1])
	return err != nil
}

// IsValid reports whether e names a host and a port.
func (e Endpoint) IsValid() bool { return e.Port != 0 && (e.IP.IsValid() || e.DNS != "") }

// AddrPort returns the address of e, the resolved one of a DNS name; ok is false while there is none.
func (e Endpoint) AddrPort() (ap netip.AddrPort, ok bool) {
	ip := e.IP
	if e.DNS != "" {
		ip = e.Resolved
	}
	return netip.AddrPortFrom(ip, e.Port), ip.IsValid() && e.Port != 0
}

// String returns the text that ParseEndpoint reads, "" for none.
func (e Endpoint) String() string {
	switch {
	case !e.IsValid():
		return ""
	case e.DNS != "":
		return e.DNS + ":" + strconv.Itoa(int(e.Port))
	default:
		return netip.AddrPortFrom(e.IP, e.Port).String()
	}
}

// Facts are what a host knows about itself, read from its kernel.
type Facts struct {
	// Addrs are the addresses of the host's links, without Kilo's own links and
	// the CNI bridge, in the kernel's order.
	Addrs []LinkAddr
	// DefaultDev is the link of the default route, "" without one. IPv4's is preferred.
	DefaultDev string
	// DefaultMTU is the least MTU in bytes of the links of the default routes of
	// either family, 0 without one.
	DefaultMTU int
	// PeerAddrs are where the WireGuard device sends to its peers, by their keys:
	// where they were heard from last, or their endpoints.
	PeerAddrs map[PublicKey]netip.Addr
	// CiliumTunnel says that Cilium's own IPIP link is there, CiliumIPs are the
	// host's addresses in Cilium's network, at most one for each family.
	CiliumTunnel bool
	CiliumIPs    []netip.Addr
}

// LinkAddr is an address that the host has.
type LinkAddr struct {
	Dev string
	// Prefix keeps the host bits.
	Prefix netip.Prefix
	// MTU of the link in bytes.
	MTU int
}

// LinkOf returns the address entry of ip; ok is false if the host does not have it.
func (f Facts) LinkOf(ip netip.Addr) (a LinkAddr, ok bool) {
	for _, a := range f.Addrs {
		if a.Prefix.Addr() == ip {
			return a, true
		}
	}
	return LinkAddr{}, false
}

// Problem is a bad input that the mesh works around: data, not a log line.
type Problem struct {
	// Object is the input: "node/a", "peer/laptop", "file//etc/cni/net.d/10-kilo.conflist".
	Object string
	// Field of the object, in the object's own terms.
	Field string
	// Err says which value, and what would be accepted.
	Err error
}

// Unwrap returns Err.
func (p Problem) Unwrap() error { return p.Err }

// Error implements error, for those who return a Problem as one.
func (p Problem) Error() string {
	if p.Field == "" {
		return p.Object + ": " + p.Err.Error()
	}
	return p.Object + ": " + p.Field + ": " + p.Err.Error()
}

func (p Problem) compare(o Problem) int {
	return cmp.Or(cmp.Compare(p.Object, o.Object), cmp.Compare(p.Field, o.Field), cmp.Compare(p.Err.Error(), o.Err.Error()))
}

func ofFamily(ps []netip.Prefix, like netip.Addr) (netip.Prefix, bool) {
	for _, p := range ps {
		if p.Addr().Is4() == like.Is4() {
			return p, true
		}
	}
	return netip.Prefix{}, false
}
