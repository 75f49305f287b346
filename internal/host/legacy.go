// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// What follows removes what the agent of other releases left, which marks
// nothing as its own: routes and rules here, iptables chains in legacyfw.go. It
// comes after ours is in place, and where ours is not, theirs stays.
//
// It is looked for in the first pass of a process, and when Watch saw some.

// removeLegacy removes what the agent of other releases left.
func (p *pass) removeLegacy() {
	if !p.h.legacy.Swap(false) {
		return
	}
	errs := len(p.errs)
	p.legacyRoutes()
	if !p.failed[KindRule] {
		p.legacyRules()
	}
	if !p.failed[KindTable] {
		p.removeLegacyChains()
	}
	if len(p.errs) > errs || p.failed[KindRule] || p.failed[KindTable] || p.failed[KindRoute] || p.ctx.Err() != nil {
		p.h.legacy.Store(true)
	}
}

// isLegacyRoute reports whether the other agent made a route: of protocol
// static, in table 1107, over one of our links, or over a neighbour, with
// onlink, to somewhere in the mesh. The default route never is.
func (p *pass) isLegacyRoute(r mesh.Route, key routeKey, protocol int) bool {
	if protocol != unix.RTPROT_STATIC || key != keyOf(r) || r.Dst.Bits() == 0 {
		return false
	}
	if r.Table == mesh.TableTunnel {
		return true
	}
	if r.Table != mesh.TableMain {
		return false
	}
	if r.Dev == p.h.cfg.WireGuardDev || r.Dev == p.h.cfg.TunnelDev {
		return true
	}
	return r.OnLink && r.Via.IsValid() && p.isInMesh(r.Dst)
}

// isInMesh reports whether dst is part of what the State calls known, or has a route of the State.
func (p *pass) isInMesh(dst netip.Prefix) bool {
	within := func(o netip.Prefix) bool { return o.Bits() > 0 && o.Bits() <= dst.Bits() && o.Overlaps(dst) }
	return slices.ContainsFunc(p.want.Firewall.Known, within) ||
		slices.ContainsFunc(p.want.Routes, func(r mesh.Route) bool { return r.Table == mesh.TableMain && r.Dst == dst })
}

// legacyRoutes deletes those to which we have no route. The others were
// replaced by ours, see addRoute, or ours could not be made.
func (p *pass) legacyRoutes() {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := dump(func() ([]netlink.Route, error) {
			filter := &netlink.Route{Protocol: unix.RTPROT_STATIC}
			return p.h.strict.RouteListFiltered(family, filter, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
		})
		if err != nil && !noFamily(err) {
			p.errs = append(p.errs, fmt.Errorf("ip route list proto static: %w", err))
			continue
		}
		for _, raw := range routes {
			o := p.ownRoute(raw)
			if o.odd || !p.isLegacyRoute(o.Route, o.key, int(raw.Protocol)) || p.desired(o.Route) {
				continue
			}
			p.adopt(o.Dev)
			p.write(Change{OpDelete, KindRoute, routeText(o.Route) + " proto static"}, func() error {
				return gone(p.h.nl.RouteDel(deletion(raw)), unix.ESRCH, unix.ENOENT, unix.ENODEV)
			})
		}
	}
}

// desired reports whether the State has a route to the same destination.
func (p *pass) desired(r mesh.Route) bool {
	_, ok := slices.BinarySearchFunc(p.want.Routes, r, func(a, b mesh.Route) int { return a.CompareTarget(&b) })
	return ok
}

// adopt marks the tunnel link that carried the other agent's routes as one
// that was there, so that it is emptied if the State has another kind of tunnel.
func (p *pass) adopt(dev string) {
	l, ok := p.links[dev]
	if !ok || dev != p.h.cfg.TunnelDev || dev == p.h.cfg.WireGuardDev || l.Attrs().Alias != "" {
		return
	}
	if p.write(linkSet(dev, "alias", aliasAdopted), func() error { return p.h.nl.LinkSetAlias(l, aliasAdopted) }) {
		l.Attrs().Alias = aliasAdopted
	}
}

// legacyRules deletes the rules of nobody that lead to table 1107. The kernel
// chose their priority.
func (p *pass) legacyRules() {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := dump(func() ([]netlink.Rule, error) { return p.h.nl.RuleList(family) })
		if err != nil && !noFamily(err) {
			p.errs = append(p.errs, fmt.Errorf("ip rule list: %w", err))
			continue
		}
		for _, r := range rules {
			if r.Table != mesh.TableTunnel || r.Protocol != unix.RTPROT_UNSPEC {
				continue
			}
			text := fmt.Sprintf("pref %d %s", r.Priority, ruleWords(ownRuleOf(r).Rule))
			p.write(Change{OpDelete, KindRule, text}, func() error {
				return gone(p.h.nl.RuleDel(&r), unix.ENOENT, unix.ESRCH)
			})
		}
	}
}

// takeRoute puts r in place of the route that the other agent has to the same
// destination. It reports an error if that is another program's.
func (p *pass) takeRoute(r mesh.Route, raw *netlink.Route) error {
	f, err := p.foreignRoute(r)
	if err != nil {
		return err
	}
	if f == nil {
		return unix.EEXIST
	}
	if f.odd || !p.isLegacyRoute(f.Route, f.key, int(f.raw.Protocol)) {
		return errors.Join(foreignError(f), unix.EEXIST)
	}
	return p.h.nl.RouteReplace(raw)
}
