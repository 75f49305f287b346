// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/kilomesh/kilo/internal/mesh"
)

// markOwned stands for linkGroup beside the aliases.
const markOwned = "owned"

// markOf returns what the link is to us: markOwned, aliasAdopted, aliasUserspace or, if nothing, "".
func markOf(l netlink.Link) string {
	switch a := l.Attrs(); {
	case a.Group == linkGroup:
		return markOwned
	case a.Alias == aliasAdopted, a.Alias == aliasUserspace:
		return a.Alias
	default:
		return ""
	}
}

// rename takes a link of ours that had the desired one's work under another
// name, with its addresses, routes and peers: no packet is lost.
func (p *pass) rename(w mesh.Link) (netlink.Link, bool) {
	if p.h.mayMake(w) != nil {
		return nil, false
	}
	for _, name := range sortedKeys(p.links, strings.Compare) {
		l := p.links[name]
		if p.wanted(name) != nil || markOf(l) != markOwned || l.Type() != string(w.Kind) {
			continue
		}
		if !p.write(linkSet(name, "name", w.Name), func() error { return p.h.renameLink(l, w.Name) }) {
			return nil, false
		}
		delete(p.links, name)
		return p.readLink(w.Name)
	}
	return nil, false
}

func (h *Host) renameLink(l netlink.Link, name string) error {
	err := h.nl.LinkSetName(l, name)
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	// Before Linux 6.2 a link that is up keeps its name.
	if err := h.nl.LinkSetDown(l); err != nil {
		return err
	}
	return h.nl.LinkSetName(l, name)
}

// emptyOthers makes room for the WireGuard device: one of ours with another
// name, which was not renamed, may have its port. In user space it keeps that
// when its link is down.
func (p *pass) emptyOthers() {
	for _, name := range sortedKeys(p.links, strings.Compare) {
		l := p.links[name]
		isWireGuard := markOf(l) == aliasUserspace || markOf(l) == markOwned && l.Type() == string(mesh.KindWireGuard)
		if !isWireGuard || p.wanted(name) != nil || name == p.h.cfg.WireGuardDev || !isUp(l) {
			continue
		}
		emptied := p.write(Change{OpReplace, KindDevice, name + " listen-port 0, without key and peers"}, func() error {
			err := p.h.wg.ConfigureDevice(name, wgtypes.Config{PrivateKey: &wgtypes.Key{}, ListenPort: new(int), ReplacePeers: true})
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
				return nil // nothing serves it any more
			}
			return err
		})
		if emptied { // a link that is down counts as emptied
			p.setDown(l)
		}
	}
}
