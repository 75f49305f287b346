// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
	"github.com/kilomesh/kilo/internal/userwg"
)

// These tests are about flags that change: what the old ones left goes.

// moved returns s with all that is on one link on another.
func moved(s mesh.State, from, to string) mesh.State {
	s.Links, s.Addrs, s.Routes = slices.Clone(s.Links), slices.Clone(s.Addrs), slices.Clone(s.Routes)
	s.Rules, s.Neighs = slices.Clone(s.Rules), slices.Clone(s.Neighs)
	to1 := func(dev *string) {
		if *dev == from {
			*dev = to
		}
	}
	for i := range s.Links {
		to1(&s.Links[i].Name)
	}
	for i := range s.Addrs {
		to1(&s.Addrs[i].Dev)
	}
	for i := range s.Routes {
		to1(&s.Routes[i].Dev)
	}
	for i := range s.Rules {
		to1(&s.Rules[i].IIf)
	}
	for i := range s.Neighs {
		to1(&s.Neighs[i].Dev)
	}
	return sorted(s)
}

func linkByName(t *testing.T, name string) netlink.Link {
	t.Helper()
	return nettest.Must(netlink.LinkByName(name))(t)
}

func TestALinkOfOursWithAnotherNameIsRenamedWithAllThatItHas(t *testing.T) {
	nettest.New(t)
	uplink(t)
	old := vxlanState(1)
	mustApply(t, newHost(t), old)
	index := linkByName(t, "kilo-vxlan").Attrs().Index
	want := moved(old, "kilo-vxlan", "new-vxlan")
	h := newHost(t)
	// Before Linux 6.2 the link goes down for it, and loses what is of IPv6.
	if got := texts(mustApply(t, h, want)); got[0] != "ip link set kilo-vxlan name new-vxlan" || len(got) > 1 && !linuxBefore(t, 6, 2) {
		t.Errorf("changes %q, want the link renamed and nothing else", got)
	}
	if linkByName(t, "new-vxlan").Attrs().Index != index {
		t.Error("the link is another one")
	}
	mustBeQuiet(t, h, want)
}

// linuxBefore reports whether the kernel is older than a release.
func linuxBefore(t *testing.T, major, minor int) bool {
	t.Helper()
	var u unix.Utsname
	must(t, unix.Uname(&u))
	var ma, mi int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &ma, &mi); err != nil {
		t.Fatal(err)
	}
	return ma < major || ma == major && mi < minor
}

// startWireGuardAs serves a link of that name.
func startWireGuardAs(t *testing.T, name string) {
	t.Helper()
	nettest.Start(t, "userwg", name)
	nettest.Await(t, "control socket of "+name, func() bool {
		c, err := net.Dial("unix", "/var/run/wireguard/"+name+".sock")
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
}

func TestAnotherInterfaceNameEmptiesTheOldUserspaceLink(t *testing.T) {
	if aliasUserspace != userwg.Alias {
		t.Fatalf("alias %q, want %q", aliasUserspace, userwg.Alias)
	}
	nettest.New(t)
	uplink(t)
	startWireGuard(t)
	mustApply(t, newHost(t), fullState())
	startWireGuardAs(t, "kilo1")
	want := moved(fullState(), "kilo0", "kilo1")
	h := newHost(t, func(c *Config) { c.WireGuardDev = "kilo1" })
	f := nettest.Must(h.Facts(t.Context()))(t)
	if slices.ContainsFunc(f.Addrs, func(a mesh.LinkAddr) bool { return a.Dev == "kilo0" }) {
		t.Errorf("the old link's addresses are taken for the host's: %v", f.Addrs)
	}
	mustApply(t, h, want)
	checkState(t, h, want)
	mustBeQuiet(t, h, want)
	d := nettest.Must(h.wgDevice("kilo0"))(t)
	if len(d.Peers) > 0 || !observedDevice(d).privateKey.IsZero() || d.ListenPort == 51820 {
		t.Errorf("the old device has %d peers, key %s, port %d", len(d.Peers), d.PublicKey, d.ListenPort)
	}
	for _, l := range lines(nettest.World(t), "kilo0") {
		if !strings.HasPrefix(l, "link kilo0 ") || !strings.Contains(l, "up false") {
			t.Errorf("left of kilo0: %s", l)
		}
	}
}

func TestChangedFlagsLeaveNothingOfTheOldOnes(t *testing.T) {
	old := fullState()
	for _, c := range []struct {
		name   string
		change func(s *mesh.State)
		gone   string // must be in no line of the world afterwards
	}{
		{"subnet", func(s *mesh.State) {
			other := func(a *netip.Addr) {
				if a.IsValid() && a.Is4() && pfx("10.4.0.0/16").Contains(*a) {
					b := a.As4()
					b[1] = 44
					*a = netip.AddrFrom4(b)
				}
			}
			for i := range s.Addrs {
				a := s.Addrs[i].Prefix.Addr()
				other(&a)
				s.Addrs[i].Prefix = netip.PrefixFrom(a, s.Addrs[i].Prefix.Bits())
			}
			for i := range s.Routes {
				other(&s.Routes[i].Via)
			}
		}, "10.4.0."},
		{"port", func(s *mesh.State) { s.Device.ListenPort = 51999 }, "51820"},
		{"granularity or location, so that the node leads no more", func(s *mesh.State) {
			s.Links, s.Addrs, s.Device = nil, nil, mesh.Device{}
			s.Routes = slices.DeleteFunc(s.Routes, func(r mesh.Route) bool { return r.Dev == "kilo0" })
		}, "dev kilo0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			nettest.New(t)
			uplink(t)
			startWireGuard(t)
			mustApply(t, newHost(t), old)
			want := old
			want.Addrs, want.Routes = slices.Clone(old.Addrs), slices.Clone(old.Routes)
			c.change(&want)
			h := newHost(t)
			mustApply(t, h, sorted(want))
			checkState(t, h, want)
			if left := lines(nettest.World(t), c.gone); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			mustBeQuiet(t, newHost(t), want)
		})
	}
}

func TestAnotherTunnelKindDeletesTheOldLink(t *testing.T) {
	nettest.New(t)
	uplink(t)
	before := nettest.World(t)
	mustApply(t, newHost(t), vxlanState(1))
	must(t, newHost(t).CleanUp(t.Context(), false))
	if after := nettest.World(t); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	// One that was there is only emptied.
	v := vxlanState(1)
	l := nettest.Must(linkSpec(v.Links[0]))(t)
	l.Attrs().Group = 0
	must(t, netlink.LinkAdd(l))
	before = nettest.World(t)
	mustApply(t, newHost(t), v)
	if linkByName(t, "kilo-vxlan").Attrs().Alias != aliasAdopted {
		t.Error("the link is not marked as one that was there")
	}
	must(t, newHost(t).CleanUp(t.Context(), false))
	if after := nettest.World(t); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}
