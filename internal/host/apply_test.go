// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// families cuts a State down to one address family.
func ofFamilyOnly(s mesh.State, v6 bool) mesh.State {
	keep := func(p netip.Prefix) bool { return p.Addr().Is6() != v6 }
	s.Addrs = slices.DeleteFunc(slices.Clone(s.Addrs), func(a mesh.Addr) bool { return keep(a.Prefix) })
	s.Routes = slices.DeleteFunc(slices.Clone(s.Routes), func(r mesh.Route) bool { return keep(r.Dst) })
	s.Rules = slices.DeleteFunc(slices.Clone(s.Rules), func(r mesh.Rule) bool { return keep(r.To) })
	for i := range s.Device.Peers {
		peer := &s.Device.Peers[i]
		peer.AllowedIPs = slices.DeleteFunc(slices.Clone(peer.AllowedIPs), keep)
	}
	s.Forward4, s.Forward6 = !v6, v6
	return s
}

func TestApplySingleFamilies(t *testing.T) { eachDevice(t, testApplySingleFamilies) }

func testApplySingleFamilies(t *testing.T, makeDevice func(*testing.T)) {
	for name, v6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) {
			nettest.New(t)
			uplink(t)
			makeDevice(t)
			h := newHost(t)
			s := ofFamilyOnly(fullState(), v6)
			mustApply(t, h, s)
			checkState(t, h, s)
			mustBeQuiet(t, h, s)
			// From there to both families and back.
			mustApply(t, h, fullState())
			checkState(t, h, fullState())
			mustApply(t, h, s)
			checkState(t, h, s)
			mustBeQuiet(t, h, s)
		})
	}
}

func TestApplyShrinks(t *testing.T) { eachDevice(t, testApplyShrinks) }

func testApplyShrinks(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	mustApply(t, newHost(t), fullState())

	s := fullState()
	s.Routes, s.Rules, s.Addrs = s.Routes[:2], s.Rules[:1], s.Addrs[:1]
	s.Device.Peers = slices.DeleteFunc(s.Device.Peers, func(p mesh.DevicePeer) bool { return p.Key == public(3) })
	stays := s.Device.Peer(public(2))
	stays.AllowedIPs = slices.DeleteFunc(stays.AllowedIPs, func(p netip.Prefix) bool { return p == pfx("10.4.0.2/32") })
	give(s.Device, pfx("fd00:5::1/128"), public(2)) // moves to the peer that stays
	h := newHost(t)
	mustApply(t, h, s)
	checkState(t, h, s)
	mustBeQuiet(t, h, s)
}

func TestCleanUpLeavesTheNamespaceAsFound(t *testing.T) {
	eachDevice(t, testCleanUpLeavesTheNamespaceAsFound)
}

func testCleanUpLeavesTheNamespaceAsFound(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	addForeign(t)
	makeDevice(t)
	before := nettest.World(t)
	for _, deleteLink := range []bool{false, true} {
		mustApply(t, newHost(t), fullStateOfMTU(1420))
		h := newHost(t) // what is ours must be found, not remembered
		must(t, h.CleanUp(t.Context(), deleteLink))
		if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(nettest.World(t), "\n")); diff != "" {
			t.Errorf("delete link %t: (-before +after):\n%s", deleteLink, diff)
		}
		d := nettest.Must(h.wgDevice("kilo0"))(t)
		if len(d.Peers) != 0 || !observedDevice(d).privateKey.IsZero() {
			t.Errorf("device has %d peers and key %s, want none", len(d.Peers), d.PublicKey)
		}
		mustBeQuiet(t, h, mesh.State{})
	}
}

func fullStateOfMTU(mtu int) mesh.State {
	s := fullState()
	s.Links[0].MTU = mtu
	return s
}

func TestCleanUpOfNothingWritesNothing(t *testing.T) {
	nettest.New(t)
	h := newHost(t)
	must(t, h.CleanUp(t.Context(), true))
	if h.Writes() != 0 {
		t.Errorf("%d writes", h.Writes())
	}
}

func TestOwnedLinksGoAndAdoptedOnesStay(t *testing.T) {
	nettest.New(t)
	nettest.Dummy(t, "kilo0")
	nettest.Dummy(t, "old0", "10.4.0.1/16")
	nettest.Dummy(t, "adopted0", "10.4.0.2/16")
	nettest.Dummy(t, "other0", "10.4.0.3/16")
	alias := func(name, alias string) {
		must(t, netlink.LinkSetAlias(nettest.Must(netlink.LinkByName(name))(t), alias))
	}
	for _, name := range []string{"kilo0", "old0"} {
		must(t, netlink.LinkSetGroup(nettest.Must(netlink.LinkByName(name))(t), linkGroup))
	}
	alias("adopted0", aliasAdopted)
	h := newHost(t)
	must(t, h.CleanUp(t.Context(), false))
	for name, want := range map[string]bool{"kilo0": true, "old0": false, "adopted0": true, "other0": true} {
		if _, err := netlink.LinkByName(name); (err == nil) != want {
			t.Errorf("link %s is there: %t, want %t", name, err == nil, want)
		}
	}
	world := nettest.World(t)
	if len(lines(world, "10.4.0.2/16")) != 0 || len(lines(world, "addr 10.4.0.3/16")) != 1 || len(lines(world, aliasAdopted)) != 0 {
		t.Errorf("adopted link not emptied, or another touched:\n%s", world)
	}
	must(t, h.CleanUp(t.Context(), true))
	if _, err := netlink.LinkByName("kilo0"); err == nil {
		t.Error("kilo0 was to be deleted")
	}
}

// watchRoutes counts, in the order of the kernel's messages, the routes to dst
// in table main, and reports whether there was ever none.
func watchRoutes(t *testing.T, dst netip.Prefix) (gap func() bool) {
	t.Helper()
	updates := make(chan netlink.RouteUpdate, 1000)
	stop := make(chan struct{})
	must(t, netlink.RouteSubscribeWithOptions(updates, stop, netlink.RouteSubscribeOptions{}))
	// A route of our own tells that all messages before it have arrived.
	sentinel := pfx("10.255.255.255/32")
	return func() bool {
		lo := nettest.Must(netlink.LinkByName("lo"))(t)
		must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(sentinel), LinkIndex: lo.Attrs().Index}))
		defer close(stop)
		n, gap := 1, false
		for {
			select {
			case u := <-updates:
				switch {
				case dstOf(u.Route) == sentinel:
					return gap
				case dstOf(u.Route) != dst || u.Table != mesh.TableMain:
				case u.Type == unix.RTM_DELROUTE:
					n--
				case u.NlFlags&unix.NLM_F_REPLACE == 0:
					n++
				}
				gap = gap || n < 1
			case <-time.After(20 * time.Second):
				t.Fatal("the kernel's messages did not arrive")
			}
		}
	}
}

func TestRouteChangesAreReplacedWithoutGap(t *testing.T) {
	base := map[bool]mesh.Route{
		false: {Dst: pfx("10.2.1.0/24"), Via: ip("192.168.1.2"), Dev: "eth0", Src: ip("192.168.1.1"), Table: mesh.TableMain, OnLink: true},
		true:  {Dst: pfx("fd00:2:1::/64"), Via: ip("fd01::2"), Dev: "eth0", Src: ip("fd01::1"), Table: mesh.TableMain, OnLink: true},
	}
	edits := []struct {
		name string
		edit func(r *mesh.Route)
	}{
		{"via", func(r *mesh.Route) { r.Via = r.Via.Next() }},
		{"no via", func(r *mesh.Route) { r.Via, r.OnLink = netip.Addr{}, false }},
		{"via again", func(r *mesh.Route) {}},
		{"src", func(r *mesh.Route) { r.Src = netip.Addr{} }},
		{"other src", func(r *mesh.Route) {
			if r.Src = ip("192.168.1.100"); r.Dst.Addr().Is6() {
				r.Src = ip("fd01::100")
			}
		}},
		{"dev", func(r *mesh.Route) {
			if r.Dev = "eth1"; r.Dst.Addr().Is6() {
				// IPv6 takes no onlink gateway that another link leads to (net/ipv6/route.c, ip6_route_check_nh_onlink).
				r.Via = ip("fd03::2")
			}
		}},
		{"onlink", func(r *mesh.Route) { r.OnLink = false }},
	}
	nettest.New(t)
	nettest.Dummy(t, "eth0", "192.168.1.1/24", "192.168.1.100/24", "fd01::1/64", "fd01::100/64")
	nettest.Dummy(t, "eth1", "192.168.3.1/24", "fd03::1/64")
	h := newHost(t)
	for _, v6 := range []bool{false, true} {
		mustApply(t, h, mesh.State{Routes: []mesh.Route{base[v6]}})
		for _, e := range edits {
			r := base[v6]
			e.edit(&r)
			gap := watchRoutes(t, r.Dst)
			s := mesh.State{Routes: []mesh.Route{r}}
			changes := mustApply(t, h, s)
			if gap() {
				t.Errorf("IPv6 %t, %s: there was no route for a moment", v6, e.name)
			}
			if len(changes) != 1 || changes[0].Op != OpReplace {
				t.Errorf("IPv6 %t, %s: changes %v, want one that replaces", v6, e.name, changes)
			}
			mustBeQuiet(t, h, s)
			lo := nettest.Must(netlink.LinkByName("lo"))(t)
			must(t, netlink.RouteDel(&netlink.Route{Dst: ipNet(pfx("10.255.255.255/32")), LinkIndex: lo.Attrs().Index}))
		}
	}
}

func TestForeignRouteToTheSameDestinationStays(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		nettest.New(t)
		nettest.Dummy(t, "eth0", "192.168.1.1/24", "fd01::1/64")
		eth := nettest.Must(netlink.LinkByName("eth0"))(t).Attrs().Index
		h := newHost(t)
		r := mesh.Route{Dst: pfx("10.2.1.0/24"), Via: ip("192.168.1.2"), Dev: "eth0", Table: mesh.TableMain}
		if v6 {
			r.Dst, r.Via = pfx("fd00:2:1::/64"), ip("fd01::2")
		}
		s := mesh.State{Routes: []mesh.Route{r}}
		foreign := &netlink.Route{Dst: ipNet(r.Dst), LinkIndex: eth, Protocol: unix.RTPROT_STATIC}

		must(t, netlink.RouteAdd(foreign))
		before := nettest.World(t)
		_, err := h.Apply(t.Context(), s)
		if !errors.Is(err, errForeign) || !strings.Contains(err.Error(), "proto static") || !strings.Contains(err.Error(), "ip route add "+r.Dst.String()) {
			t.Errorf("IPv6 %t: error %v, want one that names both routes", v6, err)
		}
		if diff := cmp.Diff(before, nettest.World(t)); diff != "" {
			t.Errorf("IPv6 %t: (-before +after)\n%s", v6, diff)
		}

		// Behind a route of ours: a change of ours must not hit it.
		must(t, netlink.RouteDel(foreign))
		mustApply(t, h, s)
		must(t, netlink.RouteAppend(foreign))
		s.Routes[0].Via = s.Routes[0].Via.Next()
		_, err = h.Apply(t.Context(), s)
		if !errors.Is(err, errForeign) {
			t.Errorf("IPv6 %t: error %v, want %v", v6, err, errForeign)
		}
		if len(lines(nettest.World(t), "proto 4 ")) != 1 {
			t.Errorf("IPv6 %t: the foreign route is gone:\n%s", v6, nettest.World(t))
		}
		must(t, h.CleanUp(t.Context(), false))
		if len(lines(nettest.World(t), "proto 4 ")) != 1 || len(lines(nettest.World(t), "proto 117")) != 0 {
			t.Errorf("IPv6 %t: clean-up left:\n%s", v6, nettest.World(t))
		}
	}
}

func TestOneBadRouteDoesNotStopTheRest(t *testing.T) {
	eachDevice(t, testOneBadRouteDoesNotStopTheRest)
}

func testOneBadRouteDoesNotStopTheRest(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	h := newHost(t)
	good := fullState()
	s := fullState()
	s.Routes = append(s.Routes,
		mesh.Route{Dst: pfx("10.99.0.0/24"), Via: ip("203.0.113.1"), Dev: "eth0", Table: mesh.TableMain}, // no way to the gateway
		mesh.Route{Dst: pfx("10.98.0.0/24"), Dev: "gone0", Table: mesh.TableMain},
		mesh.Route{Dst: pfx("10.97.0.0/24"), Dev: "gone0", Table: mesh.TableMain})
	s.Addrs = append(s.Addrs, mesh.Addr{Dev: "gone0", Prefix: pfx("10.98.0.1/24")})
	s.Rules = append(s.Rules, mesh.Rule{IIf: "kilo0", Table: mesh.TableTunnel})
	_, err := h.Apply(t.Context(), s)
	if err == nil {
		t.Fatal("no error")
	}
	checkState(t, h, good)
	text := err.Error()
	for _, want := range []string{"ip route add 10.99.0.0/24 via 203.0.113.1 dev eth0: network is unreachable", "ip link show gone0: no such link", "ip rule add pref 1107 iif kilo0 lookup 1107"} {
		if strings.Count(text, want) != 1 {
			t.Errorf("error is not once about %q:\n%s", want, text)
		}
	}
	if n := strings.Count(text, "\n") + 1; n != 3 {
		t.Errorf("%d errors, want 3:\n%s", n, text)
	}
}

func TestChangedAddressInTheSameSubnet(t *testing.T) {
	eachDevice(t, testChangedAddressInTheSameSubnet)
}

func testChangedAddressInTheSameSubnet(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	h := newHost(t)
	s := fullState()
	for i := range s.Routes {
		if s.Routes[i].Dev == "kilo0" && s.Routes[i].Dst.Addr().Is4() {
			s.Routes[i].Src = ip("10.4.0.1")
		}
	}
	mustApply(t, h, s)
	s.Addrs = []mesh.Addr{{Dev: "kilo0", Prefix: pfx("10.4.0.5/16")}, {Dev: "kilo0", Prefix: pfx("fd10:4::5/64")}}
	for i := range s.Routes {
		if s.Routes[i].Src == ip("10.4.0.1") {
			s.Routes[i].Src = ip("10.4.0.5")
		}
	}
	gap := watchRoutes(t, pfx("10.2.1.0/24"))
	mustApply(t, h, s)
	if gap() {
		t.Error("there was no route for a moment")
	}
	checkState(t, h, s)
	mustBeQuiet(t, h, s)
}

func TestLeaderStepsDownAndUp(t *testing.T) { eachDevice(t, testLeaderStepsDownAndUp) }

func testLeaderStepsDownAndUp(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	h := newHost(t)
	mustApply(t, h, fullState())
	s := fullState()
	s.Links[0].Up = false
	s.Addrs, s.Device.Peers = nil, nil
	s.Routes = []mesh.Route{{Dst: pfx("10.2.1.0/24"), Via: ip("192.168.1.2"), Dev: "eth0", Table: mesh.TableMain, OnLink: true}}
	gap := watchRoutes(t, pfx("10.2.1.0/24"))
	mustApply(t, h, s)
	if gap() {
		t.Error("stepping down: there was no route for a moment")
	}
	checkState(t, h, s)
	mustBeQuiet(t, h, s)
	mustApply(t, h, fullState())
	checkState(t, h, fullState())
}

func TestAddressesStayOnALinkThatIsDown(t *testing.T) {
	eachDevice(t, testAddressesStayOnALinkThatIsDown)
}

func testAddressesStayOnALinkThatIsDown(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	h := newHost(t)
	mustApply(t, h, fullState())
	s := fullState()
	s.Links[0].Up = false
	s.Routes = slices.DeleteFunc(s.Routes, func(r mesh.Route) bool { return r.Dev == "kilo0" })
	mustApply(t, h, s)
	checkState(t, h, s)
	mustBeQuiet(t, h, s)
}

func TestMissingWireGuardIsExplained(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   string
	}{
		{"auto", func(*Config) {}, "ip link add kilo0 type wireguard mtu 1400: this kernel has no WireGuard: load the module wireguard, or run `kg userspace-wireguard` on this node: operation not supported"},
		{"userspace", func(c *Config) { c.WireGuardMode = WireGuardUserspace }, "ip link add kilo0 type wireguard mtu 1400: no such link, and WireGuard mode is userspace: start `kg userspace-wireguard` for it"},
		{"not to be created", func(c *Config) { c.CreateWireGuard = false }, "ip link add kilo0 type wireguard mtu 1400: no such link, and creating it is switched off: make it, or allow to create it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			nettest.New(t)
			uplink(t)
			h := newHost(t, c.change)
			s := fullState()
			_, err := h.Apply(t.Context(), s)
			if c.name == "auto" && kernelHas(t, mesh.KindWireGuard) {
				must(t, err)
				return
			}
			if err == nil || err.Error() != c.want {
				t.Fatalf("error %v, want %q", err, c.want)
			}
			// What does not need the link is there all the same.
			if len(lines(nettest.World(t), "proto 117")) != 3+len(s.Rules) {
				t.Errorf("world:\n%s", nettest.World(t))
			}
		})
	}
}

func TestLinkThatIsNoWireGuardIsExplained(t *testing.T) {
	nettest.New(t)
	nettest.Dummy(t, "kilo0")
	h := newHost(t)
	_, err := h.Apply(t.Context(), mesh.State{Links: fullState().Links, Device: fullState().Device})
	want := "wg show kilo0: the link is no WireGuard link of the kernel and nothing serves /var/run/wireguard/kilo0.sock: start `kg userspace-wireguard`, or delete the link: file does not exist"
	if err == nil || err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
}

func TestTunnelLinkOfTheWrongTypeIsExplained(t *testing.T) {
	nettest.New(t)
	nettest.Dummy(t, "tun9")
	h := newHost(t)
	before := nettest.World(t)
	_, err := h.Apply(t.Context(), mesh.State{
		Links:  []mesh.Link{{Name: "tun9", Kind: mesh.KindIPIP, MTU: 1480, Up: true}},
		Routes: []mesh.Route{{Dst: pfx("10.2.1.0/24"), Dev: "tun9", Table: mesh.TableMain}},
	})
	want := "ip link show tun9: the link is of type veth, want ipip: delete or rename it, or choose another name for the tunnel link"
	if err == nil || err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	if after := slices.DeleteFunc(strings.Split(nettest.World(t), "\n"), func(l string) bool { return strings.Contains(l, " kilo") }); strings.Join(after, "\n") != before {
		t.Errorf("the link was touched:\n%s", nettest.World(t))
	}
}

func TestTunnelLinks(t *testing.T) {
	for name, c := range map[string]struct {
		kind mesh.LinkKind
		want string
	}{
		"tunl0":   {mesh.KindIPIP, "ip link add tunl0 type ipip mtu 1480: this kernel has no IPIP tunnels: load the module ipip, or switch encapsulation off: operation not supported"},
		"tunl0-6": {mesh.KindIP6Tnl, "ip link add tunl0-6 type ip6tnl mtu 1480: this kernel has no tunnels over IPv6: load the module ip6_tunnel, or switch encapsulation off: operation not supported"},
	} {
		t.Run(name, func(t *testing.T) {
			nettest.New(t)
			h := newHost(t)
			s := mesh.State{Links: []mesh.Link{{Name: name, Kind: c.kind, MTU: 1480, Up: true}}}
			_, err := h.Apply(t.Context(), s)
			if err != nil {
				if err.Error() != c.want {
					t.Errorf("error %q, want %q", err, c.want)
				}
				return
			}
			mustBeQuiet(t, h, s)
			must(t, h.CleanUp(t.Context(), false))
			if left := lines(nettest.World(t), "group 117"); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

func TestApplyStopsWhenItsContextEnds(t *testing.T) {
	nettest.New(t)
	uplink(t)
	h := newHost(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	before := nettest.World(t)
	changes, err := h.Apply(ctx, fullState())
	if !errors.Is(err, context.Canceled) || len(changes) > 0 || h.Writes() > 0 {
		t.Errorf("error %v, changes %v, writes %d", err, changes, h.Writes())
	}
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(nettest.World(t), "\n")); diff != "" {
		t.Errorf("(-before +after)\n%s", diff)
	}
}

func TestTwoRoutesToOneDestinationAreAnError(t *testing.T) {
	nettest.New(t)
	uplink(t)
	h := newHost(t)
	s := mesh.State{Routes: []mesh.Route{
		{Dst: pfx("10.2.1.0/24"), Via: ip("192.168.1.2"), Dev: "eth0", Table: mesh.TableMain},
		{Dst: pfx("10.2.1.0/24"), Via: ip("192.168.1.3"), Dev: "eth0", Table: mesh.TableMain},
	}}
	for range 2 {
		if _, err := h.Apply(t.Context(), s); !errors.Is(err, errTwoRoutes) {
			t.Errorf("error %v, want %v", err, errTwoRoutes)
		}
		if got := lines(nettest.World(t), "proto 117"); len(got) != 1 || !strings.Contains(got[0], "192.168.1.2") {
			t.Errorf("routes %q, want the first", got)
		}
	}
	if h.Writes() != 1 {
		t.Errorf("%d writes, want 1", h.Writes())
	}
}
