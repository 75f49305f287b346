// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// Watch calls changed when the kernel may no longer be as the last Apply left
// it, or when what Facts reads has changed, until ctx ends. It opens its sockets
// in the current network namespace before it calls started. What Apply itself
// writes is passed over as far as the kernel's messages tell; else it costs one
// pass more, which only reads. WireGuard devices tell nothing.
func (h *Host) Watch(ctx context.Context, started, changed func()) error {
	rt, err := nl.Subscribe(unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
	if err != nil {
		return fmt.Errorf("watch rtnetlink: %w", err)
	}
	nft, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		rt.Close()
		return fmt.Errorf("watch nftables: %w", err)
	}
	w := &watch{h: h, links: map[int]linkSeen{}, addrs: map[addrSeen]bool{}}
	closeAll := sync.OnceFunc(func() { rt.Close(); nft.Close() })
	stop := context.AfterFunc(ctx, closeAll)
	defer stop()
	defer closeAll()
	if err := w.prime(); err != nil {
		return err
	}
	defer h.settled.watching()()
	started()
	var both sync.WaitGroup
	var errs [2]error
	both.Go(func() { defer closeAll(); errs[0] = w.receive(ctx, rt, w.rtConcerns, changed) })
	both.Go(func() { defer closeAll(); errs[1] = w.receive(ctx, nft, w.nftConcerns, changed) })
	both.Wait()
	return errors.Join(errs[:]...)
}

// receive reads messages until ctx ends, or the socket fails.
func (w *watch) receive(ctx context.Context, s *nl.NetlinkSocket, concerns func(syscall.NetlinkMessage) bool, changed func()) error {
	for {
		messages, _, err := s.Receive()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the socket was closed to end this
		}
		switch {
		case errors.Is(err, unix.ENOBUFS): // some were lost
			w.h.legacy.Store(true)
			w.tell(changed)
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("read netlink messages: %w", err)
		}
		if slices.ContainsFunc(messages, concerns) {
			w.tell(changed)
		}
	}
}

// tell says that the kernel is not what a pass left, to the next one and to who asked.
func (w *watch) tell(changed func()) {
	w.h.settled.disturb()
	changed()
}

// watch remembers what the kernel tells again and again.
type watch struct {
	h     *Host
	links map[int]linkSeen
	addrs map[addrSeen]bool
}

type linkSeen struct {
	name string
	mtu  int
	up   bool
}

type addrSeen struct {
	link   int
	prefix netip.Prefix
}

// prime reads what is there before the first message.
func (w *watch) prime() error {
	w.h.mu.Lock()
	defer w.h.mu.Unlock()
	links, err := dump(w.h.nl.LinkList)
	if err != nil {
		return fmt.Errorf("ip link list: %w", err)
	}
	for _, l := range links {
		a := l.Attrs()
		w.links[a.Index] = linkSeen{a.Name, a.MTU, isUp(l)}
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return w.h.nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("ip addr list: %w", err)
	}
	for _, a := range addrs {
		if prefix, ok := netipx.FromStdIPNet(a.IPNet); ok {
			w.addrs[addrSeen{a.LinkIndex, prefix}] = true
		}
	}
	return nil
}

// rtConcerns judges a message of rtnetlink(7).
func (w *watch) rtConcerns(m syscall.NetlinkMessage) bool {
	want := w.h.applied.Load()
	if want == nil {
		return false // the first pass is still to come
	}
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return w.link(m, want)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return w.addr(m, want)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return w.route(m, want)
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		a, ok := attributes(m, unix.SizeofRtMsg)
		return !ok || w.rule(m, a)
	case unix.RTM_NEWNETCONF:
		a, ok := attributes(m, 4) // struct netconfmsg, padded
		return !ok || len(a[netconfaIfindex]) == 4 && w.netconf(a, want)
	default:
		return false
	}
}

// Of linux/fib_rules.h and linux/netconf.h.
const (
	fraTable         = 15
	fraProtocol      = 21
	netconfaIfindex  = 1
	netconfaRPFilter = 3
	netconfaAll      = -1
)

// netconf judges a setting of all links, or of one: of ours, what a pass would change.
func (w *watch) netconf(a map[uint16][]byte, want *mesh.State) bool {
	index := int32(binary.NativeEndian.Uint32(a[netconfaIfindex]))
	if index == netconfaAll {
		return true
	}
	strict := len(a[netconfaRPFilter]) == 4 && binary.NativeEndian.Uint32(a[netconfaRPFilter]) == 1
	return strict && w.isOwn(w.links[int(index)].name, want)
}

// attributes returns those behind a header of that size, by their types; ok is
// false if they cannot be read.
func attributes(m syscall.NetlinkMessage, header int) (map[uint16][]byte, bool) {
	if len(m.Data) < header {
		return nil, false
	}
	list, err := nl.ParseRouteAttr(m.Data[header:])
	if err != nil {
		return nil, false
	}
	out := make(map[uint16][]byte, len(list))
	for _, a := range list {
		out[a.Attr.Type&nlaTypeMask] = a.Value
	}
	return out, true
}

// rule judges the coming or going of a rule: one of ours, or of other releases.
func (w *watch) rule(m syscall.NetlinkMessage, a map[uint16][]byte) bool {
	protocol := byte(unix.RTPROT_UNSPEC)
	if p := a[fraProtocol]; len(p) > 0 {
		protocol = p[0]
	}
	if t := a[fraTable]; m.Header.Type == unix.RTM_NEWRULE && protocol == unix.RTPROT_UNSPEC && len(t) == 4 && binary.NativeEndian.Uint32(t) == mesh.TableTunnel {
		w.h.legacy.Store(true)
		return true
	}
	return protocol == RouteProtocol
}

// link judges the change of a link: of ours everything but what is desired
// counts, of others the name, the MTU and the state.
func (w *watch) link(m syscall.NetlinkMessage, want *mesh.State) bool {
	a, ok := attributes(m, unix.SizeofIfInfomsg)
	if !ok {
		return true
	}
	index := int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
	old, known := w.links[index]
	if m.Header.Type == unix.RTM_DELLINK {
		delete(w.links, index)
		return w.isOwn(nl.BytesToString(a[unix.IFLA_IFNAME]), want)
	}
	now := linkSeen{name: nl.BytesToString(a[unix.IFLA_IFNAME]), up: binary.NativeEndian.Uint32(m.Data[8:])&unix.IFF_UP != 0}
	if len(a[unix.IFLA_MTU]) == 4 {
		now.mtu = int(binary.NativeEndian.Uint32(a[unix.IFLA_MTU]))
	}
	w.links[index] = now
	i := slices.IndexFunc(want.Links, func(l mesh.Link) bool { return l.Name == now.name })
	switch {
	case i >= 0:
		return now.mtu != want.Links[i].MTU || now.up != want.Links[i].Up
	case w.isOwn(now.name, want):
		return true
	default: // what pods come and go with has no address, and so changes nothing
		return known && now != old && w.hasAddr(index)
	}
}

func (w *watch) isOwn(name string, want *mesh.State) bool {
	return name == w.h.cfg.WireGuardDev || slices.ContainsFunc(want.Links, func(l mesh.Link) bool { return l.Name == name })
}

func (w *watch) hasAddr(link int) bool {
	for a := range w.addrs {
		if a.link == link {
			return true
		}
	}
	return false
}

// addr judges the coming or going of an address. Router advertisements renew
// the same ones again and again.
func (w *watch) addr(m syscall.NetlinkMessage, want *mesh.State) bool {
	a, ok := attributes(m, unix.SizeofIfAddrmsg)
	if !ok {
		return true
	}
	value := a[unix.IFA_LOCAL]
	if value == nil {
		value = a[unix.IFA_ADDRESS]
	}
	ip, ok := netip.AddrFromSlice(value)
	if !ok {
		return true
	}
	if ip.IsLinkLocalUnicast() && ip.Is6() {
		return false
	}
	seen := addrSeen{int(binary.NativeEndian.Uint32(m.Data[4:])), netip.PrefixFrom(ip, int(m.Data[1]))}
	added := m.Header.Type == unix.RTM_NEWADDR
	known := w.addrs[seen]
	if added {
		w.addrs[seen] = true
	} else {
		delete(w.addrs, seen)
	}
	name := w.links[seen.link].name
	switch {
	case w.isOwn(name, want):
		return slices.Contains(want.Addrs, mesh.Addr{Dev: name, Prefix: seen.prefix}) != added
	case name == w.h.cfg.CNIBridge:
		return false
	default:
		return !added || !known
	}
}

// route judges the coming or going of a route: one of ours, one to a desired
// destination, or a default route.
func (w *watch) route(m syscall.NetlinkMessage, want *mesh.State) bool {
	if len(m.Data) < unix.SizeofRtMsg {
		return true
	}
	length, protocol := int(m.Data[1]), m.Data[5]
	a, ok := attributes(m, unix.SizeofRtMsg)
	if !ok {
		return true
	}
	table := int(m.Data[4])
	if t := a[unix.RTA_TABLE]; len(t) == 4 {
		table = int(binary.NativeEndian.Uint32(t))
	}
	dst, ok := netip.AddrFromSlice(a[unix.RTA_DST])
	if !ok {
		if dst = netip.IPv4Unspecified(); m.Data[0] == unix.AF_INET6 {
			dst = netip.IPv6Unspecified()
		}
	}
	target := mesh.Route{Dst: netip.PrefixFrom(dst, length), Table: table}
	i, desired := slices.BinarySearchFunc(want.Routes, target, func(r, target mesh.Route) int { return r.CompareTarget(&target) })
	added := m.Header.Type == unix.RTM_NEWROUTE
	switch {
	case protocol == unix.RTPROT_STATIC && added && w.isLegacy(table, a):
		w.h.legacy.Store(true)
		return true
	case protocol != RouteProtocol:
		return desired || length == 0 && table == mesh.TableMain
	case !desired || !added:
		return desired || added
	default:
		via, _ := netip.AddrFromSlice(a[unix.RTA_GATEWAY])
		return via.IsValid() && via != want.Routes[i].Via
	}
}

// isLegacy reports whether a static route is of a table, or over a link, in which
// agents of other releases have theirs; removeLegacy looks closer.
func (w *watch) isLegacy(table int, a map[uint16][]byte) bool {
	if table == mesh.TableTunnel {
		return true
	}
	index := a[unix.RTA_OIF]
	if table != mesh.TableMain || len(index) != 4 {
		return false
	}
	name := w.links[int(binary.NativeEndian.Uint32(index))].name
	return name == w.h.cfg.WireGuardDev || name == w.h.cfg.TunnelDev
}

// nftConcerns judges a message of nfnetlink: whether it is about our table, or
// iptables lost a rule of the chain that we have some in, or has that chain only now. The
// name of the table is the first attribute of each (linux/netfilter/nf_tables.h).
func (w *watch) nftConcerns(m syscall.NetlinkMessage) bool {
	const nfgenmsg = 4
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || m.Header.Type&0xff == unix.NFT_MSG_NEWGEN || m.Header.Pid == w.h.nftPort.Load() {
		return false
	}
	a, ok := attributes(m, nfgenmsg)
	if !ok || nl.BytesToString(a[unix.NFTA_TABLE_NAME]) == tableName {
		return true
	}
	if m.Header.Type&0xff == unix.NFT_MSG_NEWCHAIN && slices.Contains(legacyChains, nl.BytesToString(a[unix.NFTA_CHAIN_NAME])) {
		w.h.legacy.Store(true)
		return true
	}
	if want := w.h.applied.Load(); want == nil || len(want.AcceptForward) == 0 {
		return false
	}
	switch m.Header.Type & 0xff {
	case unix.NFT_MSG_DELRULE:
		return nl.BytesToString(a[unix.NFTA_RULE_CHAIN]) == forwardChainName
	case unix.NFT_MSG_NEWCHAIN:
		return nl.BytesToString(a[unix.NFTA_CHAIN_NAME]) == forwardChainName
	default:
		return false
	}
}
