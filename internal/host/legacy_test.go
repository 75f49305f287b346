// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// addLegacyRoutes adds what an agent of another release has on the node of
// watchedState: to destinations that we have routes to, and to others.
func addLegacyRoutes(t *testing.T) {
	t.Helper()
	eth := linkByName(t, "eth0").Attrs().Index
	tunnel := linkByName(t, "tunl0").Attrs().Index
	for _, r := range []netlink.Route{
		{Dst: ipNet(pfx("10.7.0.0/16")), LinkIndex: eth, Gw: ip("192.168.1.2").AsSlice(), Flags: unix.RTNH_F_ONLINK},
		{Dst: ipNet(pfx("10.4.0.1/32")), LinkIndex: eth, Gw: ip("192.168.1.2").AsSlice(), Flags: unix.RTNH_F_ONLINK},
		{Dst: ipNet(pfx("10.2.9.0/24")), LinkIndex: tunnel, Gw: ip("192.168.2.9").AsSlice(), Src: ip("192.168.1.1").AsSlice(), Flags: unix.RTNH_F_ONLINK},
		{Dst: ipNet(pfx("192.168.2.9/32")), LinkIndex: tunnel, Gw: ip("192.168.2.9").AsSlice(), Flags: unix.RTNH_F_ONLINK, Table: mesh.TableTunnel},
		{Dst: ipNet(pfx("192.168.2.8/32")), LinkIndex: tunnel, Gw: ip("192.168.2.8").AsSlice(), Flags: unix.RTNH_F_ONLINK, Table: mesh.TableTunnel},
		{Dst: ipNet(pfx("fd07::/64")), LinkIndex: eth, Gw: ip("fd01::2").AsSlice(), Flags: unix.RTNH_F_ONLINK},
	} {
		r.Protocol = unix.RTPROT_STATIC
		must(t, netlink.RouteAdd(&r))
	}
	for _, c := range []mesh.Rule{{From: pfx("10.2.1.0/24"), To: pfx("192.168.2.9/32")}, {To: pfx("192.168.2.8/32"), IIf: "kilo0"}} {
		r := netlink.NewRule()
		r.Family, r.Table, r.IifName, r.Dst = unix.AF_INET, mesh.TableTunnel, c.IIf, ipNet(c.To)
		if c.From.IsValid() {
			r.Src = ipNet(c.From)
		}
		must(t, netlink.RuleAdd(r))
	}
}

// addUserRoutes adds what looks a little like it, and is the user's.
func addUserRoutes(t *testing.T) {
	t.Helper()
	eth := linkByName(t, "eth0").Attrs().Index
	gw := ip("192.168.1.9").AsSlice()
	for _, r := range []netlink.Route{
		{Dst: ipNet(pfx("0.0.0.0/0")), Gw: gw, Flags: unix.RTNH_F_ONLINK, Protocol: unix.RTPROT_STATIC},
		{Dst: ipNet(pfx("172.16.0.0/12")), Gw: gw, Flags: unix.RTNH_F_ONLINK, Protocol: unix.RTPROT_STATIC}, // outside the mesh
		{Dst: ipNet(pfx("10.4.7.0/24")), Gw: gw, Protocol: unix.RTPROT_STATIC},                              // without onlink
		{Dst: ipNet(pfx("10.4.8.0/24")), Gw: gw, Flags: unix.RTNH_F_ONLINK, Protocol: unix.RTPROT_BOOT},
		{Dst: ipNet(pfx("10.4.9.0/24")), Gw: gw, Flags: unix.RTNH_F_ONLINK, Protocol: unix.RTPROT_STATIC, Priority: 77},
		{Dst: ipNet(pfx("10.4.10.0/24")), Gw: gw, Flags: unix.RTNH_F_ONLINK, Protocol: unix.RTPROT_STATIC, Table: 99},
		{Dst: ipNet(pfx("10.4.11.0/24")), Gw: gw, Protocol: unix.RTPROT_BIRD, Table: mesh.TableTunnel},
	} {
		r.LinkIndex = eth
		must(t, netlink.RouteAdd(&r))
	}
	r := netlink.NewRule()
	r.Family, r.Table, r.Dst = unix.AF_INET, 99, ipNet(pfx("192.168.2.9/32"))
	must(t, netlink.RuleAdd(r))
	r.Table, r.Protocol = mesh.TableTunnel, unix.RTPROT_STATIC
	must(t, netlink.RuleAdd(r))
}

// watchedState is that of a node with routes and rules of all kinds.
func watchedState() mesh.State {
	s := vxlanState(1)
	s.Routes = append(s.Routes,
		mesh.Route{Dst: pfx("10.7.0.0/16"), Via: ip("192.168.1.2"), Dev: "eth0", Src: ip("192.168.1.1"), Table: mesh.TableMain, OnLink: true},
		mesh.Route{Dst: pfx("192.168.2.9/32"), Via: ip("192.168.2.9"), Dev: "eth0", Table: mesh.TableTunnel, OnLink: true},
		mesh.Route{Dst: pfx("fd07::/64"), Dev: "eth0", Table: mesh.TableMain},
	)
	s.Rules = []mesh.Rule{{From: pfx("10.2.1.0/24"), To: pfx("192.168.2.9/32"), Table: mesh.TableTunnel}, {From: pfx("fd00:1::/64"), To: pfx("fd09::9/128"), Table: mesh.TableTunnel}}
	return sorted(s)
}

// legacyState is watchedState on a host where the other agent was.
func legacyState() mesh.State {
	s := watchedState()
	s.Firewall.Known = []netip.Prefix{pfx("10.2.0.0/16"), pfx("10.4.0.0/16")}
	return sorted(s)
}

func TestOtherReleasesRoutesGoAndUsersStay(t *testing.T) {
	nettest.SkipInVM(t) // which has a tunl0, and not what iptables needs
	nettest.New(t)
	uplink(t)
	nettest.Dummy(t, "tunl0")
	addUserRoutes(t)
	before := nettest.World(t)
	nettest.Up(t, "tunl0", "10.2.1.0/32")
	addLegacyRoutes(t)
	h := newHost(t)
	mustApply(t, h, legacyState())

	p := &pass{h: h, ctx: t.Context(), want: legacyState()}
	must(t, p.observeLinks())
	var routes, rules []string
	for _, r := range nettest.Must(p.observeRoutes())(t) {
		routes = append(routes, r.String())
	}
	checkSet(t, "routes", texts(legacyState().Routes), routes)
	for _, r := range nettest.Must(p.observeRules())(t) {
		rules = append(rules, r.String())
	}
	checkSet(t, "rules", texts(legacyState().Rules), rules)
	mustBeQuiet(t, h, legacyState())
	mustBeQuiet(t, newHost(t), legacyState())

	must(t, h.CleanUp(t.Context(), true))
	const tunl0 = "link tunl0 type veth mtu 1500 up "
	before = strings.Replace(before, tunl0+"true", tunl0+"false", 1)
	if diff := cmp.Diff(strings.Split(before, "\n"), strings.Split(nettest.World(t), "\n")); diff != "" {
		t.Errorf("what is the user's (-before +after):\n%s", diff)
	}
}

func TestNoPacketIsLostWhenOtherReleasesRoutesAreReplaced(t *testing.T) {
	nettest.SkipInVM(t) // which has a tunl0, and not what iptables needs
	one, two := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, one, "eth0", "192.168.1.1/24", two, "eth0", "192.168.1.2/24")
	const at = "10.7.0.1"
	two.Do(t, func() {
		nettest.Up(t, "lo", at+"/32")
		echo(t, at+":9")
	})
	one.Do(t, func() {
		nettest.Up(t, "eth0", "fd01::1/64")
		nettest.Dummy(t, "tunl0")
		addLegacyRoutes(t)
		addLegacyChains(t)
		c := nettest.Must(net.Dial("udp", at+":9"))(t)
		defer c.Close()
		round := func() error {
			if _, err := c.Write([]byte("x")); err != nil {
				return err
			}
			if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
				return err
			}
			_, err := c.Read(make([]byte, 1))
			return err
		}
		must(t, round())
		stop, done := make(chan struct{}), make(chan error, 1)
		go func() {
			for {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				if err := round(); err != nil {
					done <- err
					return
				}
			}
		}()
		mustApply(t, newHost(t), legacyState())
		close(stop)
		if err := <-done; err != nil {
			t.Errorf("a packet was lost: %v", err)
		}
		if err := round(); err != nil {
			t.Errorf("after it: %v", err)
		}
	})
}

// addLegacyChains makes what iptables-nft(8) 1.8.9 makes of the rules of the
// other agent, and some rules of the host.
func addLegacyChains(t *testing.T) {
	t.Helper()
	nft := nettest.Must(nftables.New())(t)
	comment := func(text string) expr.Any {
		c := xt.Comment(text)
		return &expr.Match{Name: "comment", Info: &c}
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		filter, nat := &nftables.Table{Family: family, Name: "filter"}, &nftables.Table{Family: family, Name: "nat"}
		nft.AddTable(filter)
		nft.AddTable(nat)
		chain := func(table *nftables.Table, name string, hook *nftables.ChainHook) *nftables.Chain {
			c := &nftables.Chain{Table: table, Name: name}
			if hook != nil {
				c.Hooknum, c.Priority, c.Type = hook, nftables.ChainPriorityFilter, nftables.ChainTypeFilter
				if table == nat {
					c.Priority, c.Type = nftables.ChainPriorityNATSource, nftables.ChainTypeNAT
				}
			}
			return nft.AddChain(c)
		}
		rule := func(c *nftables.Chain, exprs ...expr.Any) {
			nft.AddRule(&nftables.Rule{Table: c.Table, Chain: c, Exprs: exprs})
		}
		accept, drop := &expr.Verdict{Kind: expr.VerdictAccept}, &expr.Verdict{Kind: expr.VerdictDrop}
		jump := func(to string) expr.Any { return &expr.Verdict{Kind: expr.VerdictJump, Chain: to} }
		ipip := chain(filter, "KILO-IPIP", nil)
		rule(ipip, comment("Kilo: allow IPIP traffic"), &expr.Counter{}, accept)
		input := chain(filter, "INPUT", nftables.ChainHookInput)
		rule(input, comment("Kilo: jump to IPIP chain"), &expr.Counter{}, jump("KILO-IPIP"))
		rule(input, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Register: 1, Data: []byte{4}}, comment("Kilo: reject other IPIP traffic"), &expr.Counter{}, drop)
		rule(input, comment("the host's own"), &expr.Counter{}, accept)
		forward := chain(filter, "FORWARD", nftables.ChainHookForward)
		rule(forward, comment("Kilo: forward packets from the pod subnet"), accept)
		rule(forward, &expr.Counter{})
		chain(nat, "KILO-NAT", nil)
		post := chain(nat, "POSTROUTING", nftables.ChainHookPostrouting)
		rule(post, comment("Kilo: jump to KILO-NAT chain"), &expr.Counter{}, jump("KILO-NAT"))
		rule(post, comment("kubernetes postrouting rules"), &expr.Counter{})
	}
	must(t, nft.Flush())
}

func TestOtherReleasesChainsGoAndUsersStay(t *testing.T) {
	nettest.SkipInVM(t) // which has a tunl0, and not what iptables needs
	nettest.New(t)
	uplink(t)
	addLegacyChains(t)
	h := newHost(t)
	mustApply(t, h, watchedState())
	var got []string
	for _, l := range lines(nettest.World(t), "chain ") {
		if !strings.HasPrefix(l, "chain kilo ") {
			got = append(got, l)
		}
	}
	want := []string{"chain filter FORWARD rules 1", "chain filter INPUT rules 1", "chain nat POSTROUTING rules 1"}
	if want = slices.Sorted(slices.Values(append(want, want...))); !slices.Equal(got, want) {
		t.Errorf("chains %q, want %q", got, want)
	}
	mustBeQuiet(t, h, watchedState())
	mustBeQuiet(t, newHost(t), watchedState())
}

func TestWatchSeesAnotherReleaseComeBack(t *testing.T) {
	nettest.SkipInVM(t) // which has a tunl0, and not what iptables needs
	for name, come := range map[string]func(t *testing.T){"chains": addLegacyChains, "routes": addLegacyRoutes} {
		t.Run(name, func(t *testing.T) {
			ns := nettest.New(t)
			uplink(t)
			nettest.Dummy(t, "tunl0")
			s := legacyState()
			s.Routes = slices.DeleteFunc(s.Routes, func(r mesh.Route) bool {
				return r.Dst == pfx("10.7.0.0/16") || r.Dst == pfx("fd07::/64") || r.Table != mesh.TableMain
			})
			h := newHost(t)
			mustApply(t, h, s)
			k := keep(t, ns, h, s)
			come(t)
			nettest.Await(t, "removal of the other release's "+name, func() bool {
				k.mu.Lock() // no pass is under way
				defer k.mu.Unlock()
				world := nettest.World(t)
				return len(lines(world, "KILO-"))+len(lines(world, "tunl0 src")) == 0
			})
		})
	}
}

// iptablesScript is what the other agent tells iptables(8).
const iptablesScript = `*filter
:KILO-IPIP - [0:0]
-A KILO-IPIP -s 192.168.1.1/32 -m comment --comment "Kilo: allow IPIP traffic" -j ACCEPT
-A INPUT -p 4 -m comment --comment "Kilo: jump to IPIP chain" -j KILO-IPIP
-A INPUT -p 4 -m comment --comment "Kilo: reject other IPIP traffic" -j DROP
-A INPUT -p tcp -m comment --comment "not Kilo: it's \"quoted\"" -j ACCEPT
-A FORWARD -s 10.42.0.0/24 -m comment --comment "Kilo: forward packets from the node's pod subnet" -j ACCEPT
COMMIT
*nat
:KILO-NAT - [0:0]
-A KILO-NAT -d 10.43.0.0/16 -m comment --comment "Kilo: do not NAT packets destined for service CIDRs" -j RETURN
-A KILO-NAT -m comment --comment "Kilo: NAT remaining packets" -j MASQUERADE
-A POSTROUTING -s 10.42.0.0/24 -m comment --comment "Kilo: jump to KILO-NAT chain" -j KILO-NAT
-A POSTROUTING -s 10.44.0.0/24 -j MASQUERADE
COMMIT
`

func TestOtherReleasesRulesGoWhicheverIptablesMadeThem(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			program := "iptables-" + kind
			if _, err := exec.LookPath(program + "-restore"); err != nil {
				nettest.SkipInVM(t)
				nettest.Skip(t, "no "+program)
			}
			nettest.New(t)
			uplink(t)
			iptables := func(stdin, suffix string, args ...string) string {
				return nettest.Must(runProgram(t.Context(), stdin, program+suffix, args...))(t)
			}
			iptables(iptablesScript, "-restore")
			h := newHost(t)
			mustApply(t, h, watchedState())
			var got []string
			for l := range strings.Lines(iptables("", "-save")) {
				if strings.HasPrefix(l, "-A") || strings.Contains(l, "KILO") {
					got = append(got, strings.TrimSpace(l))
				}
			}
			want := []string{`-A INPUT -p tcp -m comment --comment "not Kilo: it\'s \"quoted\"" -j ACCEPT`, "-A POSTROUTING -s 10.44.0.0/24 -j MASQUERADE"}
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("rules (-want +got):\n%s", diff)
			}
			mustBeQuiet(t, h, watchedState())
			mustBeQuiet(t, newHost(t), watchedState())
		})
	}
}

func TestLegacyScript(t *testing.T) {
	for name, c := range map[string]struct{ saved, want string }{
		"nothing of it":                   {saved: "*nat\n:POSTROUTING ACCEPT [0:0]\n-A POSTROUTING -j MASQUERADE\nCOMMIT\n"},
		"a comment in a chain of another": {saved: "*nat\n:X - [0:0]\n-A X -m comment --comment \"Kilo: mine\" -j RETURN\nCOMMIT\n"},
		"jump and chain": {
			saved: "# Generated\n*nat\n:POSTROUTING ACCEPT [5:300]\n:KILO-NAT - [0:0]\n-A POSTROUTING -s 10.2.0.0/24 -j KILO-NAT\n-A KILO-NAT -j MASQUERADE\nCOMMIT\n",
			want:  "*nat\n-D POSTROUTING -s 10.2.0.0/24 -j KILO-NAT\n-F KILO-NAT\n-X KILO-NAT\nCOMMIT\n",
		},
		"a rule of its alone": {
			saved: "*nat\n-A POSTROUTING -p ipencap -m comment --comment \"Kilo: reject other IPIP traffic\" -j DROP\nCOMMIT\n",
			want:  "*nat\n-D POSTROUTING -p ipencap -m comment --comment \"Kilo: reject other IPIP traffic\" -j DROP\nCOMMIT\n",
		},
	} {
		if got := legacyScript("nat", c.saved); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
