// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

func TestFacts(t *testing.T) {
	nettest.New(t)
	h := newHost(t, func(c *Config) { c.TunnelDev = "tun9" })
	check := func(want mesh.Facts) {
		t.Helper()
		got := nettest.Must(h.Facts(t.Context()))(t)
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmp.Comparer(func(a, b mesh.LinkAddr) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
	check(mesh.Facts{}) // no default route is no error

	nettest.Dummy(t, "eth0", "192.168.1.1/24", "169.254.7.7/16", "fd01::1/64")
	nettest.Dummy(t, "eth1", "203.0.113.9/32")
	nettest.Dummy(t, "kilo0", "10.4.0.1/16")
	nettest.Dummy(t, "tun9", "10.2.1.0/32")
	nettest.Dummy(t, "kube-bridge", "10.2.1.1/24", "fd00:2:1::1/64")
	nettest.Dummy(t, mesh.CiliumDev, "10.244.0.7/32", "10.244.0.8/32", "fd00:244::7/128")
	nettest.Dummy(t, mesh.FlannelDev4, "10.2.1.0/32")
	nettest.Up(t, "lo", "203.0.113.10/32")
	must(t, netlink.LinkSetMTU(nettest.Must(netlink.LinkByName("eth1"))(t), 9000))
	want := mesh.Facts{CiliumIPs: []netip.Addr{ip("10.244.0.7"), ip("fd00:244::7")}, Addrs: []mesh.LinkAddr{
		{Dev: "eth0", Prefix: pfx("192.168.1.1/24"), MTU: 1500},
		{Dev: "eth1", Prefix: pfx("203.0.113.9/32"), MTU: 9000},
		{Dev: "eth0", Prefix: pfx("fd01::1/64"), MTU: 1500},
	}}
	check(want)

	must(t, addRoutes("fd01::2", "::/0"))
	want.DefaultDev, want.DefaultMTU = "eth0", 1500
	check(want)

	// IPv4 is preferred; the lowest metric counts; our own routes do not.
	dev := func(name string) int { return nettest.Must(netlink.LinkByName(name))(t).Attrs().Index }
	for _, r := range []netlink.Route{
		{LinkIndex: dev("eth0"), Priority: 200},
		{LinkIndex: dev("eth1"), Priority: 100},
		{LinkIndex: dev("eth0"), Priority: 50, Protocol: RouteProtocol},
		{LinkIndex: dev("kilo0"), Priority: 10},
		{LinkIndex: dev("eth0"), Table: 99},
	} {
		r.Dst = ipNet(pfx("0.0.0.0/0"))
		must(t, netlink.RouteAdd(&r))
	}
	want.DefaultDev = "eth1" // and the lesser MTU still, since WireGuard may send either way
	check(want)
	must(t, netlink.LinkSetMTU(nettest.Must(netlink.LinkByName("eth1"))(t), 1400))
	want.Addrs[1].MTU, want.DefaultMTU = 1400, 1400
	check(want)
	if h.Writes() != 0 {
		t.Errorf("%d writes", h.Writes())
	}
}

// sysctlOf reads a value below /proc/sys/net of the current namespace.
func sysctlOf(t *testing.T, key string) string {
	t.Helper()
	return strings.TrimSpace(string(nettest.Must(os.ReadFile("/proc/sys/net/" + key))(t)))
}

func TestForwarding(t *testing.T) {
	nettest.New(t)
	nettest.Dummy(t, "eth0")
	nettest.Dummy(t, "ra0")
	nettest.Dummy(t, "off0")
	nettest.Dummy(t, "kube-bridge")
	for key, value := range map[string]string{
		"ipv4/ip_forward": "0", "ipv6/conf/all/forwarding": "0", "ipv6/conf/eth0/accept_ra": "1",
		"ipv6/conf/ra0/accept_ra": "2", "ipv6/conf/off0/accept_ra": "0", "ipv6/conf/kube-bridge/accept_ra": "1",
	} {
		must(t, os.WriteFile("/proc/sys/net/"+key, []byte(value), 0o644))
	}
	h := newHost(t)
	check := func(want map[string]string) {
		t.Helper()
		for key, value := range want {
			if got := sysctlOf(t, key); got != value {
				t.Errorf("%s is %s, want %s", key, got, value)
			}
		}
	}
	mustApply(t, h, mesh.State{Forward4: true})
	check(map[string]string{"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "0", "ipv6/conf/eth0/accept_ra": "1"})
	both := mesh.State{Forward4: true, Forward6: true}
	mustApply(t, h, both)
	want := map[string]string{
		"ipv4/ip_forward": "1", "ipv6/conf/all/forwarding": "1", "ipv6/conf/eth0/accept_ra": "2",
		"ipv6/conf/ra0/accept_ra": "2", "ipv6/conf/off0/accept_ra": "0", "ipv6/conf/kube-bridge/accept_ra": "1",
	}
	check(want)
	mustBeQuiet(t, h, both)
	must(t, h.CleanUp(t.Context(), true)) // others may need it by now
	check(want)
}
