// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// kernelHas reports whether the kernel has a kind of link.
func kernelHas(t *testing.T, kind mesh.LinkKind) bool {
	t.Helper()
	l := nettest.Must(linkSpec(mesh.Link{Name: "probe0", Kind: kind, MTU: 1280}))(t)
	switch err := netlink.LinkAdd(l); {
	case err == nil:
		must(t, netlink.LinkDel(l))
	case errors.Is(err, unix.EOPNOTSUPP):
		return false
	case !errors.Is(err, unix.EEXIST): // of ipip, the module makes one by itself
		t.Fatal(err)
	}
	return true
}

// requireLinkKind enters a namespace whose kernel has that kind of link. Where
// it has not, `make vm-test` runs the test.
func requireLinkKind(t *testing.T, kind mesh.LinkKind) {
	t.Helper()
	nettest.New(t)
	if !kernelHas(t, kind) {
		nettest.SkipKernel(t, explainLink(kind, unix.EOPNOTSUPP).Error())
	}
}

func TestLinkSpecs(t *testing.T) {
	for _, c := range []struct {
		link mesh.Link
		want netlink.Link
	}{
		{mesh.Link{Name: "kilo0", Kind: mesh.KindWireGuard, MTU: 1420}, &netlink.Wireguard{}},
		{mesh.Link{Name: "tunl0", Kind: mesh.KindIPIP, MTU: 1480}, &netlink.Iptun{Local: []byte{0, 0, 0, 0}, Remote: []byte{0, 0, 0, 0}, PMtuDisc: 1, Proto: 4}},
		{mesh.Link{Name: "tunl0-6", Kind: mesh.KindIP6Tnl, MTU: 1460}, &netlink.Ip6tnl{FlowBased: true}},
	} {
		a := c.want.Attrs()
		*a = netlink.NewLinkAttrs()
		a.Name, a.MTU, a.Group = c.link.Name, c.link.MTU, linkGroup
		got := nettest.Must(linkSpec(c.link))(t)
		if diff := cmp.Diff(c.want, got, cmp.Transformer("addr", func(ip []byte) string { return addrOf(ip).String() })); diff != "" {
			t.Errorf("%s (-want +got)\n%s", c.link, diff)
		}
		if got.Type() != string(c.link.Kind) {
			t.Errorf("type %s, want %s", got.Type(), c.link.Kind)
		}
	}
	if _, err := linkSpec(mesh.Link{Kind: "gre"}); err == nil {
		t.Error("no error for an unknown kind")
	}
}

func TestKernelWireGuardIsMadeAndDeleted(t *testing.T) {
	requireLinkKind(t, mesh.KindWireGuard)
	ns, _ := pair(t, func(*testing.T) {}) // the Host makes it
	mustReach(t, ns[1], ns[2], "10.4.0.2")
	ns[1].Do(t, func() {
		must(t, newHost(t).CleanUp(t.Context(), false))
		if l := nettest.Must(netlink.LinkByName("kilo0"))(t); isUp(l) || l.Attrs().Group != linkGroup {
			t.Errorf("link %+v, want it down and ours", l.Attrs())
		}
		must(t, newHost(t).CleanUp(t.Context(), true))
		if got := lines(nettest.World(t), "kilo0"); len(got) != 0 {
			t.Errorf("left: %q", got)
		}
	})
}

func TestKernelWireGuardPortInUse(t *testing.T) {
	requireLinkKind(t, mesh.KindWireGuard)
	uplink(t)
	h := newHost(t)
	other := &netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: "other0"}}
	must(t, netlink.LinkAdd(other))
	s := mesh.State{Links: []mesh.Link{{Name: "other0", Kind: mesh.KindWireGuard, MTU: 1420, Up: true}}, Device: mesh.Device{PrivateKey: secret(5), ListenPort: 51820}}
	mustApply(t, newHost(t, func(c *Config) { c.WireGuardDev = "other0" }), s)
	_, err := h.Apply(t.Context(), fullState())
	if err == nil || !strings.Contains(err.Error(), "has UDP port 51820") {
		t.Errorf("error %v", err)
	}
}

// tunnelState is a node of a location whose members tunnel to each other.
func tunnelState(kind mesh.LinkKind, dev string, self, other, pods netip.Prefix, podIP, internal netip.Addr) mesh.State {
	return mesh.State{
		Links:    []mesh.Link{{Name: dev, Kind: kind, MTU: 1400, Up: true}},
		Addrs:    []mesh.Addr{{Dev: dev, Prefix: netip.PrefixFrom(podIP, podIP.BitLen())}},
		Routes:   []mesh.Route{{Dst: pods, Via: other.Addr(), Dev: dev, Src: internal, Table: mesh.TableMain, OnLink: true}},
		Firewall: mesh.Firewall{TunnelFrom: []netip.Prefix{self, other}},
	}
}

func TestKernelIPIP(t *testing.T) {
	requireLinkKind(t, mesh.KindIPIP)
	a, b := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	testTunnel(t, a, b,
		tunnelState(mesh.KindIPIP, "tunl0", pfx("192.0.2.1/32"), pfx("192.0.2.2/32"), pfx("10.2.2.0/24"), ip("10.2.1.0"), ip("10.2.1.0")),
		tunnelState(mesh.KindIPIP, "tunl0", pfx("192.0.2.2/32"), pfx("192.0.2.1/32"), pfx("10.2.1.0/24"), ip("10.2.2.0"), ip("10.2.2.0")))
}

func TestKernelIP6Tnl(t *testing.T) {
	requireLinkKind(t, mesh.KindIP6Tnl)
	a, b := nettest.Make(t), nettest.Make(t)
	// Both ends in one subnet: the case in which a gateway would be refused.
	nettest.Veth(t, a, "eth0", "2001:db8::1/64", b, "eth0", "2001:db8::2/64")
	testTunnel(t, a, b,
		tunnelState(mesh.KindIP6Tnl, "tunl0-6", pfx("2001:db8::1/128"), pfx("2001:db8::2/128"), pfx("fd00:2:2::/64"), ip("fd00:2:1::"), ip("2001:db8::1")),
		tunnelState(mesh.KindIP6Tnl, "tunl0-6", pfx("2001:db8::2/128"), pfx("2001:db8::1/128"), pfx("fd00:2:1::/64"), ip("fd00:2:2::"), ip("fd00:2:2::")))
}

// testTunnel applies both States and sends a packet to b's pod address through the tunnel.
func testTunnel(t *testing.T, a, b *nettest.NS, stateA, stateB mesh.State) {
	t.Helper()
	for _, side := range []struct {
		ns *nettest.NS
		s  mesh.State
	}{{a, stateA}, {b, stateB}} {
		side.s.Sort()
		side.ns.Do(t, func() {
			before := nettest.World(t)
			h := newHost(t)
			mustApply(t, h, side.s)
			must(t, h.CleanUp(t.Context(), false))
			if diff := cmp.Diff(before, withoutFallback(nettest.World(t))); diff != "" && withoutFallback(before) != withoutFallback(nettest.World(t)) {
				t.Errorf("clean-up (-before +after)\n%s", diff)
			}
			mustApply(t, h, side.s)
			mustBeQuiet(t, h, side.s)
			mustBeQuiet(t, newHost(t), side.s)
			moved := side.s
			moved.Routes = slices.Clone(moved.Routes)
			moved.Routes[0].Via = moved.Routes[0].Via.Next().Next()
			if changes := mustApply(t, h, moved); len(changes) != 1 || changes[0].Op != OpReplace {
				t.Errorf("changes %v, want one route replaced", changes)
			}
			mustApply(t, h, side.s)
		})
	}
	mustReach(t, a, b, stateB.Addrs[0].Prefix.Addr().String())
}

// withoutFallback leaves out the links that the modules make by themselves.
func withoutFallback(world string) string {
	var out []string
	for l := range strings.SplitSeq(world, "\n") {
		if !strings.HasPrefix(l, "link tunl0 ") && !strings.HasPrefix(l, "link ip6tnl0 ") {
			out = append(out, l)
		}
	}
	return strings.Join(out, "\n")
}
