// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// defaultMTU is that of Ethernet.
const defaultMTU = 1500

// The links of machines, each in its own namespace.
const (
	publicLink  = "eth0" // to the internet
	privateLink = "eth1" // to the cloud's network
	bridgeLink  = "br0"  // of the internet and of a cloud's router
)

var forwardSysctls = [][2]string{
	{"net/ipv4/ip_forward", "1"},
	{"net/ipv6/conf/all/forwarding", "1"},
}

// buildInternet makes the namespace that everybody else is attached to. It
// routes between the public networks and knows no private one.
func (l *Lab) buildInternet() error {
	if err := createNetns(l.netns(internetName)); err != nil {
		return err
	}
	return inNetns(l.netnsPath(internetName), func() error {
		if err := setSysctls(forwardSysctls); err != nil {
			return err
		}
		return addBridge(l.mtu(l.spec.MTU), l.plan.Internet)
	})
}

// buildCloud makes the router of a cloud with a network.
func (l *Lab) buildCloud(c CloudSpec) error {
	router, p := routerName(c.Name), l.plan.Clouds[c.Name]
	if err := createNetns(l.netns(router)); err != nil {
		return err
	}
	if err := l.attach(router, publicLink, internetName, l.spec.MTU, p.Uplink); err != nil {
		return err
	}
	err := inNetns(l.netnsPath(router), func() error {
		if err := setSysctls(forwardSysctls); err != nil {
			return err
		}
		if err := addBridge(l.mtu(c.MTU), p.Gateway); err != nil {
			return err
		}
		if err := addDefaultRoutes(publicLink, l.plan.Internet); err != nil {
			return err
		}
		inner := firstPrivate(l.spec, l.plan, c.Name)
		return setNAT(c, inner)
	})
	if err != nil || c.NAT != NATNone {
		return err
	}
	return inNetns(l.netnsPath(internetName), func() error {
		for i, g := range p.Gateway {
			if err := addRoute(netlink.Route{Dst: ipNet(g.Masked()), Gw: p.Uplink[i].Addr().AsSlice()}); err != nil {
				return err
			}
		}
		return nil
	})
}

// buildMachine makes the namespace of a host or of the control plane.
func (l *Lab) buildMachine(name, cloud string, p hostPlan) error {
	if err := createNetns(l.netns(name)); err != nil {
		return err
	}
	link, gateways := privateLink, l.plan.Clouds[cloud].Gateway
	if len(p.Private) > 0 {
		if err := l.attach(name, privateLink, routerName(cloud), l.spec.cloud(cloud).MTU, p.Private); err != nil {
			return err
		}
	}
	if len(p.Public) > 0 {
		if err := l.attach(name, publicLink, internetName, l.spec.MTU, p.Public); err != nil {
			return err
		}
		link, gateways = publicLink, l.plan.Internet
	}
	return inNetns(l.netnsPath(name), func() error { return addDefaultRoutes(link, gateways) })
}

// attach joins machine to the bridge of another namespace by a veth pair. The
// bridge's end is called after the machine.
func (l *Lab) attach(machine, link, bridge string, mtu int, prefixes []netip.Prefix) error {
	netns, err := os.Open(l.netnsPath(machine))
	if err != nil {
		return err
	}
	defer discard(netns)
	err = inNetns(l.netnsPath(bridge), func() error {
		br, err := netlink.LinkByName(bridgeLink)
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.MasterIndex = vethName(machine), l.mtu(mtu), br.Attrs().Index
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: link, PeerNamespace: netlink.NsFd(netns.Fd())})
	})
	if err != nil {
		return fmt.Errorf("link %s to %s: %w", machine, bridge, err)
	}
	if err := inNetns(l.netnsPath(bridge), func() error { return linkUp(vethName(machine)) }); err != nil {
		return err
	}
	return inNetns(l.netnsPath(machine), func() error {
		if err := addAddrs(link, prefixes); err != nil {
			return err
		}
		return linkUp(link)
	})
}

// vethName fits a machine's name into the kernel's 15 characters. Only routers'
// names are longer, and what is left of them still tells them apart.
func vethName(machine string) string { return machine[:min(len(machine), unix.IFNAMSIZ-1)] }

func (l *Lab) mtu(n int) int {
	if n == 0 {
		return defaultMTU
	}
	return n
}

func addBridge(mtu int, prefixes []netip.Prefix) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = bridgeLink, mtu
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("add link %s: %w", bridgeLink, err)
	}
	if err := addAddrs(bridgeLink, prefixes); err != nil {
		return err
	}
	return linkUp(bridgeLink)
}

func addAddrs(name string, prefixes []netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, p := range prefixes {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return fmt.Errorf("add address %v to %s: %w", p, name, err)
		}
	}
	return nil
}

func addDefaultRoutes(name string, gateways []netip.Prefix) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, g := range gateways {
		dst := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if g.Addr().Is6() {
			dst = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		r := netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(dst), Gw: g.Addr().AsSlice()}
		if err := addRoute(r); err != nil {
			return err
		}
	}
	return nil
}

func addRoute(r netlink.Route) error {
	if err := netlink.RouteAdd(&r); err != nil {
		return fmt.Errorf("add route %v: %w", r, err)
	}
	return nil
}

func linkUp(name string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set link %s up: %w", name, err)
	}
	return nil
}

// linkDelete is fine with a link that is gone.
func linkDelete(name string) error {
	link, err := netlink.LinkByName(name)
	if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone {
		return nil
	}
	if err != nil {
		return err
	}
	return netlink.LinkDel(link)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// firstPrivate returns the private addresses of the cloud's first host that has any.
func firstPrivate(s Spec, p *plan, cloud string) []netip.Addr {
	for _, h := range s.Hosts {
		if h.Cloud == cloud && h.Private {
			return addrs(p.Hosts[h.Name].Private)
		}
	}
	return nil
}
