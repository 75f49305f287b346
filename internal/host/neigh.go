// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// A mesh.Neigh is two entries in the kernel: one that gives the next hop its
// MAC (ip-neighbour(8)), and one that says where frames to that MAC go
// (bridge-fdb(8)). Several next hops may share the second.

// neighKey is one of the two entries as a comparable value.
type neighKey struct {
	family int // AF_INET or AF_INET6, AF_BRIDGE for where frames go
	ip     netip.Addr
	mac    mesh.MAC
}

func (k neighKey) compare(o neighKey) int { return strings.Compare(k.text(""), o.text("")) }

// text is what the entry's program would be told.
func (k neighKey) text(dev string) string {
	if k.family == unix.AF_BRIDGE {
		return fmt.Sprintf("fdb %s dev %s dst %s", k.mac, dev, k.ip)
	}
	return fmt.Sprintf("%s lladdr %s dev %s", k.ip, k.mac, dev)
}

// neighs brings the entries of the vxlan link to the desired ones, of one that was
// there to none if it is not desired any more: what is to
// go goes last, so that no known next hop is ever missing.
func (p *pass) neighs() {
	for _, name := range sortedKeys(p.links, strings.Compare) {
		l := p.links[name]
		if l.Type() != string(mesh.KindVXLAN) || p.wanted(name) == nil && markOf(l) != aliasAdopted {
			continue
		}
		have, err := p.observeNeighs(l.Attrs().Index)
		if err != nil {
			p.errs = append(p.errs, fmt.Errorf("ip neigh list dev %s: %w", name, err))
			continue
		}
		want, hops := map[neighKey]bool{}, map[netip.Addr]bool{}
		for _, n := range p.want.Neighs {
			if n.Dev == name {
				want[neighKey{familyOf(n.IP), n.IP, n.MAC}] = true
				want[neighKey{unix.AF_BRIDGE, n.Remote, n.MAC}] = true
				hops[n.IP] = true
			}
		}
		for _, k := range sortedKeys(want, neighKey.compare) {
			if !have[k] {
				p.write(Change{OpAdd, KindNeigh, k.text(name)}, func() error { return p.h.nl.NeighSet(rawNeigh(k, l.Attrs().Index)) })
			}
		}
		for _, k := range sortedKeys(have, neighKey.compare) {
			// A next hop that got another MAC was replaced, and is known by its address alone.
			if !want[k] && (k.family == unix.AF_BRIDGE || !hops[k.ip]) {
				p.write(Change{OpDelete, KindNeigh, k.text(name)}, func() error {
					return gone(p.h.nl.NeighDel(rawNeigh(k, l.Attrs().Index)), unix.ENOENT)
				})
			}
		}
	}
}

// observeNeighs reads the entries that somebody made; those that the kernel
// learned by itself come and go.
func (p *pass) observeNeighs(index int) (map[neighKey]bool, error) {
	have := map[neighKey]bool{}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6, unix.AF_BRIDGE} {
		neighs, err := dump(func() ([]netlink.Neigh, error) { return p.h.nl.NeighList(index, family) })
		if err != nil && !noFamily(err) {
			return nil, err
		}
		for _, n := range neighs {
			ip := addrOf(n.IP)
			if n.State&unix.NUD_PERMANENT == 0 || len(n.HardwareAddr) != 6 || !ip.IsValid() || ip.IsMulticast() {
				continue
			}
			have[neighKey{family, ip, mesh.MAC(n.HardwareAddr)}] = true
		}
	}
	return have, nil
}

func rawNeigh(k neighKey, index int) *netlink.Neigh {
	n := &netlink.Neigh{LinkIndex: index, Family: k.family, State: unix.NUD_PERMANENT, IP: k.ip.AsSlice(), HardwareAddr: k.mac[:]}
	if k.family == unix.AF_BRIDGE {
		n.Flags = unix.NTF_SELF
		n.State |= unix.NUD_NOARP
	}
	return n
}
