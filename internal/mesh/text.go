// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// String returns s in the syntax of ip(8) and wg(8), one object a line, for
// people and golden tests. Secrets show as "(hidden)".
func (s State) String() string {
	var b strings.Builder
	for _, l := range s.Links {
		fmt.Fprintln(&b, l)
	}
	for _, a := range s.Addrs {
		fmt.Fprintln(&b, a)
	}
	for _, r := range s.Routes {
		fmt.Fprintln(&b, r)
	}
	for _, r := range s.Rules {
		fmt.Fprintln(&b, r)
	}
	for _, n := range s.Neighs {
		fmt.Fprintln(&b, n)
	}
	b.WriteString(s.Device.String())
	for _, set := range []struct {
		name string
		ps   []netip.Prefix
	}{
		{"masquerade from", s.Firewall.MasqueradeFrom},
		{"masquerade to", s.Firewall.MasqueradeTo},
		{"known", s.Firewall.Known},
		{"tunnel from", s.Firewall.TunnelFrom},
		{"sealed", s.Firewall.Sealed},
	} {
		if len(set.ps) > 0 {
			fmt.Fprintf(&b, "firewall %s %s\n", set.name, joinPrefixes(set.ps))
		}
	}
	for _, set := range []struct {
		name string
		devs []string
	}{
		{"sealed devs", s.Firewall.SealedDevs},
		{"clamp devs", s.Firewall.ClampDevs},
	} {
		if len(set.devs) > 0 {
			fmt.Fprintf(&b, "firewall %s %s\n", set.name, strings.Join(set.devs, ","))
		}
	}
	return b.String()
}

// String returns l as ip-link(8) would be told.
func (l Link) String() string {
	state := "down"
	if l.Up {
		state = "up"
	}
	kind := string(l.Kind)
	if l.Kind == KindVXLAN {
		kind = fmt.Sprintf("%s id %d local %s dstport %d nolearning address %s", l.Kind, VXLANID, l.Local, VXLANPort, l.MAC)
	}
	return fmt.Sprintf("link %s type %s mtu %d %s", l.Name, kind, l.MTU, state)
}

// String returns n as ip-neighbour(8) and bridge(8) would be told.
func (n Neigh) String() string {
	return fmt.Sprintf("neigh %s lladdr %s dev %s dst %s", n.IP, n.MAC, n.Dev, n.Remote)
}

// String returns the usual form of m, six bytes with colons between them.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// String returns a as ip-address(8) would be told.
func (a Addr) String() string { return fmt.Sprintf("addr %s dev %s", a.Prefix, a.Dev) }

// String returns r as ip-route(8) would be told.
func (r Route) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "route %s", r.Dst)
	if r.Via.IsValid() {
		fmt.Fprintf(&b, " via %s", r.Via)
	}
	fmt.Fprintf(&b, " dev %s", r.Dev)
	if r.Src.IsValid() {
		fmt.Fprintf(&b, " src %s", r.Src)
	}
	if r.Table != TableMain {
		fmt.Fprintf(&b, " table %d", r.Table)
	}
	if r.OnLink {
		b.WriteString(" onlink")
	}
	return b.String()
}

// String returns r as ip-rule(8) would be told.
func (r Rule) String() string {
	var b strings.Builder
	b.WriteString("rule")
	if r.From.IsValid() {
		fmt.Fprintf(&b, " from %s", r.From)
	}
	if r.To.IsValid() {
		fmt.Fprintf(&b, " to %s", r.To)
	}
	if r.IIf != "" {
		fmt.Fprintf(&b, " iif %s", r.IIf)
	}
	if r.Protocol != 0 {
		fmt.Fprintf(&b, " ipproto %d", r.Protocol)
	}
	if r.SourcePorts != (PortRange{}) {
		fmt.Fprintf(&b, " sport %d-%d", r.SourcePorts.First, r.SourcePorts.Last)
	}
	fmt.Fprintf(&b, " lookup %d", r.Table)
	return b.String()
}

// String returns d as wg(8) would be told, peers by name.
func (d Device) String() string {
	var b strings.Builder
	if d.ListenPort != 0 {
		fmt.Fprintf(&b, "wg listen-port %d\n", d.ListenPort)
	}
	byName := slices.SortedStableFunc(slices.Values(d.Peers), func(a, b DevicePeer) int { return cmp.Compare(a.Object(), b.Object()) })
	for _, p := range byName {
		fmt.Fprintf(&b, "wg peer %s # %s", p.Key, p.Object())
		if p.Endpoint.IsValid() {
			fmt.Fprintf(&b, " endpoint %s", p.Endpoint)
		}
		if p.PersistentKeepalive != 0 {
			fmt.Fprintf(&b, " persistent-keepalive %d", p.PersistentKeepalive)
		}
		if !p.PresharedKey.IsZero() {
			fmt.Fprintf(&b, " preshared-key %v", p.PresharedKey)
		}
		fmt.Fprintf(&b, " allowed-ips %s\n", joinPrefixes(slices.SortedFunc(slices.Values(p.AllowedIPs), ComparePrefix)))
	}
	return b.String()
}

func joinPrefixes(ps []netip.Prefix) string {
	texts := make([]string, len(ps))
	for i, p := range ps {
		texts[i] = p.String()
	}
	return strings.Join(texts, ",")
}
