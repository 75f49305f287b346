// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
	"github.com/kilomesh/kilo/internal/userwg"
)

func TestMain(m *testing.M) {
	nettest.Main(m, map[string]nettest.Program{
		"churn": churn,
		// A WireGuard device is a process of its own: all its threads are in the namespace then.
		"userwg": func(args []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
			defer stop()
			return userwg.Run(ctx, userwg.Config{Interface: args[0], Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))})
		},
	})
}

var (
	pfx  = netip.MustParsePrefix
	ip   = netip.MustParseAddr
	must = nettest.NoErr
)

// secret returns the nth private key of the tests.
func secret(n byte) mesh.SecretKey {
	b := [mesh.KeySize]byte{0: 8 * n, 30: n, 31: 64}
	return mesh.NewSecretKey(b)
}

// public returns the public key that belongs to secret(n).
func public(n byte) mesh.PublicKey {
	k, err := secret(n).Public()
	if err != nil {
		panic(err)
	}
	return k
}

// newHost opens a Host in the current namespace.
func newHost(t *testing.T, change ...func(*Config)) *Host {
	t.Helper()
	cfg := Config{WireGuardDev: "kilo0", TunnelDev: "tunl0", CreateWireGuard: true, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	for _, c := range change {
		c(&cfg)
	}
	h := nettest.Must(New(cfg))(t)
	t.Cleanup(func() { _ = h.Close() })
	return h
}

// startWireGuard serves a WireGuard link from userspace in the current namespace.
func startWireGuard(t testing.TB) *nettest.Process {
	t.Helper()
	const name = "kilo0"
	p := nettest.Start(t, "userwg", name)
	nettest.Await(t, "control socket of "+name, func() bool {
		c, err := net.Dial("unix", "/var/run/wireguard/"+name+".sock")
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
	return p
}

// eachDevice runs a test over both kinds of WireGuard device. makeDevice makes
// one, kilo0, in the current namespace.
func eachDevice(t *testing.T, test func(t *testing.T, makeDevice func(*testing.T))) {
	t.Helper()
	t.Run("userspace", func(t *testing.T) { test(t, func(t *testing.T) { startWireGuard(t) }) })
	t.Run("kernel", func(t *testing.T) {
		requireLinkKind(t, mesh.KindWireGuard)
		test(t, makeKernelWireGuard)
	})
}

// makeKernelWireGuard makes a link that is not marked as ours.
func makeKernelWireGuard(t *testing.T) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "kilo0", 1420
	must(t, netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs}))
}

// mustApply applies and expects no error.
func mustApply(t *testing.T, h *Host, s mesh.State) []Change {
	t.Helper()
	changes, err := h.Apply(t.Context(), s)
	if err != nil {
		t.Fatalf("Apply: %v", err)
	}
	return changes
}

// mustBeQuiet applies and expects that nothing is written.
func mustBeQuiet(t *testing.T, h *Host, s mesh.State) {
	t.Helper()
	before := h.Writes()
	if changes := mustApply(t, h, s); len(changes) > 0 {
		t.Errorf("Apply of a State that is there made changes: %v", changes)
	}
	if n := h.Writes() - before; n != 0 {
		t.Errorf("Apply of a State that is there wrote %d times", n)
	}
}

// fullState is a leader of both address families.
func fullState() mesh.State {
	a, b := public(2), public(3)
	return sorted(mesh.State{
		Links: []mesh.Link{{Name: "kilo0", Kind: mesh.KindWireGuard, MTU: 1400, Up: true}},
		Addrs: []mesh.Addr{{Dev: "kilo0", Prefix: pfx("10.4.0.1/16")}, {Dev: "kilo0", Prefix: pfx("fd10:4::1/64")}},
		Routes: []mesh.Route{
			{Dst: pfx("10.2.1.0/24"), Via: ip("10.4.0.2"), Dev: "kilo0", Src: ip("192.168.1.1"), Table: mesh.TableMain, OnLink: true},
			{Dst: pfx("10.5.0.1/32"), Dev: "kilo0", Src: ip("192.168.1.1"), Table: mesh.TableMain},
			{Dst: pfx("10.2.3.0/24"), Via: ip("192.168.1.2"), Dev: "eth0", Table: mesh.TableMain, OnLink: true},
			{Dst: pfx("fd00:2:1::/64"), Via: ip("fd10:4::2"), Dev: "kilo0", Src: ip("fd01::1"), Table: mesh.TableMain, OnLink: true},
			{Dst: pfx("fd00:5::1/128"), Dev: "kilo0", Table: mesh.TableMain},
			{Dst: pfx("192.168.2.9/32"), Via: ip("192.168.2.9"), Dev: "eth0", Src: ip("192.168.1.1"), Table: mesh.TableTunnel, OnLink: true},
			{Dst: pfx("fd02::9/128"), Via: ip("fd02::9"), Dev: "eth0", Src: ip("fd01::1"), Table: mesh.TableTunnel, OnLink: true},
			{Dst: pfx("0.0.0.0/0"), Dev: "kilo0", Table: mesh.TableTunnel},
			{Dst: pfx("::/0"), Dev: "kilo0", Table: mesh.TableTunnel},
			{Dst: pfx("10.2.6.0/24"), Dev: "kilo0", Table: mesh.TableAddOn},
			{Dst: pfx("fd00:2:6::/64"), Dev: "kilo0", Table: mesh.TableAddOn},
			{Dst: pfx("203.0.113.9/32"), Dev: "kilo0", Table: mesh.TableSealed},
			{Dst: pfx("2001:db8::9/128"), Dev: "kilo0", Table: mesh.TableSealed},
		},
		Rules: append(append(mesh.SealingRules(pfx("0.0.0.0/0"), 51820), mesh.SealingRules(pfx("::/0"), 51820)...), []mesh.Rule{
			{From: pfx("10.2.2.0/24"), To: pfx("192.168.2.9/32"), Table: mesh.TableTunnel},
			{To: pfx("192.168.2.9/32"), IIf: "kilo0", Table: mesh.TableTunnel},
			{From: pfx("fd00:2:2::/64"), To: pfx("fd02::9/128"), Table: mesh.TableTunnel},
			{To: pfx("0.0.0.0/0"), Table: mesh.TableAddOn},
			{To: pfx("::/0"), Table: mesh.TableAddOn},
		}...),
		Device: owning(mesh.Device{
			PrivateKey: secret(1), ListenPort: 51820,
			Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{
				a: {Name: "a", IsNode: true, Endpoint: netip.MustParseAddrPort("192.0.2.1:51820"), PersistentKeepalive: 25},
				b: {Name: "b", Endpoint: netip.MustParseAddrPort("[2001:db8::2]:51820"), PresharedKey: secret(9)},
			}),
		}, map[netip.Prefix]mesh.PublicKey{
			pfx("10.2.1.0/24"): a, pfx("10.4.0.2/32"): a, pfx("fd00:2:1::/64"): a,
			pfx("10.5.0.1/32"): b, pfx("fd00:5::1/128"): b,
		}),
		Firewall: mesh.Firewall{
			MasqueradeFrom: []netip.Prefix{pfx("10.2.2.0/24"), pfx("fd00:2:2::/64")},
			MasqueradeTo:   []netip.Prefix{pfx("192.168.178.0/24")},
			Known:          []netip.Prefix{pfx("10.2.0.0/24"), pfx("10.2.1.0/24"), pfx("10.4.0.0/16"), pfx("fd00::/16")},
			TunnelFrom:     []netip.Prefix{pfx("192.168.1.1/32"), pfx("192.168.2.9/32")},
		},
		Forward4: true, Forward6: true,
	})
}

// sorted returns s with its slices in the order of a State.
func sorted(s mesh.State) mesh.State {
	s.Sort()
	return s
}

// uplink makes the link of the underlay that fullState is about.
func uplink(t *testing.T) {
	t.Helper()
	nettest.Dummy(t, "eth0", "192.168.1.1/24", "fd01::1/64")
}

// lines returns those lines of the world that contain word.
func lines(world, word string) []string {
	return slices.DeleteFunc(strings.Split(world, "\n"), func(l string) bool { return !strings.Contains(l, word) })
}

func TestApplyConvergesIsIdempotentAndSurvivesRestart(t *testing.T) {
	eachDevice(t, testApplyConvergesIsIdempotentAndSurvivesRestart)
}

func testApplyConvergesIsIdempotentAndSurvivesRestart(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	foreign := addForeign(t)
	addGarbage(t)
	before := foreignLines(t)

	h := newHost(t)
	s := fullState()
	mustApply(t, h, s)
	checkState(t, h, s)
	mustBeQuiet(t, h, s)

	again := newHost(t)
	mustBeQuiet(t, again, s)
	if diff := cmp.Diff(before, foreignLines(t)); diff != "" {
		t.Errorf("objects of others changed (-before +after):\n%s", diff)
	}
	foreign(t)
}

// addForeign adds what other programs may have, close to what is ours.
func addForeign(t *testing.T) (check func(t *testing.T)) {
	t.Helper()
	nettest.Dummy(t, "other0", "10.4.0.9/32", "fd10:4::9/128")
	l := nettest.Must(netlink.LinkByName("other0"))(t)
	for _, r := range []netlink.Route{
		{Dst: ipNet(pfx("10.9.0.0/16")), Protocol: unix.RTPROT_STATIC},
		{Dst: ipNet(pfx("10.2.1.0/24")), Protocol: unix.RTPROT_STATIC, Priority: 50},
		{Dst: ipNet(pfx("10.2.1.0/24")), Protocol: unix.RTPROT_STATIC, Table: 99},
		{Dst: ipNet(pfx("10.8.0.0/16")), Protocol: unix.RTPROT_BIRD, Table: mesh.TableTunnel},
		{Dst: ipNet(pfx("fd00:2:1::/64")), Protocol: unix.RTPROT_STATIC, Priority: 50},
		{Dst: ipNet(pfx("fd09::/64")), Protocol: unix.RTPROT_STATIC},
		{Dst: ipNet(pfx("0.0.0.0/0")), Protocol: unix.RTPROT_BOOT},
		{Dst: ipNet(pfx("::/0")), Protocol: unix.RTPROT_BOOT},
	} {
		r.LinkIndex = l.Attrs().Index
		must(t, netlink.RouteAdd(&r))
	}
	r := netlink.NewRule()
	r.Priority, r.Table, r.Dst = RulePriority, 99, ipNet(pfx("192.168.2.9/32"))
	must(t, netlink.RuleAdd(r))
	return func(t *testing.T) {
		if got := len(lines(nettest.World(t), "proto 117")); got == 0 {
			t.Error("nothing carries our mark")
		}
	}
}

// foreignLines returns what the namespace holds without what is ours.
func foreignLines(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(strings.Split(nettest.World(t), "\n"), func(l string) bool {
		for _, mark := range []string{"proto 117", "kilo0", " kilo"} {
			if strings.Contains(l, mark) {
				return true
			}
		}
		return false
	})
}

// addGarbage adds what a crashed, older or confused process of ours may have left.
func addGarbage(t *testing.T) {
	t.Helper()
	eth := nettest.Must(netlink.LinkByName("eth0"))(t).Attrs().Index
	kilo := nettest.Must(netlink.LinkByName("kilo0"))(t)
	nettest.Up(t, "kilo0", "10.4.0.77/16", "10.77.0.1/24", "fd10:4::77/64")
	gw := func(s string) []byte { return ip(s).AsSlice() }
	for _, r := range []netlink.Route{
		{Dst: ipNet(pfx("10.66.0.0/16")), LinkIndex: eth},
		{Dst: ipNet(pfx("10.2.1.0/24")), LinkIndex: eth, Gw: gw("192.168.1.7")},
		{Dst: ipNet(pfx("10.2.3.0/24")), LinkIndex: eth, Gw: gw("192.168.1.2"), Priority: 7},
		{Dst: ipNet(pfx("10.67.0.0/16")), LinkIndex: eth, Table: 4242},
		{Dst: ipNet(pfx("10.68.0.0/16")), Type: unix.RTN_BLACKHOLE},
		{Dst: ipNet(pfx("10.5.0.1/32")), Type: unix.RTN_UNREACHABLE},
		{Dst: ipNet(pfx("fd66::/64")), LinkIndex: eth},
		{Dst: ipNet(pfx("fd00:5::1/128")), LinkIndex: eth, Gw: gw("fd01::7")},
		{Dst: ipNet(pfx("fd67::/64")), LinkIndex: eth, Table: 4242, Priority: 3},
		{Dst: ipNet(pfx("fd68::/64")), Type: unix.RTN_BLACKHOLE},
		{Dst: ipNet(pfx("10.69.0.0/16")), MultiPath: []*netlink.NexthopInfo{{LinkIndex: eth, Gw: gw("192.168.1.7")}, {LinkIndex: eth, Gw: gw("192.168.1.8")}}},
		{Dst: ipNet(pfx("fd00:2:1::/64")), MultiPath: []*netlink.NexthopInfo{{LinkIndex: eth, Gw: gw("fd01::7")}, {LinkIndex: eth, Gw: gw("fd01::8")}}},
		{Dst: ipNet(pfx("fd69::/64")), MultiPath: []*netlink.NexthopInfo{{LinkIndex: eth, Gw: gw("fd01::7")}, {LinkIndex: eth, Gw: gw("fd01::8")}}},
	} {
		r.Protocol = RouteProtocol
		must(t, netlink.RouteAdd(&r))
	}
	for _, to := range []string{"10.66.0.0/16", "192.168.2.9/32", "fd66::/64"} {
		r := netlink.NewRule()
		r.Priority, r.Table, r.Protocol, r.Dst, r.Family = 999, 4242, RouteProtocol, ipNet(pfx(to)), familyOf(pfx(to).Addr())
		must(t, netlink.RuleAdd(r))
	}
	h := newHost(t)
	garbage := mesh.State{
		Links: []mesh.Link{{Name: kilo.Attrs().Name, Kind: mesh.KindWireGuard, MTU: 1300, Up: true}},
		Device: owning(mesh.Device{
			PrivateKey: secret(7), ListenPort: 4242,
			Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{public(8): {Name: "old"}, public(2): {Name: "a", IsNode: true, PersistentKeepalive: 5, PresharedKey: secret(4)}}),
		}, map[netip.Prefix]mesh.PublicKey{
			pfx("10.2.1.0/24"): public(8), pfx("10.66.0.0/16"): public(2), pfx("10.4.0.2/32"): public(2), pfx("fd00:5::1/128"): public(2),
		}),
	}
	p := &pass{h: h, ctx: t.Context(), want: garbage}
	must(t, p.observeLinks())
	p.deviceGrow()
	must(t, errors.Join(p.errs...))
}

// checkState compares what the kernel holds with the State.
func checkState(t *testing.T, h *Host, s mesh.State) {
	t.Helper()
	p := &pass{h: h, ctx: t.Context(), want: s}
	must(t, p.observeLinks())
	for _, w := range s.Links {
		l := p.links[w.Name]
		if l == nil || l.Attrs().MTU != w.MTU || isUp(l) != w.Up {
			t.Errorf("link %s: got %+v", w, l)
		}
	}
	var addrs []string
	for _, a := range nettest.Must(p.observeAddrs())(t) {
		addrs = append(addrs, a.String())
	}
	checkSet(t, "addresses", texts(s.Addrs), addrs)
	var routes []string
	for _, r := range nettest.Must(p.observeRoutes())(t) {
		routes = append(routes, r.String())
	}
	checkSet(t, "routes", texts(s.Routes), routes)
	var rules []string
	for _, r := range nettest.Must(p.observeRules())(t) {
		rules = append(rules, r.String())
	}
	checkSet(t, "rules", texts(s.Rules), rules)
	got, want := observedDevice(nettest.Must(h.wgDevice(h.cfg.WireGuardDev))(t)), deviceOf(s.Device)
	if want.listenPort == 0 { // whichever it is
		want.listenPort = got.listenPort
	}
	if diff := cmp.Diff(deviceText(got), deviceText(want)); diff != "" {
		t.Errorf("device (-got +want):\n%s", diff)
	}
}

func texts[T interface{ String() string }](list []T) []string {
	var out []string
	for _, x := range list {
		out = append(out, x.String())
	}
	return out
}

func checkSet(t *testing.T, what string, want, got []string) {
	t.Helper()
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// deviceOf is the device that a State asks for.
func deviceOf(d mesh.Device) device {
	out := device{privateKey: d.PrivateKey, listenPort: d.ListenPort}
	for _, p := range d.Peers {
		out.peers = append(out.peers, devicePeer{key: p.Key, endpoint: p.Endpoint, presharedKey: p.PresharedKey, keepalive: p.PersistentKeepalive, allowedIPs: slices.SortedFunc(slices.Values(p.AllowedIPs), mesh.ComparePrefix)})
	}
	return out
}

// peersOf are the peers of a mesh.Device.
func peersOf(byKey map[mesh.PublicKey]mesh.DevicePeer) []mesh.DevicePeer {
	var out []mesh.DevicePeer
	for k, p := range byKey {
		p.Key = k
		out = append(out, p)
	}
	s := mesh.State{Device: mesh.Device{Peers: out}}
	s.Sort()
	return out
}

// give adds a prefix to a peer of the device.
func give(d mesh.Device, p netip.Prefix, k mesh.PublicKey) {
	peer := d.Peer(k)
	peer.AllowedIPs = append(peer.AllowedIPs, p)
	mesh.SortPrefixes(peer.AllowedIPs)
}

// owning adds prefixes to peers of the device.
func owning(d mesh.Device, owners map[netip.Prefix]mesh.PublicKey) mesh.Device {
	for p, k := range owners {
		give(d, p, k)
	}
	return d
}

// deviceText prints a device with its secrets told apart, but not shown.
func deviceText(d device) []string {
	public, _ := d.privateKey.Public()
	out := []string{"device " + public.String(), fmt.Sprint("port ", d.listenPort)}
	for _, p := range d.peers {
		k := p.key
		psk, _ := p.presharedKey.Public()
		for _, prefix := range p.allowedIPs {
			out = append(out, k.String()+" allowed "+prefix.String())
		}
		out = append(out, fmt.Sprintf("%s endpoint %s psk %s keepalive %d", k, p.endpoint, psk, p.keepalive))
	}
	slices.Sort(out)
	return out
}

// addRoutes adds routes of nobody in particular.
func addRoutes(via string, dsts ...string) error {
	l, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	for _, dst := range dsts {
		err = errors.Join(err, netlink.RouteAdd(&netlink.Route{Dst: ipNet(pfx(dst)), Gw: ip(via).AsSlice(), LinkIndex: l.Attrs().Index}))
	}
	return err
}
