// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// The metrics that the kernel gives to a route without one (net/ipv6/route.c, IP6_RT_PRIO_USER).
const (
	defaultMetric4 = 0
	defaultMetric6 = 1024
)

// routeKey is what the kernel identifies a route by when it adds or replaces:
// a second route with the same key is refused (NLM_F_EXCL) or takes the place
// of the first (NLM_F_REPLACE), whoever made that.
type routeKey struct {
	dst         netip.Prefix
	table       int
	metric, tos int
}

// ownRoute is a route that the kernel has with our protocol.
type ownRoute struct {
	mesh.Route
	key routeKey
	// odd routes are none of those that a mesh.Route can say: another metric, a
	// type, several next hops.
	odd bool
	raw netlink.Route
}

func keyOf(r mesh.Route) routeKey {
	k := routeKey{dst: r.Dst, table: r.Table, metric: defaultMetric4}
	if r.Dst.Addr().Is6() {
		k.metric = defaultMetric6
	}
	return k
}

// routePlan is what brings one set of routes to another.
type routePlan struct {
	add     []mesh.Route
	replace []mesh.Route
	// stale are to be deleted after the rest.
	stale []*ownRoute
	errs  []error
}

// diffRoutes compares the desired routes, which are sorted, with those of ours
// that the kernel has, which it sorts.
func diffRoutes(want []mesh.Route, have []*ownRoute) routePlan {
	var plan routePlan
	byTarget := func(a, b *ownRoute) int { return a.CompareTarget(&b.Route) }
	if !slices.IsSortedFunc(have, byTarget) { // the kernel's order is ours within most tables
		slices.SortStableFunc(have, byTarget)
	}
	var last *mesh.Route
	for i := range want {
		w := &want[i]
		if last != nil && last.CompareTarget(w) == 0 {
			plan.errs = append(plan.errs, fmt.Errorf("ip route add %s: %w: %s", routeText(*w), errTwoRoutes, routeText(*last)))
			continue
		}
		last = w
		for len(have) > 0 && have[0].CompareTarget(w) < 0 {
			plan.stale = append(plan.stale, have[0])
			have = have[1:]
		}
		n := 0 // of those to the same destination
		for n < len(have) && have[n].CompareTarget(w) == 0 {
			n++
		}
		plan.target(*w, have[:n])
		have = have[n:]
	}
	plan.stale = append(plan.stale, have...)
	return plan
}

// target plans what makes w of the routes to its destination.
func (plan *routePlan) target(w mesh.Route, have []*ownRoute) {
	if len(have) == 1 && have[0].is(w) {
		return
	}
	k := keyOf(w)
	same := false
	var others []*ownRoute // that have the key of w, or are none of the kind
	for _, h := range have {
		switch {
		case h.key != k:
			plan.stale = append(plan.stale, h)
		case h.is(w) && !same:
			same = true
		default:
			others = append(others, h)
		}
	}
	switch {
	case same:
		plan.stale = append(plan.stale, others...)
	case len(others) == 0:
		plan.add = append(plan.add, w)
	default:
		plan.replace = append(plan.replace, w)
		plan.stale = append(plan.stale, leftovers(others, w)...)
	}
}

// is reports whether o is the desired route.
func (o *ownRoute) is(w mesh.Route) bool { return !o.odd && o.Route == w }

var (
	errTwoRoutes = errors.New("the state has another route to the same destination")
	errForeign   = errors.New("another program has a route to the same destination, which is left alone")
)

// leftovers returns what remains of routes of one key after w replaced the
// first of them. A message that deletes an IPv6 route does not tell its source
// address from another (net/ipv6/route.c, ip6_route_del), so it would hit w.
func leftovers(others []*ownRoute, w mesh.Route) []*ownRoute {
	var rest []*ownRoute
	for _, o := range others[1:] {
		if w.Dst.Addr().Is6() && o.Via == w.Via && o.Dev == w.Dev {
			continue
		}
		rest = append(rest, o)
	}
	return rest
}

// observeRoutes reads the routes of our protocol, of all tables.
func (p *pass) observeRoutes() ([]*ownRoute, error) {
	var own []*ownRoute
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := dump(func() ([]netlink.Route, error) {
			filter := &netlink.Route{Protocol: RouteProtocol}
			return p.h.strict.RouteListFiltered(family, filter, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
		})
		if err != nil && !noFamily(err) {
			return nil, err
		}
		for _, r := range routes {
			own = append(own, p.ownRoute(r))
		}
	}
	return own, p.observeEncaps(own)
}

// noFamily says that the kernel has no such address family.
func noFamily(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

func (p *pass) ownRoute(r netlink.Route) *ownRoute {
	o := &ownRoute{raw: r, Route: mesh.Route{
		Dst:    dstOf(r),
		Via:    addrOf(r.Gw),
		Src:    addrOf(r.Src),
		Dev:    p.names[r.LinkIndex],
		Table:  r.Table,
		OnLink: r.Flags&unix.RTNH_F_ONLINK != 0,
	}}
	o.key = routeKey{dst: o.Dst, table: r.Table, metric: r.Priority, tos: r.Tos}
	o.odd = o.key != keyOf(o.Route) || r.Type != unix.RTN_UNICAST || len(r.MultiPath) > 0 || r.Via != nil || r.Encap != nil || r.MTU != 0 || r.AdvMSS != 0
	return o
}

func dstOf(r netlink.Route) netip.Prefix {
	if p := prefixOf(r.Dst); p.IsValid() {
		return p
	}
	if r.Family == unix.AF_INET6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// prefixOf turns what a library calls a network into a Prefix, zero for nil.
func prefixOf(n *net.IPNet) netip.Prefix { //nolint:forbidigo // what netlink gives
	if n == nil {
		return netip.Prefix{}
	}
	p, _ := netipx.FromStdIPNet(n)
	return p
}

// addrOf turns what a library calls an address into an Addr, zero for nil.
func addrOf(ip net.IP) netip.Addr { //nolint:forbidigo // what netlink gives
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// addRoutes adds and replaces routes, and returns those that are to be deleted.
func (p *pass) addRoutes() (stale []*ownRoute) {
	want, have, err := p.want.Routes, []*ownRoute(nil), error(nil)
	if p.base != nil {
		want, have = p.routesSince(p.base)
	} else if have, err = p.observeRoutes(); err != nil {
		p.errs = append(p.errs, fmt.Errorf("ip route list proto %d: %w", RouteProtocol, err))
		return nil
	}
	plan := diffRoutes(want, have)
	p.errs = append(p.errs, plan.errs...)
	for _, r := range plan.add {
		p.addRoute(r)
	}
	for _, r := range plan.replace {
		p.replaceRoute(r)
	}
	return plan.stale
}

func (p *pass) addRoute(r mesh.Route) {
	l, ok := p.link(r.Dev)
	if !ok {
		return
	}
	p.write(Change{OpAdd, KindRoute, routeText(r)}, func() error {
		raw := rawRoute(r, l)
		err := p.h.nl.RouteAdd(raw) // NLM_F_EXCL: never in place of another one
		if errors.Is(err, unix.EEXIST) {
			return p.takeRoute(r, raw)
		}
		return err
	})
}

// replaceRoute changes a route of ours in one step. The kernel replaces the
// first route with the same key, so it must be sure that all are ours.
func (p *pass) replaceRoute(r mesh.Route) {
	l, ok := p.link(r.Dev)
	if !ok {
		return
	}
	c := Change{OpReplace, KindRoute, routeText(r)}
	f, err := p.foreignRoute(r)
	if f != nil {
		err = foreignError(f)
	}
	if err != nil {
		p.fail(c, err)
		return
	}
	p.write(c, func() error { return p.h.nl.RouteReplace(rawRoute(r, l)) })
}

// deleteRoutes deletes routes of ours.
func (p *pass) deleteRoutes(stale []*ownRoute) {
	for _, o := range stale {
		text := routeText(o.Route)
		if o.odd {
			text += " " + oddText(o.raw)
		}
		p.write(Change{OpDelete, KindRoute, text}, func() error {
			return gone(p.h.nl.RouteDel(deletion(o.raw)), unix.ESRCH, unix.ENOENT, unix.ENODEV)
		})
	}
}

// deletion is the message that deletes exactly r: what a dump says, without the
// flags that only report a state.
func deletion(r netlink.Route) *netlink.Route {
	d := &netlink.Route{
		Dst: ipNet(dstOf(r)), Gw: r.Gw, Src: r.Src, Via: r.Via, Encap: r.Encap, MultiPath: r.MultiPath,
		LinkIndex: r.LinkIndex, Scope: r.Scope, Protocol: r.Protocol, Priority: r.Priority,
		Table: r.Table, Type: r.Type, Tos: r.Tos, Family: r.Family,
	}
	if r.Family == unix.AF_INET6 {
		d.Src, d.Encap = nil, nil // not compared, and a source that is gone would be refused
	}
	for _, nh := range d.MultiPath {
		nh.Flags = 0
	}
	return d
}

// rawRoute is the message of r.
func rawRoute(r mesh.Route, l netlink.Link) *netlink.Route {
	raw := &netlink.Route{
		Dst: ipNet(r.Dst), LinkIndex: l.Attrs().Index, Protocol: RouteProtocol, Table: r.Table, Type: unix.RTN_UNICAST,
	}
	switch {
	case r.Via.IsValid() && isExternal(l):
		raw.Encap = &encap6{r.Via}
	case r.Via.IsValid():
		raw.Gw = r.Via.AsSlice()
	case r.Dst.Addr().Is4():
		raw.Scope = unix.RT_SCOPE_LINK // as ip-route(8) says it of a destination on the link
	}
	if r.Src.IsValid() {
		raw.Src = r.Src.AsSlice()
	}
	if r.OnLink && raw.Encap == nil {
		raw.Flags = unix.RTNH_F_ONLINK
	}
	return raw
}

func routeText(r mesh.Route) string { return strings.TrimPrefix(r.String(), "route ") }

func oddText(r netlink.Route) string {
	return fmt.Sprintf("metric %d tos %d type %d nexthops %d", r.Priority, r.Tos, r.Type, len(r.MultiPath))
}

// routeTable is one routing table of one family.
type routeTable struct{ family, table int }

// foreignRoute returns another program's route with the key of r, nil without
// one. It reads the table once per pass, and only in a pass that needs it.
func (p *pass) foreignRoute(r mesh.Route) (*ownRoute, error) {
	t := routeTable{unix.AF_INET, r.Table}
	if r.Dst.Addr().Is6() {
		t.family = unix.AF_INET6
	}
	routes, ok := p.foreign[t]
	if !ok {
		all, err := dump(func() ([]netlink.Route, error) {
			return p.h.strict.RouteListFiltered(t.family, &netlink.Route{Table: t.table}, netlink.RT_FILTER_TABLE)
		})
		if err != nil {
			return nil, fmt.Errorf("ip route list table %d: %w", t.table, err)
		}
		routes = make(map[routeKey]*ownRoute, len(all))
		for _, f := range all {
			if o := p.ownRoute(f); f.Protocol != RouteProtocol && routes[o.key] == nil {
				routes[o.key] = o
			}
		}
		if p.foreign == nil {
			p.foreign = map[routeTable]map[routeKey]*ownRoute{}
		}
		p.foreign[t] = routes
	}
	return routes[keyOf(r)], nil
}

// foreignError says whose route is in the way.
func foreignError(f *ownRoute) error {
	return fmt.Errorf("%w: %s proto %s", errForeign, routeText(f.Route), f.raw.Protocol)
}
