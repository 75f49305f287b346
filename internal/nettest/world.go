// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nettest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// World returns what the current namespace holds as sorted lines: links,
// addresses, permanent neighbours, routes of all tables, rules and nftables tables. Equal texts mean
// that nothing changed. Link-local, multicast, anycast and local
// routes and link-local addresses of IPv6, which the kernel makes in its own time, are left out.
func World(t testing.TB) string {
	t.Helper()
	var lines []string
	names := map[int]string{}
	for _, l := range Must(netlink.LinkList())(t) {
		a := l.Attrs()
		names[a.Index] = a.Name
		lines = append(lines, fmt.Sprintf("link %s type %s mtu %d up %t group %d alias %q", a.Name, l.Type(), a.MTU, a.Flags&unix.IFF_UP != 0, a.Group, a.Alias))
	}
	for _, a := range Must(netlink.AddrList(nil, netlink.FAMILY_ALL))(t) {
		if !a.IP.IsLinkLocalUnicast() || a.IP.To4() != nil {
			lines = append(lines, fmt.Sprintf("addr %s dev %s", a.IPNet, names[a.LinkIndex]))
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6, unix.AF_BRIDGE} {
		for _, n := range Must(netlink.NeighList(0, family))(t) {
			if groupMAC := len(n.HardwareAddr) > 0 && n.HardwareAddr[0]&1 != 0; n.State&netlink.NUD_PERMANENT != 0 && !groupMAC {
				lines = append(lines, fmt.Sprintf("neigh %v lladdr %v dev %s", n.IP, n.HardwareAddr, names[n.LinkIndex]))
			}
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes := Must(netlink.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_TABLE))(t)
		for _, r := range routes {
			if r.Dst != nil && family == unix.AF_INET6 && (r.Type == unix.RTN_ANYCAST || r.Type == unix.RTN_LOCAL || r.Dst.IP.IsLinkLocalUnicast() || r.Dst.IP.IsMulticast()) {
				continue
			}
			lines = append(lines, fmt.Sprintf("route %v type %d via %v dev %s src %v proto %d table %d metric %d onlink %t nexthops %v",
				r.Dst, r.Type, r.Gw, names[r.LinkIndex], r.Src, r.Protocol, r.Table, r.Priority, r.Flags&unix.RTNH_F_ONLINK != 0, r.MultiPath))
		}
		for _, r := range Must(netlink.RuleList(family))(t) {
			lines = append(lines, fmt.Sprintf("rule %d from %v to %v iif %q table %d proto %d", r.Priority, r.Src, r.Dst, r.IifName, r.Table, r.Protocol))
		}
	}
	nft := Must(nftables.New())(t)
	for _, table := range Must(nft.ListTables())(t) {
		lines = append(lines, fmt.Sprintf("table %d %s", table.Family, table.Name))
		for _, s := range Must(nft.GetSets(table))(t) {
			for _, e := range Must(nft.GetSetElements(s))(t) {
				lines = append(lines, fmt.Sprintf("set %s %s element %x end %t", table.Name, s.Name, e.Key, e.IntervalEnd))
			}
		}
	}
	for _, c := range Must(nft.ListChains())(t) {
		rules := Must(nft.GetRules(c.Table, c))(t)
		lines = append(lines, fmt.Sprintf("chain %s %s rules %d", c.Table.Name, c.Name, len(rules)))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
