// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Over an external ip6tnl link (see linkSpec) a mesh.Route's Via is the other
// end of the tunnel, and the kernel's route says so instead of a gateway:
//
//	ip -6 route add DST encap ip6 dst VIA dev LINK
//
// The library writes no such route without a source and cannot read any.

// encap6 says where a tunnel packet goes. The kernel chooses its source.
type encap6 struct{ dst netip.Addr }

var _ netlink.Encap = &encap6{}

// Type implements netlink.Encap.
func (*encap6) Type() int { return nl.LWTUNNEL_ENCAP_IP6 }

// Encode implements netlink.Encap.
func (e *encap6) Encode() ([]byte, error) {
	return nl.NewRtAttr(nl.LWTUNNEL_IP6_DST, e.dst.AsSlice()).Serialize(), nil
}

// Decode implements netlink.Encap.
func (e *encap6) Decode(b []byte) error {
	attrs, err := nl.ParseRouteAttr(b)
	if err != nil {
		return err
	}
	for _, a := range attrs {
		if a.Attr.Type&nlaTypeMask == nl.LWTUNNEL_IP6_DST {
			e.dst = addrOf(a.Value)
		}
	}
	return nil
}

// String implements netlink.Encap.
func (e *encap6) String() string { return fmt.Sprintf("dst %s", e.dst) }

// Equal implements netlink.Encap.
func (e *encap6) Equal(o netlink.Encap) bool {
	x, ok := o.(*encap6)
	return ok && *x == *e
}

// nlaTypeMask takes the flags off the type of an attribute, NLA_TYPE_MASK of linux/netlink.h.
const nlaTypeMask = 0x3fff

// observeEncaps completes routes of ours over external links.
func (p *pass) observeEncaps(own []*ownRoute) error {
	external := func(o *ownRoute) bool { return o.Dst.Addr().Is6() && isExternal(p.links[o.Dev]) }
	if !slices.ContainsFunc(own, external) {
		return nil
	}
	encaps := map[routeKey]netip.Addr{}
	if _, err := dump(func() ([]struct{}, error) { return nil, readEncaps(encaps) }); err != nil {
		return err
	}
	for _, o := range own {
		if external(o) {
			if dst, ok := encaps[o.key]; ok {
				o.Via, o.OnLink = dst, true
			}
		}
	}
	return nil
}

// readEncaps reads where the IPv6 routes of our protocol tunnel to.
func readEncaps(into map[routeKey]netip.Addr) error {
	req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
	req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET6, Protocol: RouteProtocol}})
	var errs error
	err := req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(b []byte) bool {
		msg := nl.DeserializeRtMsg(b)
		if msg.Protocol != RouteProtocol {
			return true
		}
		attrs, err := nl.ParseRouteAttr(b[msg.Len():])
		if err != nil {
			errs = errors.Join(errs, err)
			return true
		}
		key := routeKey{dst: netip.PrefixFrom(netip.IPv6Unspecified(), 0), table: int(msg.Table), tos: int(msg.Tos)}
		var e encap6
		var kind int
		for _, a := range attrs {
			switch a.Attr.Type & nlaTypeMask {
			case unix.RTA_DST:
				key.dst = netip.PrefixFrom(addrOf(a.Value), int(msg.Dst_len))
			case unix.RTA_TABLE:
				key.table = int(binary.NativeEndian.Uint32(a.Value))
			case unix.RTA_PRIORITY:
				key.metric = int(binary.NativeEndian.Uint32(a.Value))
			case unix.RTA_ENCAP_TYPE:
				kind = int(binary.NativeEndian.Uint16(a.Value))
			case unix.RTA_ENCAP:
				errs = errors.Join(errs, e.Decode(a.Value))
			}
		}
		if kind == nl.LWTUNNEL_ENCAP_IP6 {
			into[key] = e.dst
		}
		return true
	})
	return errors.Join(err, errs)
}
