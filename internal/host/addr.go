// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// ownAddr is an address that the kernel has on one of our links.
type ownAddr struct {
	mesh.Addr
	raw netlink.Addr
}

// observeAddrs reads the addresses of our links, without link-local ones of IPv6:
// the kernel gives and takes those.
func (p *pass) observeAddrs() ([]ownAddr, error) {
	addrs, err := dump(func() ([]netlink.Addr, error) { return p.h.nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, err
	}
	var own []ownAddr
	for _, a := range addrs {
		name := p.names[a.LinkIndex]
		l, ok := p.links[name]
		if !ok || !p.isOwn(l) {
			continue
		}
		prefix, ok := netipx.FromStdIPNet(a.IPNet)
		if !ok || prefix.Addr().Is6() && prefix.Addr().IsLinkLocalUnicast() {
			continue
		}
		own = append(own, ownAddr{mesh.Addr{Dev: name, Prefix: prefix}, a})
	}
	return own, nil
}

// addAddrs adds the addresses that are missing on our links.
func (p *pass) addAddrs() {
	if len(p.want.Addrs) == 0 {
		return
	}
	own, err := p.observeAddrs()
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("ip addr list: %w", err))
		return
	}
	have := make(map[mesh.Addr]bool, len(own))
	for _, a := range own {
		have[a.Addr] = true
	}
	for _, a := range p.want.Addrs {
		if have[a] {
			continue
		}
		l, ok := p.link(a.Dev)
		if !ok {
			continue
		}
		p.write(Change{OpAdd, KindAddr, addrText(a)}, func() error {
			raw := &netlink.Addr{IPNet: ipNet(a.Prefix)}
			if a.Prefix.Addr().Is6() {
				// Our links are point-to-point and the address is ours alone: no wait for duplicates.
				raw.Flags = unix.IFA_F_NODAD
			}
			return gone(p.h.nl.AddrAdd(l, raw), unix.EEXIST)
		})
	}
}

// deleteAddrs deletes the addresses of our links that are not desired, and
// reports whether it deleted one.
func (p *pass) deleteAddrs() bool {
	own, err := p.observeAddrs()
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("ip addr list: %w", err))
		return false
	}
	want := make(map[mesh.Addr]bool, len(p.want.Addrs))
	for _, a := range p.want.Addrs {
		want[a] = true
	}
	deleted := false
	for _, a := range own {
		if want[a.Addr] {
			continue
		}
		p.promoteSecondaries(a.Addr)
		l := p.links[a.Dev]
		if p.write(Change{OpDelete, KindAddr, addrText(a.Addr)}, func() error {
			return gone(p.h.nl.AddrDel(l, &a.raw), unix.EADDRNOTAVAIL)
		}) {
			deleted = true
		}
	}
	if deleted {
		p.addAddrs() // in case the kernel took a secondary along
	}
	return deleted
}

// promoteSecondaries makes the kernel keep the other IPv4 addresses of a
// subnet when it loses the first of them, if the State has such another one.
func (p *pass) promoteSecondaries(a mesh.Addr) {
	for _, w := range p.want.Addrs {
		if a.Prefix.Addr().Is4() && w.Dev == a.Dev && w.Prefix.Masked() == a.Prefix.Masked() {
			p.sysctl("net/ipv4/conf/"+a.Dev+"/promote_secondaries", "1")
			return
		}
	}
}

func addrText(a mesh.Addr) string { return strings.TrimPrefix(a.String(), "addr ") }

func ipNet(p netip.Prefix) *net.IPNet { return netipx.PrefixIPNet(p) } //nolint:forbidigo // what netlink takes

// sysctl sets a value below /proc/sys if it differs, and sees that it took.
func (p *pass) sysctl(key, value string) {
	path := "/proc/sys/" + key
	c := Change{OpReplace, KindSysctl, strings.ReplaceAll(key, "/", ".") + "=" + value}
	old, err := os.ReadFile(path)
	if err != nil {
		p.fail(c, err)
		return
	}
	if strings.TrimSpace(string(old)) == value {
		return
	}
	p.write(c, func() error {
		if err := p.h.noteSysctl(key, strings.TrimSpace(string(old)), value); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		now, err := os.ReadFile(path)
		if got := strings.TrimSpace(string(now)); err == nil && got != value {
			return fmt.Errorf("reads %q after it was set", got)
		}
		return err
	})
}

// sysctls switches forwarding on where the State asks for it, and strict filters
// of reverse paths off for our links. It never does the contrary: we cannot know
// who else needs it so.
func (p *pass) sysctls() {
	if p.want.Forward4 {
		p.sysctl("net/ipv4/ip_forward", "1")
	}
	if p.want.Forward6 {
		p.forward6()
	}
	for _, w := range p.want.Links {
		if _, ok := p.links[w.Name]; ok {
			p.reversePath(w.Name)
		}
	}
}

// reversePath sees that the kernel does not drop what comes in through a link of
// ours and would be answered through another one: that is so where one of two nodes
// encapsulates and the other does not, and while leaders change. WireGuard, and
// the firewall for tunnels, know better who may send what. Of the link's value
// and that for all links the greater counts: 0 is off, 1 strict, 2 loose
// (rp_filter in the kernel's ip-sysctl.rst).
func (p *pass) reversePath(dev string) {
	const strict, loose = "1", "2"
	effective := ""
	for _, name := range []string{"all", dev} {
		value, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + name + "/rp_filter")
		if err != nil {
			p.errs = append(p.errs, err)
			return
		}
		effective = max(effective, strings.TrimSpace(string(value)))
	}
	if effective == strict {
		p.sysctl("net/ipv4/conf/"+dev+"/rp_filter", loose)
	}
}

func (p *pass) forward6() {
	const all = "net/ipv6/conf/all/forwarding"
	old, err := os.ReadFile("/proc/sys/" + all)
	if err == nil && strings.TrimSpace(string(old)) == "1" {
		return
	}
	// A router ignores router advertisements, unless accept_ra is 2 (the
	// kernel's ip-sysctl.rst): a host that lives by them would lose its routes.
	for _, name := range sortedKeys(p.links, strings.Compare) {
		l := p.links[name]
		if a := l.Attrs(); a.Flags&net.FlagLoopback != 0 || a.MasterIndex != 0 || p.isOwn(l) || name == p.h.cfg.CNIBridge {
			continue
		}
		key := "net/ipv6/conf/" + name + "/accept_ra"
		ra, err := os.ReadFile("/proc/sys/" + key)
		if errors.Is(err, os.ErrNotExist) {
			continue // IPv6 is off on this link
		}
		if err != nil || strings.TrimSpace(string(ra)) == "1" {
			p.sysctl(key, "2")
		}
	}
	p.sysctl(all, "1")
}
