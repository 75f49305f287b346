// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// Facts reads what the host knows about itself: the addresses of all links but
// Kilo's own, the CNI bridge and loopback, without link-local, temporary
// (RFC 8981) and not yet usable ones; and the link of the default route.
// Having none is no error.
func (h *Host) Facts(ctx context.Context) (mesh.Facts, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return mesh.Facts{}, err
	}
	p := &pass{h: h, ctx: ctx}
	if err := p.observeLinks(); err != nil {
		return mesh.Facts{}, fmt.Errorf("ip link list: %w", err)
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return mesh.Facts{}, fmt.Errorf("ip addr list: %w", err)
	}
	f := mesh.Facts{PeerAddrs: h.peerAddrs()}
	_, f.CiliumTunnel = p.links[mesh.CiliumTunnelDev]
	for _, a := range addrs {
		l, ok := p.links[p.names[a.LinkIndex]]
		if ok && l.Attrs().Name == mesh.CiliumDev {
			f.CiliumIPs = appendOfNewFamily(f.CiliumIPs, addrOf(a.IP))
		}
		if !ok || !p.isOthers(l) {
			continue
		}
		if fact, ok := factOf(a, l); ok {
			f.Addrs = append(f.Addrs, fact)
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		l, err := p.defaultLink(family)
		if err != nil {
			return mesh.Facts{}, fmt.Errorf("ip route list default: %w", err)
		}
		switch {
		case l == nil:
		case f.DefaultDev == "":
			f.DefaultDev, f.DefaultMTU = l.Attrs().Name, l.Attrs().MTU
		default:
			f.DefaultMTU = min(f.DefaultMTU, l.Attrs().MTU)
		}
	}
	return f, nil
}

// isOthers reports whether the link says something about the host, and not about Kilo or its pods.
func (p *pass) isOthers(l netlink.Link) bool {
	a := l.Attrs()
	switch a.Name {
	case p.h.cfg.TunnelDev, p.h.cfg.CNIBridge, mesh.FlannelDev4, mesh.FlannelDev6, mesh.CiliumDev, mesh.CiliumTunnelDev:
		return false
	}
	return a.Flags&net.FlagLoopback == 0 && !p.isOwn(l)
}

// appendOfNewFamily appends an address that others can use, unless there is one of its family.
func appendOfNewFamily(ips []netip.Addr, ip netip.Addr) []netip.Addr {
	if !ip.IsGlobalUnicast() || slices.ContainsFunc(ips, func(o netip.Addr) bool { return o.Is4() == ip.Is4() }) {
		return ips
	}
	return append(ips, ip)
}

func factOf(a netlink.Addr, l netlink.Link) (mesh.LinkAddr, bool) {
	const unusable = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED
	ip := addrOf(a.IP)
	if !ip.IsValid() || ip.IsLinkLocalUnicast() || ip.IsLoopback() || ip.Is6() && a.Flags&(unusable|unix.IFA_F_TEMPORARY) != 0 {
		return mesh.LinkAddr{}, false
	}
	prefix, ok := netipx.FromStdIPNet(a.IPNet)
	if !ok {
		return mesh.LinkAddr{}, false
	}
	return mesh.LinkAddr{Dev: l.Attrs().Name, Prefix: prefix, MTU: l.Attrs().MTU}, true
}

// defaultLink returns the link of the default route with the lowest metric that
// is not Kilo's own, nil without one.
func (p *pass) defaultLink(family int) (netlink.Link, error) {
	routes, err := dump(func() ([]netlink.Route, error) {
		var defaults []netlink.Route
		filter := &netlink.Route{Table: unix.RT_TABLE_MAIN}
		err := p.h.strict.RouteListFilteredIter(family, filter, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
			if dstOf(r).Bits() == 0 && r.Type == unix.RTN_UNICAST && r.Protocol != RouteProtocol {
				defaults = append(defaults, r)
			}
			return true
		})
		return defaults, err
	})
	if err != nil {
		if noFamily(err) {
			return nil, nil
		}
		return nil, err
	}
	slices.SortStableFunc(routes, func(a, b netlink.Route) int { return cmp.Compare(a.Priority, b.Priority) })
	for _, r := range routes {
		index := r.LinkIndex
		if len(r.MultiPath) > 0 {
			index = r.MultiPath[0].LinkIndex
		}
		if l, ok := p.links[p.names[index]]; ok && p.isOthers(l) {
			return l, nil
		}
	}
	return nil, nil
}
