// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// vxlanState is that of one of two nodes, n and 3-n, with pods in both families
// behind addresses of IPv4.
func vxlanState(n byte) mesh.State {
	local := netip.AddrFrom4([4]byte{192, 168, 1, n})
	remote := netip.AddrFrom4([4]byte{192, 168, 1, 3 - n})
	mac, other := mesh.MAC{2, 0, 0, 0, 0, n}, mesh.MAC{2, 0, 0, 0, 0, 3 - n}
	hop6 := netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: 3 - n})
	pods4 := func(n byte) netip.Prefix { return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 2, n, 0}), 24) }
	pods6 := func(n byte) netip.Prefix { return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: n}), 64) }
	const dev = "kilo-vxlan"
	return mesh.State{
		Links: []mesh.Link{{Name: dev, Kind: mesh.KindVXLAN, MTU: 1450, Up: true, Local: local, MAC: mac}},
		Addrs: []mesh.Addr{{Dev: dev, Prefix: netip.PrefixFrom(pods4(n).Addr(), 32)}, {Dev: dev, Prefix: netip.PrefixFrom(pods6(n).Addr(), 128)}},
		Routes: []mesh.Route{
			{Dst: pods4(3 - n), Via: remote, Dev: dev, Table: mesh.TableMain, OnLink: true},
			{Dst: pods6(3 - n), Via: hop6, Dev: dev, Table: mesh.TableMain},
		},
		Neighs: []mesh.Neigh{{Dev: dev, IP: remote, MAC: other, Remote: remote}, {Dev: dev, IP: hop6, MAC: other, Remote: remote}},
		Firewall: mesh.Firewall{
			TunnelPort: mesh.VXLANPort,
			TunnelFrom: []netip.Prefix{netip.PrefixFrom(local, 32), netip.PrefixFrom(remote, 32)},
		},
	}
}

// echoed reports whether a datagram from the current namespace comes back from to.
func echoed(t *testing.T, to string) bool {
	t.Helper()
	c := nettest.Must(net.Dial("udp", to))(t)
	defer c.Close()
	for range 20 {
		nettest.NoErr(t, c.SetDeadline(time.Now().Add(100*time.Millisecond)))
		if _, err := c.Write([]byte("x")); err != nil {
			continue
		}
		if _, err := c.Read(make([]byte, 1)); err == nil {
			return true
		}
	}
	return false
}

// echo answers datagrams in the current namespace until the test ends.
func echo(t *testing.T, at string) {
	t.Helper()
	c := nettest.Must(net.ListenPacket("udp", at))(t)
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 1)
		for {
			_, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(b, from)
		}
	}()
}

func TestVXLANCarriesBothFamilies(t *testing.T) {
	one, two := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, one, "eth0", "192.168.1.1/24", two, "eth0", "192.168.1.2/24")
	two.Do(t, func() {
		mustApply(t, newHost(t), vxlanState(2))
		echo(t, "10.2.2.0:7")
		echo(t, "[fd00:2::]:7")
	})
	one.Do(t, func() {
		before := nettest.World(t)
		h := newHost(t)
		s := vxlanState(1)
		mustApply(t, h, s)
		mustBeQuiet(t, h, s)
		mustBeQuiet(t, newHost(t), s)
		for _, to := range []string{"10.2.2.0:7", "[fd00:2::]:7"} {
			if !echoed(t, to) {
				t.Errorf("no answer from %s:\n%s", to, nettest.World(t))
			}
		}
		nettest.NoErr(t, h.CleanUp(t.Context(), true))
		if after := nettest.World(t); after != before {
			t.Errorf("clean-up left something:\n%s\nwant\n%s", after, before)
		}
	})
}

func TestVXLANLetsMembersInOnly(t *testing.T) {
	one, two := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, one, "eth0", "192.168.1.1/24", two, "eth0", "192.168.1.2/24")
	two.Do(t, func() {
		s := vxlanState(2)
		s.Firewall.TunnelFrom = s.Firewall.TunnelFrom[:1]
		mustApply(t, newHost(t), s)
		echo(t, "10.2.2.0:7")
	})
	one.Do(t, func() {
		mustApply(t, newHost(t), vxlanState(1))
		if echoed(t, "10.2.2.0:7") {
			t.Error("an answer through the tunnel from one that is no member")
		}
	})
}

func TestVXLANNextHopsAndLinkFollowTheState(t *testing.T) {
	nettest.New(t)
	nettest.Dummy(t, "eth0", "192.168.1.1/24", "192.168.1.3/24")
	h := newHost(t)
	s := vxlanState(1)
	mustApply(t, h, s)
	s.Neighs[0].MAC, s.Neighs[1].MAC = mesh.MAC{2, 0, 0, 0, 0, 9}, mesh.MAC{2, 0, 0, 0, 0, 9}
	s.Neighs[0].Remote, s.Neighs[1].Remote = ip("192.168.1.9"), ip("192.168.1.9")
	mustApply(t, h, s)
	mustBeQuiet(t, h, s)
	s.Neighs = s.Neighs[:1]
	if changes := mustApply(t, h, s); len(changes) != 1 || changes[0].Op != OpDelete || changes[0].Kind != KindNeigh {
		t.Errorf("changes %v, want one next hop deleted", changes)
	}
	mustBeQuiet(t, h, s)
	s.Links[0].Local, s.Links[0].MAC = ip("192.168.1.3"), mesh.MAC{2, 0, 0, 0, 0, 3}
	changes := mustApply(t, h, s)
	if len(changes) < 2 || changes[0].Op != OpDelete || changes[0].Kind != KindLink || changes[1].Op != OpAdd || changes[1].Kind != KindLink {
		t.Errorf("changes %v, want the link made anew", changes)
	}
	mustBeQuiet(t, h, s)
}
