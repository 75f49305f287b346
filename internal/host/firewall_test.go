// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

var update = flag.Bool("update", false, "write golden files")

// firewalls are the cases of golden tests, also tried on the kernel.
func firewalls() map[string]mesh.Firewall {
	return map[string]mesh.Firewall{
		"empty": {},
		"full":  fullState().Firewall,
		"everything": sorted(mesh.State{Firewall: mesh.Firewall{
			MasqueradeFrom: []netip.Prefix{pfx("0.0.0.0/0"), pfx("::/0")},
			Known:          []netip.Prefix{pfx("10.0.0.0/25"), pfx("10.0.0.128/25"), pfx("10.0.1.0/24"), pfx("10.0.2.0/32"), pfx("255.255.255.255/32"), pfx("0.0.0.0/8"), pfx("ffff::/16"), pfx("fd00::1/128")},
			TunnelFrom:     []netip.Prefix{pfx("192.168.0.0/16"), pfx("fd01::1/128"), pfx("fd01::2/127")},
		}}).Firewall,
		"VXLAN":       {TunnelPort: mesh.VXLANPort, TunnelFrom: []netip.Prefix{pfx("192.168.0.1/32"), pfx("fd01::1/128")}},
		"clamp":       {ClampDevs: []string{"kilo0", "tunl0"}},
		"strict":      {Sealed: []netip.Prefix{pfx("10.2.2.0/24"), pfx("fd00:2:2::/64")}, SealedDevs: []string{"kilo0", "tunl0"}},
		"IPv6 tunnel": {TunnelFrom: []netip.Prefix{pfx("fd01::1/128")}},
	}
}

func TestFirewallText(t *testing.T) {
	for name, f := range firewalls() {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join("testdata", "firewall-"+strings.ReplaceAll(name, " ", "-")+".nft")
			got := FirewallText(f)
			if *update {
				nettest.NoErr(t, os.WriteFile(path, []byte(got), 0o644))
			}
			want := string(nettest.Must(os.ReadFile(path))(t))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestFirewallTextIsWhatNFTPrints(t *testing.T) {
	nft, err := exec.LookPath("nft")
	if err != nil {
		nettest.Skip(t, "there is no program nft")
	}
	for name, f := range firewalls() {
		t.Run(name, func(t *testing.T) {
			nettest.New(t)
			s := firewallState(f)
			mustApply(t, newHost(t), s)
			out := nettest.Must(exec.Command(nft, "-nn", "list", "table", "inet", "kilo").CombinedOutput())(t)
			if diff := cmp.Diff(words(FirewallText(s.Firewall)), words(string(out))); diff != "" {
				t.Errorf("(-ours +nft's)\n%s", diff)
			}
		})
	}
}

// words cuts nft's text up so that neither layout nor comments nor names of numbers count.
func words(text string) []string {
	var out []string
	for line := range strings.SplitSeq(text, "\n") {
		line, _, _ = strings.Cut(line, ` comment "`)
		line = strings.NewReplacer("priority srcnat", "priority 100", "priority filter", "priority 0", "priority raw", "priority -300", "priority mangle", "priority -150", "ipencap", "4", " 0x2 ", " syn ", "ipv6 ", "41 ", ",", " , ").Replace(line)
		out = append(out, strings.Fields(line)...)
	}
	return out
}

// firewallState asks for a firewall, and so for its table, with no link beside it.
func firewallState(f mesh.Firewall) mesh.State {
	if len(f.Known)+len(f.MasqueradeFrom)+len(f.MasqueradeTo)+len(f.TunnelFrom) == 0 {
		f.Known = []netip.Prefix{pfx("192.0.2.0/24")}
	}
	return sorted(mesh.State{Firewall: f})
}

// checkFirewall compares the table in the kernel with the one desired.
func checkFirewall(t *testing.T, f mesh.Firewall) {
	t.Helper()
	conn := nettest.Must(nftables.New())(t)
	have := nettest.Must(observeTable(conn))(t)
	want := firewallTable(f)
	if have == nil || !have.sameShape(want) {
		t.Fatalf("table %+v, want %+v", have, want)
	}
	for _, s := range want.sets {
		if ranges := slices.Collect(s.ranges); !slices.Equal(ranges, have.sets[s.name].ranges) {
			t.Errorf("set %s: got %v, want %v", s.name, have.sets[s.name].ranges, ranges)
		}
	}
}

func TestFirewallConvergesBetweenAllCases(t *testing.T) {
	nettest.New(t)
	h := newHost(t)
	for from := range firewalls() {
		for to, f := range firewalls() {
			mustApply(t, h, firewallState(firewalls()[from]))
			s := firewallState(f)
			mustApply(t, h, s)
			checkFirewall(t, s.Firewall)
			mustBeQuiet(t, newHost(t), s)
			if t.Failed() {
				t.Fatalf("from %q to %q", from, to)
			}
		}
	}
	mustApply(t, h, mesh.State{})
	if got := lines(nettest.World(t), "table"); len(lines(strings.Join(got, "\n"), " kilo")) > 0 {
		t.Errorf("table is there without need:\n%s", got)
	}
}

func TestFirewallElementsAreUpdatedInPlace(t *testing.T) {
	nettest.New(t)
	h := newHost(t)
	prefixes := func(n int) []netip.Prefix {
		var out []netip.Prefix
		for i := range n {
			out = append(out, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 0}), 24), netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, byte(i >> 7), byte(i << 1)}), 32))
		}
		return out
	}
	s := firewallState(mesh.Firewall{Known: prefixes(3000)})
	mustApply(t, h, s)
	checkFirewall(t, s.Firewall)
	mustBeQuiet(t, h, s)

	// One range grows, one shrinks, one goes, one comes, in both families.
	known := s.Firewall.Known[4:]
	known = append(known, pfx("10.0.5.0/24"), pfx("10.200.0.0/16"), pfx("fd00:500::/24"), pfx("255.0.0.0/8"))
	s = firewallState(mesh.Firewall{Known: known})
	before := h.Writes()
	changes := mustApply(t, h, s)
	checkFirewall(t, s.Firewall)
	if len(changes) != 2 || changes[0].Kind != KindSet || h.Writes()-before != 1 {
		t.Errorf("%d writes, changes %v; want one transaction for two sets", h.Writes()-before, changes)
	}
	s = firewallState(mesh.Firewall{Known: prefixes(1)})
	mustApply(t, h, s)
	checkFirewall(t, s.Firewall)
}

func TestFirewallOfOthersDoingIsPutRight(t *testing.T) {
	for name, tamper := range map[string]func(c *nftables.Conn, table *nftables.Table, chain *nftables.Chain){
		"rules flushed": func(c *nftables.Conn, _ *nftables.Table, chain *nftables.Chain) { c.FlushChain(chain) },
		"table deleted": func(c *nftables.Conn, table *nftables.Table, _ *nftables.Chain) { c.DelTable(table) },
		"rule added": func(c *nftables.Conn, table *nftables.Table, chain *nftables.Chain) {
			c.AddRule(&nftables.Rule{Table: table, Chain: chain})
		},
		"chain added": func(c *nftables.Conn, table *nftables.Table, _ *nftables.Chain) {
			c.AddChain(&nftables.Chain{Table: table, Name: "more"})
		},
		"set flushed": func(c *nftables.Conn, table *nftables.Table, _ *nftables.Chain) {
			c.FlushSet(&nftables.Set{Table: table, Name: "known4"})
		},
		"set of another kind": func(c *nftables.Conn, table *nftables.Table, _ *nftables.Chain) {
			c.DelTable(table)
			c.AddTable(table)
			_ = c.AddSet(&nftables.Set{Table: table, Name: "known4", KeyType: nftables.TypeIPAddr}, []nftables.SetElement{{Key: []byte{10, 0, 0, 1}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			nettest.New(t)
			h := newHost(t)
			s := firewallState(fullState().Firewall)
			mustApply(t, h, s)
			conn := nettest.Must(nftables.New())(t)
			tamper(conn, kiloTable(), &nftables.Chain{Table: kiloTable(), Name: "postrouting"})
			must(t, conn.Flush())
			mustApply(t, h, s)
			checkFirewall(t, s.Firewall)
			mustBeQuiet(t, h, s)
		})
	}
}

// source sends a datagram from a bound address and returns where it seems to come from at the other end.
func source(t *testing.T, from, to *nettest.NS, src, dst string) string {
	t.Helper()
	var server net.PacketConn
	to.Do(t, func() { server = nettest.Must(net.ListenPacket("udp", net.JoinHostPort(dst, "7")))(t) })
	defer server.Close()
	var who net.Addr
	from.Do(t, func() {
		c := nettest.Must(net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(ip(src), 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(ip(dst), 7))))(t)
		defer c.Close()
		nettest.Await(t, "datagram to "+dst, func() bool { // neighbour discovery loses one, perhaps
			_, err := c.Write([]byte("x"))
			must(t, err)
			must(t, server.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
			_, who, err = server.ReadFrom(make([]byte, 1))
			return err == nil
		})
	})
	return who.(*net.UDPAddr).AddrPort().Addr().Unmap().String()
}

func TestFirewallMasqueradesWhatLeavesTheMesh(t *testing.T) {
	a, b := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	a.Do(t, func() {
		nettest.Up(t, "eth0", "2001:db8::1/64")
		nettest.Dummy(t, "pods", "10.2.1.1/24", "fd00:2:1::1/64", "172.16.0.1/24")
		mustApply(t, newHost(t), firewallState(mesh.Firewall{
			MasqueradeFrom: []netip.Prefix{pfx("10.2.1.0/24"), pfx("fd00:2:1::/64")},
			MasqueradeTo:   []netip.Prefix{pfx("192.0.2.96/28")},
			Known:          []netip.Prefix{pfx("192.0.2.3/32"), pfx("2001:db8::3/128")},
		}))
	})
	b.Do(t, func() {
		nettest.Up(t, "eth0", "192.0.2.3/24", "192.0.2.100/24", "2001:db8::2/64", "2001:db8::3/64")
		nettest.NoErr(t, addRoutes("192.0.2.1", "10.2.1.0/24", "172.16.0.0/24"))
	})
	for _, c := range []struct{ src, dst, want string }{
		{"10.2.1.1", "192.0.2.2", "192.0.2.1"},
		{"10.2.1.1", "192.0.2.3", "10.2.1.1"},
		{"172.16.0.1", "192.0.2.2", "172.16.0.1"},
		{"172.16.0.1", "192.0.2.100", "192.0.2.1"},
		{"fd00:2:1::1", "2001:db8::2", "2001:db8::1"},
		{"fd00:2:1::1", "2001:db8::3", "fd00:2:1::1"},
	} {
		if got := source(t, a, b, c.src, c.dst); got != c.want {
			t.Errorf("%s to %s came from %s, want %s", c.src, c.dst, got, c.want)
		}
	}
}

func TestFirewallLetsTunnelPacketsInFromMembersOnly(t *testing.T) {
	a, b := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	a.Do(t, func() { nettest.Up(t, "eth0", "192.0.2.11/24", "2001:db8::1/64", "2001:db8::11/64") })
	b.Do(t, func() {
		nettest.Up(t, "eth0", "2001:db8::2/64")
		mustApply(t, newHost(t), firewallState(mesh.Firewall{TunnelFrom: []netip.Prefix{pfx("192.0.2.1/32"), pfx("2001:db8::1/128")}}))
	})
	for _, c := range []struct {
		network, dst, member, stranger string
	}{
		{"ip4:4", "192.0.2.2", "192.0.2.1", "192.0.2.11"},
		{"ip6:4", "2001:db8::2", "2001:db8::1", "2001:db8::11"},
		{"ip6:41", "2001:db8::2", "2001:db8::1", "2001:db8::11"},
	} {
		var server net.PacketConn
		b.Do(t, func() { server = nettest.Must(net.ListenPacket(c.network, c.dst))(t) })
		a.Do(t, func() {
			for _, src := range []string{c.stranger, c.member} {
				conn := nettest.Must(net.DialIP(c.network, &net.IPAddr{IP: ip(src).AsSlice()}, &net.IPAddr{IP: ip(c.dst).AsSlice()}))(t)
				_, err := conn.Write([]byte(src))
				must(t, err)
				must(t, conn.Close())
			}
		})
		must(t, server.SetReadDeadline(time.Now().Add(5*time.Second)))
		buf := make([]byte, 100)
		n, _, err := server.ReadFrom(buf)
		must(t, err)
		if got := string(buf[:n]); got != c.member {
			t.Errorf("%s: the first packet that came through is from %s, want %s", c.network, got, c.member)
		}
		must(t, server.Close())
	}
}

func TestRangesSurviveElements(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v6 := rapid.Bool().Draw(t, "IPv6")
		var ps []netip.Prefix
		for range rapid.IntRange(0, 20).Draw(t, "prefixes") {
			if v6 {
				b := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 2, 254, 255}), 16, 16).Draw(t, "bytes")
				ps = append(ps, netip.PrefixFrom(netip.AddrFrom16([16]byte(b)), rapid.IntRange(0, 128).Draw(t, "bits")).Masked())
			} else {
				b := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 2, 254, 255}), 4, 4).Draw(t, "bytes")
				ps = append(ps, netip.PrefixFrom(netip.AddrFrom4([4]byte(b)), rapid.IntRange(0, 32).Draw(t, "bits")).Masked())
			}
		}
		compact := func(ps []netip.Prefix) []netip.Prefix {
			s := mesh.State{Firewall: mesh.Firewall{Known: slices.Clone(ps)}}
			s.Sort()
			return s.Firewall.Known
		}
		var set netipx.IPSetBuilder
		for _, p := range ps {
			set.AddPrefix(p)
		}
		oracle, err := set.IPSet()
		if err != nil {
			t.Fatal(err)
		}
		want := oracle.Ranges()
		if got := slices.Collect(rangesOf(compact(ps), v6)); !slices.Equal(got, want) {
			t.Fatalf("ranges of %v: %v, want %v", ps, got, want)
		}
		elements := elementsOf(want)
		rand := rapid.Permutation(elements).Draw(t, "order")
		got, ok := rangesFrom(rand, v6)
		if !ok || !slices.Equal(got, want) {
			t.Fatalf("got %v %t, want %v", got, ok, want)
		}
		// Whatever there was, what is added and deleted leads to what is wanted.
		other := slices.Collect(rangesOf(compact(ps[:len(ps)/2]), v6))
		add, del := diffRanges(slices.Values(want), other)
		left := slices.DeleteFunc(slices.Clone(other), func(r netipx.IPRange) bool { return slices.Contains(del, r) })
		left = append(left, add...)
		slices.SortFunc(left, func(a, b netipx.IPRange) int { return a.From().Compare(b.From()) })
		if !slices.Equal(left, want) {
			t.Fatalf("from %v: got %v, want %v", other, left, want)
		}
	})
}

func TestRangesFromRefusesOtherElements(t *testing.T) {
	for _, c := range []struct {
		elements []nftables.SetElement
		ok       bool
	}{
		{[]nftables.SetElement{{Key: []byte{0, 0, 0, 0}, IntervalEnd: true}, {Key: []byte{10, 0, 0, 0}}, {Key: []byte{11, 0, 0, 0}, IntervalEnd: true}}, true},
		{[]nftables.SetElement{{Key: []byte{10, 0, 0, 0}, IntervalEnd: true}}, false},
		{[]nftables.SetElement{{Key: []byte{10, 0, 0, 0}}, {Key: []byte{11, 0, 0, 0}}}, false},
		{[]nftables.SetElement{{Key: []byte{10}}}, false},
	} {
		if _, ok := rangesFrom(c.elements, false); ok != c.ok {
			t.Errorf("%v: ok %t, want %t", c.elements, ok, c.ok)
		}
	}
	if got := fmt.Sprint(lastAddr(true), lastAddr(false)); got != "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 255.255.255.255" {
		t.Error(got)
	}
}
