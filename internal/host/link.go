// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// observeLinks reads all links of the host.
func (p *pass) observeLinks() error {
	links, err := dump(p.h.nl.LinkList)
	if err != nil {
		return err
	}
	p.links, p.names = make(map[string]netlink.Link, len(links)), make(map[int]string, len(links))
	for _, l := range links {
		p.keep(l)
	}
	return nil
}

func (p *pass) keep(l netlink.Link) {
	p.links[l.Attrs().Name] = l
	p.names[l.Attrs().Index] = l.Attrs().Name
}

// isOwn reports whether the link is Kilo's, desired or not.
func (p *pass) isOwn(l netlink.Link) bool {
	a := l.Attrs()
	return p.wanted(a.Name) != nil || a.Name == p.h.cfg.WireGuardDev || markOf(l) != ""
}

// wanted returns the desired link of that name, nil without one.
func (p *pass) wanted(name string) *mesh.Link {
	for i := range p.want.Links {
		if p.want.Links[i].Name == name {
			return &p.want.Links[i]
		}
	}
	return nil
}

// makeLinks makes the links that are missing, down, and brings the MTU of all to the desired one.
func (p *pass) makeLinks() {
	for _, w := range p.want.Links {
		l, ok := p.links[w.Name]
		if !ok {
			l, ok = p.rename(w)
		}
		if ok && p.outdated(l, w) {
			ok = false
		}
		if !ok {
			if l, ok = p.makeLink(w); !ok {
				p.reported(w.Name)
				continue
			}
		}
		if err := usable(l, w); err != nil {
			p.errs = append(p.errs, err)
			p.reported(w.Name)
			delete(p.links, w.Name)
			continue
		}
		if w.Kind != mesh.KindWireGuard && l.Attrs().Group != linkGroup && l.Attrs().Alias == "" {
			// It was there before us; without the mark nobody would know later that we use it.
			p.write(linkSet(w.Name, "alias", aliasAdopted), func() error { return p.h.nl.LinkSetAlias(l, aliasAdopted) })
		}
		if w.MTU != 0 && l.Attrs().MTU != w.MTU {
			p.write(linkSet(w.Name, "mtu", fmt.Sprint(w.MTU)), func() error { return p.h.nl.LinkSetMTU(l, w.MTU) })
		}
	}
}

// readLink reads a link that was just made or changed.
func (p *pass) readLink(name string) (netlink.Link, bool) {
	l, err := p.h.nl.LinkByName(name)
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("ip link show %s: %w", name, err))
		return nil, false
	}
	p.keep(l)
	return l, true
}

// outdated deletes a vxlan link of ours that has another address on the
// underlay, MAC or network than it should: these cannot be changed.
func (p *pass) outdated(l netlink.Link, w mesh.Link) bool {
	v, ok := l.(*netlink.Vxlan)
	if !ok || w.Kind != mesh.KindVXLAN || markOf(v) != markOwned {
		return false
	}
	if addrOf(v.SrcAddr) == w.Local && v.VxlanId == mesh.VXLANID && v.Port == mesh.VXLANPort && !v.Learning && string(v.HardwareAddr) == string(w.MAC[:]) {
		return false
	}
	return p.write(Change{OpDelete, KindLink, w.Name}, func() error { return gone(p.h.nl.LinkDel(l), unix.ENODEV) })
}

// reported says that the link cannot be used and an error tells so.
func (p *pass) reported(name string) {
	if p.missing == nil {
		p.missing = map[string]bool{}
	}
	p.missing[name] = true
}

func linkSet(name string, words ...string) Change {
	return Change{OpReplace, KindLink, name + " " + strings.Join(words, " ")}
}

// usable says why an existing link cannot be what is desired.
func usable(l netlink.Link, w mesh.Link) error {
	// WireGuard may be the kernel's or a TUN; the device says whether it answers.
	if w.Kind == mesh.KindWireGuard || l.Type() == string(w.Kind) && (w.Kind != mesh.KindIP6Tnl || isExternal(l)) {
		return nil
	}
	want := string(w.Kind)
	if w.Kind == mesh.KindIP6Tnl {
		want += " external"
	}
	return fmt.Errorf("ip link show %s: the link is of type %s, want %s: delete or rename it, or choose another name for the tunnel link", w.Name, l.Type(), want)
}

// isExternal reports whether the routes over the link say where tunnel packets
// go (ip-link(8), external), and not the link or the gateway.
func isExternal(l netlink.Link) bool {
	t, ok := l.(*netlink.Ip6tnl)
	return ok && t.FlowBased
}

// makeLink adds a link and reads it back.
func (p *pass) makeLink(w mesh.Link) (netlink.Link, bool) {
	c := Change{OpAdd, KindLink, fmt.Sprintf("%s type %s mtu %d", w.Name, w.Kind, w.MTU)}
	if err := p.h.mayMake(w); err != nil {
		p.fail(c, err)
		return nil, false
	}
	spec, err := linkSpec(w)
	if err != nil {
		p.fail(c, err)
		return nil, false
	}
	made := p.write(c, func() error { return p.h.addLink(w, spec) })
	if !made {
		return nil, false
	}
	return p.readLink(w.Name)
}

// addLink adds a link with our mark.
func (h *Host) addLink(w mesh.Link, spec netlink.Link) error {
	err := h.nl.LinkAdd(spec)
	if errors.Is(err, unix.EEXIST) {
		if _, errNone := h.nl.LinkByName(w.Name); errNone != nil {
			return fmt.Errorf("another link does the same already, see `ip -d link show type %s`; name the tunnel link like it: %w", w.Kind, err)
		}
		// Loading the module ipip made tunl0, or a userspace WireGuard came up.
		return nil
	}
	return explainLink(w.Kind, err)
}

// mayMake says why a missing link must not be made.
func (h *Host) mayMake(w mesh.Link) error {
	switch {
	case w.Kind != mesh.KindWireGuard:
		return nil
	case h.cfg.WireGuardMode == WireGuardUserspace:
		return fmt.Errorf("%w, and WireGuard mode is userspace: start `kg userspace-wireguard` for it", errNoLink)
	case !h.cfg.CreateWireGuard:
		return fmt.Errorf("%w, and creating it is switched off: make it, or allow to create it", errNoLink)
	default:
		return nil
	}
}

// linkSpec is the link that ip-link(8) would make of w.
func linkSpec(w mesh.Link) (netlink.Link, error) {
	a := netlink.NewLinkAttrs()
	a.Name, a.MTU, a.Group = w.Name, w.MTU, linkGroup
	switch w.Kind {
	case mesh.KindWireGuard:
		return &netlink.Wireguard{LinkAttrs: a}, nil
	case mesh.KindIPIP:
		// ip tunnel add NAME mode ipip: any local, any remote, path MTU discovery.
		return &netlink.Iptun{LinkAttrs: a, Local: net.IPv4zero, Remote: net.IPv4zero, PMtuDisc: 1, Proto: unix.IPPROTO_IPIP}, nil
	case mesh.KindIP6Tnl:
		// ip link add NAME type ip6tnl external. One without would clash with ip6tnl0, which
		// the module makes; and IPv6 refuses a gateway on the tunnel link that another
		// link leads to (net/ipv6/route.c, ip6_route_check_nh_onlink).
		return &netlink.Ip6tnl{LinkAttrs: a, FlowBased: true}, nil
	case mesh.KindVXLAN:
		a.HardwareAddr = w.MAC[:]
		return &netlink.Vxlan{LinkAttrs: a, VxlanId: mesh.VXLANID, SrcAddr: w.Local.AsSlice(), Port: mesh.VXLANPort}, nil
	default:
		return nil, fmt.Errorf("link kind %q: want one of %s, %s, %s, %s", w.Kind, mesh.KindWireGuard, mesh.KindIPIP, mesh.KindIP6Tnl, mesh.KindVXLAN)
	}
}

// explainLink adds what a person can do about a kernel that lacks the kind.
func explainLink(kind mesh.LinkKind, err error) error {
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOTSUP) {
		return err
	}
	switch kind {
	case mesh.KindWireGuard:
		return fmt.Errorf("this kernel has no WireGuard: load the module wireguard, or run `kg userspace-wireguard` on this node: %w", err)
	case mesh.KindIPIP:
		return fmt.Errorf("this kernel has no IPIP tunnels: load the module ipip, or switch encapsulation off: %w", err)
	case mesh.KindIP6Tnl:
		return fmt.Errorf("this kernel has no tunnels over IPv6: load the module ip6_tunnel, or switch encapsulation off: %w", err)
	case mesh.KindVXLAN:
		return fmt.Errorf("this kernel has no VXLAN: load the module vxlan, or switch encapsulation off: %w", err)
	default:
		return err
	}
}

// setLinksUp brings links up that should be.
func (p *pass) setLinksUp() {
	for _, w := range p.want.Links {
		l, ok := p.link(w.Name)
		if !ok || !w.Up || isUp(l) {
			continue
		}
		p.base = nil
		p.write(linkSet(w.Name, "up"), func() error {
			err := p.h.nl.LinkSetUp(l)
			if w.Kind == mesh.KindWireGuard && errors.Is(err, unix.EADDRINUSE) {
				return explainPort(p.want.Device.ListenPort, err)
			}
			return err
		})
	}
}

// setDown takes a link down and reports whether that succeeded.
func (p *pass) setDown(l netlink.Link) bool {
	return p.write(linkSet(l.Attrs().Name, "down"), func() error {
		if err := p.h.nl.LinkSetDown(l); err != nil {
			return err
		}
		l.Attrs().Flags &^= net.FlagUp
		return nil
	})
}

// setLinksDown takes links down that should be, and reports whether it did.
func (p *pass) setLinksDown() bool {
	did := false
	for _, name := range sortedKeys(p.links, strings.Compare) {
		l := p.links[name]
		w := p.wanted(name)
		if !p.isOwn(l) || w != nil && w.Up || !isUp(l) {
			continue
		}
		if p.setDown(l) {
			did = true
		}
	}
	return did
}

// deleteLinks deletes the links that we made and that are not desired, and
// takes our mark off those that we only used. The configured WireGuard link
// stays unless the pass is to delete it.
func (p *pass) deleteLinks() {
	for _, name := range sortedKeys(p.links, strings.Compare) {
		l := p.links[name]
		if p.wanted(name) != nil {
			continue
		}
		switch {
		case l.Attrs().Alias == aliasAdopted:
			p.write(linkSet(name, "alias", `""`), func() error { return p.h.nl.LinkSetAlias(l, "") })
		case l.Attrs().Group == linkGroup:
			if name == p.h.cfg.WireGuardDev && !p.deleteLink {
				continue
			}
			p.write(Change{OpDelete, KindLink, name}, func() error { return gone(p.h.nl.LinkDel(l), unix.ENODEV) })
		}
	}
}

func isUp(l netlink.Link) bool { return l.Attrs().Flags&net.FlagUp != 0 }

// gone turns the errors that say "there is none" into success.
func gone(err error, none ...unix.Errno) error {
	for _, e := range none {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
