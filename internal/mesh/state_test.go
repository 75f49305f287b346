// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"bufio"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// matrixBlock is a block of testdata/route-matrix.txt.
type matrixBlock struct {
	host, compat, strategy string
	local                  bool
	lines                  []string
}

func readMatrix(t *testing.T) (blocks []matrixBlock) {
	t.Helper()
	f, err := os.Open("testdata/route-matrix.txt")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		line := strings.Join(strings.Fields(s.Text()), " ")
		switch {
		case line == "" || line[0] == '#':
		case strings.HasPrefix(line, "---"):
			var b matrixBlock
			var leader bool
			if _, err := fmt.Sscanf(line, "--- host=%1s leader=%t compat=%s strategy=%s local=%t", &b.host, &leader, &b.compat, &b.strategy, &b.local); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			blocks = append(blocks, b)
		default:
			b := &blocks[len(blocks)-1]
			b.lines = append(b.lines, line)
		}
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return blocks
}

// matrixLines prints what the matrix compares: destination, gateway, link,
// source, and which traffic a rule diverts.
func matrixLines(s State) (out []string) {
	dev := map[string]string{"kilo0": "kilo0", "eth0": "priv", "tunl0": "tunl", "flannel.1": "tunl"}
	orNil := func(a netip.Addr) string {
		if !a.IsValid() {
			return "<nil>"
		}
		return a.String()
	}
	for _, r := range s.Routes {
		table := r.Table
		if table == TableMain || table == TableAddOn { // the matrix allows for other tables
			table = 0
		}
		out = append(out, fmt.Sprintf("%s via %s dev %s src %s table %d onlink=%t", r.Dst, orNil(r.Via), dev[r.Dev], orNil(r.Src), table, r.OnLink))
	}
	for _, r := range s.Rules {
		if r.Table == TableAddOn {
			continue
		}
		from := "<nil>"
		if r.From.IsValid() {
			from = r.From.String()
		}
		out = append(out, fmt.Sprintf("rule from %s to %s iif %q table %d prio -1", from, r.To, r.IIf, r.Table))
	}
	slices.Sort(out)
	return out
}

// matrixMesh is the fixture that the matrix describes.
func matrixMesh() ([]Node, []Peer) {
	node := func(name, location, pods, internal string, k byte, endpoint string) Node {
		return Node{Name: name, Location: location, Endpoint: at(endpoint), ListenPort: 51820, InternalIPs: prefixes(internal), PodCIDRs: prefixes(pods), Key: key(k)}
	}
	a := node("a", "1", "10.2.1.0/24", "192.168.0.1/24", 1, "203.0.113.1")
	a.AllowedLocationIPs = prefixes("192.168.178.0/24")
	b := node("b", "2", "10.2.2.0/24", "192.168.1.1/24", 2, "203.0.113.2")
	b.WantsLead = true
	return []Node{a, b, node("c", "2", "10.2.3.0/24", "192.168.1.2/24", 3, "192.168.1.2"), node("e", "2", "10.2.5.0/24", "192.168.2.9/24", 5, "192.168.2.9")},
		[]Peer{{Name: "p", Key: key(9), AllowedIPs: prefixes("10.5.0.1/32")}}
}

func TestRouteMatrix(t *testing.T) {
	ran := 0
	for _, b := range readMatrix(t) {
		ran++
		t.Run(fmt.Sprintf("%s %s %s local=%t", b.host, b.compat, b.strategy, b.local), func(t *testing.T) {
			cfg := testConfig()
			cfg.Encapsulation, cfg.ManageLocal = Encapsulation(b.strategy), b.local
			nodes, peers := matrixMesh()
			if b.compat != "ipip" {
				cfg.AddOn, cfg.ManageCNI = AddOn(b.compat), false
				nodes[1].CNICompatibilityIPs, nodes[2].CNICompatibilityIPs = []netip.Addr{addr("10.244.0.7")}, []netip.Addr{addr("10.244.1.7")}
			}
			if refused := b.compat == "flannel" && b.strategy == "never"; refused != (cfg.Validate() != nil) {
				t.Fatalf("Validate() = %v, want refusal: %t", cfg.Validate(), refused)
			} else if refused {
				return
			}
			topology, problems := computed(t, cfg, nodes, peers)
			if len(problems) > 0 {
				t.Fatalf("problems %v", problems)
			}
			facts := map[string]Facts{"b": oneLink("192.168.1.1/24"), "c": oneLink("192.168.1.2/24")}
			slices.Sort(b.lines)
			if diff := cmp.Diff(b.lines, matrixLines(stateOf(t, topology, b.host, facts[b.host]))); diff != "" {
				t.Errorf("routes and rules (-want +got):\n%s", diff)
			}
		})
	}
	if ran != 36 {
		t.Errorf("%d blocks ran, want 36", ran)
	}
}

func TestStateOfALeader(t *testing.T) {
	nodes, peers := matrixMesh()
	peers[0].PersistentKeepalive = 10
	peers[0].PresharedKey = secret(7)
	cfg := testConfig()
	cfg.Encapsulation, cfg.ServiceCIDRs = EncapsulateCrossSubnet, prefixes("10.43.0.0/16")
	topology, _ := computed(t, cfg, nodes, peers)
	got := stateOf(t, topology, "b", oneLink("192.168.1.1/24")).String()
	want := `link kilo0 type wireguard mtu 1420 up
link tunl0 type ipip mtu 1480 up
addr 10.4.0.2/16 dev kilo0
addr 10.2.2.0/32 dev tunl0
route 10.2.1.0/24 via 10.4.0.1 dev kilo0 src 192.168.1.1 onlink
route 10.2.3.0/24 via 192.168.1.2 dev eth0 onlink
route 10.2.5.0/24 via 192.168.2.9 dev tunl0 src 192.168.1.1 onlink
route 10.5.0.1/32 dev kilo0 src 192.168.1.1
route 192.168.0.1/32 via 10.4.0.1 dev kilo0 src 192.168.1.1 onlink
route 192.168.178.0/24 via 10.4.0.1 dev kilo0 src 192.168.1.1 onlink
route 192.168.2.9/32 via 192.168.2.9 dev tunl0 src 192.168.1.1 table 1107 onlink
rule to 192.168.2.9/32 iif kilo0 lookup 1107
rule from 10.2.2.0/24 to 192.168.2.9/32 lookup 1107
wg listen-port 51820
wg peer AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE= # node/a endpoint 203.0.113.1:51820 allowed-ips 10.2.1.0/24,10.4.0.1/32,192.168.0.1/32,192.168.178.0/24
wg peer CQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE= # peer/p persistent-keepalive 10 preshared-key (hidden) allowed-ips 10.5.0.1/32
firewall masquerade from 10.2.2.0/24,10.5.0.1/32
firewall known 10.2.1.0/24,10.2.2.0/24,10.2.3.0/24,10.2.5.0/24,10.4.0.1/32,10.4.0.2/32,10.5.0.1/32,10.43.0.0/16,192.168.0.1/32,192.168.1.1/32,192.168.1.2/32,192.168.2.9/32
firewall tunnel from 192.168.1.1/32,192.168.1.2/32,192.168.2.9/32
firewall clamp devs kilo0,tunl0
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("State of b (-want +got):\n%s", diff)
	}
}

func TestStateOfAMemberHasADeviceThatReachesNobody(t *testing.T) {
	nodes, peers := matrixMesh()
	topology, _ := computed(t, testConfig(), nodes, peers)
	s := stateOf(t, topology, "c", oneLink("192.168.1.2/24"))
	if len(s.Device.Peers) != 0 || s.Device.PrivateKey.IsZero() {
		t.Errorf("device = %v with key %v, want a key and no peers", s.Device, !s.Device.PrivateKey.IsZero())
	}
	for _, l := range s.Links {
		if l.Kind == KindWireGuard && l.Up {
			t.Errorf("link = %v, want down", l)
		}
	}
	if slices.ContainsFunc(s.Addrs, func(a Addr) bool { return a.Dev == "kilo0" }) {
		t.Errorf("addresses = %v, want none on kilo0", s.Addrs)
	}
}

func TestDualStackStateHasBothFamilies(t *testing.T) {
	cfg := testConfig()
	cfg.WireGuardCIDRs = prefixes("10.4.0.0/16", "fd00:4::/64")
	nodes, peers := matrixMesh()
	for i, six := range []string{"fd01::1/64", "fd02::1/64", "fd02::2/64", "fd03::9/64"} {
		nodes[i].InternalIPs = append(nodes[i].InternalIPs, pfx(six))
		nodes[i].PodCIDRs = append(nodes[i].PodCIDRs, netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd10:%d::", i+1)), 64))
	}
	cfg.Encapsulation = EncapsulateCrossSubnet
	topology, problems := computed(t, cfg, nodes, peers)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	got := stateOf(t, topology, "c", oneLink("192.168.1.2/24", "fd02::2/64")).String()
	for _, want := range []string{
		"link tunl0 type ipip mtu 1480 up", "link tunl0-6 type ip6tnl mtu 1460 up",
		"route 10.2.1.0/24 via 192.168.1.1 dev eth0 onlink", "route fd10:1::/64 via fd02::1 dev eth0 onlink",
		"route fd00:4::1/128 via fd02::1 dev eth0 onlink", "route fd10:4::/64 via fd03::9 dev tunl0-6 src fd02::2 onlink",
		"rule from fd10:3::/64 to fd03::9/128 lookup 1107", "addr fd10:3::/128 dev tunl0-6",
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("State of c lacks %q:\n%s", want, got)
		}
	}
	got = stateOf(t, topology, "b", oneLink("192.168.1.1/24", "fd02::1/64")).String()
	for _, want := range []string{
		"addr 10.4.0.2/16 dev kilo0", "addr fd00:4::2/64 dev kilo0",
		"route fd10:1::/64 via fd00:4::1 dev kilo0 src fd02::1 onlink", "route fd01::1/128 via fd00:4::1 dev kilo0 src fd02::1 onlink",
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("State of b lacks %q:\n%s", want, got)
		}
	}
}

func TestVXLANCarriesBothFamiliesBetweenIPv4Addresses(t *testing.T) {
	cfg := testConfig()
	cfg.WireGuardCIDRs, cfg.Tunnel, cfg.VXLANDev = prefixes("10.4.0.0/16", "fd00:4::/64"), KindVXLAN, "kilo-vxlan"
	nodes, _ := matrixMesh()
	for i, six := range []string{"fd01::1/64", "fd02::1/64", "fd02::2/64", "fd03::9/64"} {
		nodes[i].InternalIPs = append(nodes[i].InternalIPs, pfx(six))
		nodes[i].PodCIDRs = append(nodes[i].PodCIDRs, netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd10:%d::", i+1)), 64))
	}
	topology, _ := computed(t, cfg, nodes, nil)
	c := stateOf(t, topology, "c", oneLink("192.168.1.2/24", "fd02::2/64"))
	mac := macOf(addr("192.168.1.1"))
	got := c.String()
	hop6 := fmt.Sprintf("fe80::%x:%xff:fe%02x:%x", uint16(mac[0]^2)<<8|uint16(mac[1]), mac[2], mac[3], uint16(mac[4])<<8|uint16(mac[5]))
	for _, want := range []string{
		fmt.Sprintf("link kilo-vxlan type vxlan id 4933964 local 192.168.1.2 dstport 4789 nolearning address %s mtu 1450 up", macOf(addr("192.168.1.2"))),
		"route 10.2.2.0/24 via 192.168.1.1 dev kilo-vxlan src 192.168.1.2 onlink",
		fmt.Sprintf("route fd10:2::/64 via %s dev kilo-vxlan src fd02::2", hop6),
		fmt.Sprintf("neigh 192.168.1.1 lladdr %s dev kilo-vxlan dst 192.168.1.1", mac),
		fmt.Sprintf("neigh %s lladdr %s dev kilo-vxlan dst 192.168.1.1", hop6, mac),
		"firewall tunnel from 192.168.1.1/32,192.168.1.2/32,192.168.2.9/32",
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("State of c lacks %q:\n%s", want, got)
		}
	}
	if mac[0]&3 != 2 {
		t.Errorf("MAC %s is not a local unicast address", mac)
	}
}

func TestVXLANTravelsInTheFamilyOfMostNodes(t *testing.T) {
	cfg := testConfig()
	cfg.WireGuardCIDRs, cfg.Tunnel, cfg.VXLANDev = prefixes("10.4.0.0/16", "fd00:4::/64"), KindVXLAN, "kilo-vxlan"
	nodes, _ := matrixMesh()
	nodes[1].InternalIPs = prefixes("192.168.1.1/24", "fd02::1/64")
	nodes[2].InternalIPs = prefixes("fd02::2/64")
	nodes[3].InternalIPs = prefixes("192.168.2.9/24", "fd02::9/64")
	for i := range nodes {
		nodes[i].PodCIDRs = []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd10:%d::", i+1)), 64)}
	}
	topology, _ := computed(t, cfg, nodes, nil)
	b := stateOf(t, topology, "b", oneLink("192.168.1.1/24", "fd02::1/64"))
	c, _, err := topology.State("c", secret(1), oneLink("fd02::2/64")) // its problem is that IPv4 is not for it
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []State{b, c} {
		for _, n := range s.Neighs {
			if n.Remote.Is4() {
				t.Errorf("next hop %v, want all over IPv6, which all nodes have", n)
			}
		}
	}
	if len(b.Neighs) != 3 || len(c.Neighs) != 2 { // b and e know each other in both families
		t.Errorf("next hops of b %v, of c %v", b.Neighs, c.Neighs)
	}
	// Without e as many have IPv4 as IPv6: then it is IPv4, and c is told what it lacks.
	nodes[3].InternalIPs = prefixes("192.168.2.9/24")
	topology, _ = computed(t, cfg, nodes, nil)
	_, problems, err := topology.State("c", secret(1), oneLink("fd02::2/64"))
	if err != nil || !slices.ContainsFunc(problems, func(p Problem) bool {
		return p.Object == "node/c" && strings.Contains(p.Err.Error(), "none for IPv4, which most nodes")
	}) {
		t.Errorf("problems of c = %v, %v; want its missing family named", problems, err)
	}
}

func TestCrossGivesEveryNodeTunnelsToOtherLocationsOnly(t *testing.T) {
	cfg := testConfig()
	cfg.Granularity, cfg.Encapsulation = GranularityCross, EncapsulateNever
	nodes, _ := matrixMesh()
	topology, problems := computed(t, cfg, nodes, nil)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	got := stateOf(t, topology, "c", oneLink("192.168.1.2/24")).String()
	want := `link kilo0 type wireguard mtu 1420 up
addr 10.4.0.3/16 dev kilo0
route 10.2.1.0/24 via 10.4.0.1 dev kilo0 onlink
route 10.2.2.0/24 via 192.168.1.1 dev eth0 onlink
route 10.2.5.0/24 via 192.168.2.9 dev eth0 onlink
route 10.4.0.2/32 via 192.168.1.1 dev eth0 onlink
route 10.4.0.4/32 via 192.168.2.9 dev eth0 onlink
route 192.168.0.1/32 via 10.4.0.1 dev kilo0 onlink
route 192.168.178.0/24 via 10.4.0.1 dev kilo0 onlink
wg listen-port 51820
wg peer AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE= # node/a endpoint 203.0.113.1:51820 allowed-ips 10.2.1.0/24,10.4.0.1/32,192.168.0.1/32,192.168.178.0/24
firewall masquerade from 10.2.3.0/24
firewall known 10.2.1.0/24,10.2.2.0/24,10.2.3.0/24,10.2.5.0/24,10.4.0.1/32,10.4.0.2/32,10.4.0.3/32,10.4.0.4/32,192.168.0.1/32,192.168.1.1/32,192.168.1.2/32,192.168.2.9/32
firewall clamp devs kilo0
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("State of c (-want +got):\n%s", diff)
	}
}

func TestPrefixAroundAnEndpointIsCut(t *testing.T) {
	nodes, _ := matrixMesh()
	nodes[0].AllowedLocationIPs = prefixes("203.0.113.0/29")
	topology, _ := computed(t, testConfig(), nodes, nil)
	var got []string
	for _, r := range stateOf(t, topology, "b", oneLink("192.168.1.1/24")).Routes {
		if r.Dst.Addr().Is4() && pfx("203.0.113.0/24").Contains(r.Dst.Addr()) {
			got = append(got, r.Dst.String())
		}
	}
	if want := []string{"203.0.113.0/32", "203.0.113.2/31", "203.0.113.4/30"}; !slices.Equal(got, want) {
		t.Errorf("routes to %q, want %q: all but the endpoint 203.0.113.1", got, want)
	}
}

func TestHolesAreCutOutOfRoutes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		six := rapid.Bool().Draw(t, "IPv6")
		prefix := func(label string) netip.Prefix {
			last := byte(rapid.IntRange(0, 255).Draw(t, label))
			bits := rapid.IntRange(0, 8).Draw(t, label+" bits")
			if six {
				return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 15: last}), 120+bits).Masked()
			}
			return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, last}), 24+bits).Masked()
		}
		p := &planner{t: &Topology{}, loc: &Location{}, self: &Node{}}
		for range rapid.IntRange(0, 5).Draw(t, "holes") {
			p.loc.owned = append(p.loc.owned, prefix("hole"))
		}
		seen := map[netip.Prefix]bool{}
		for i := range rapid.IntRange(1, 5).Draw(t, "routes") {
			dst := prefix("dst")
			if !seen[dst] {
				p.route(Route{Dst: dst, Dev: rapid.SampledFrom([]string{"kilo0", "kilo0", "eth0"}).Draw(t, "dev"), Src: netip.AddrFrom4([4]byte{byte(i)})})
			}
			seen[dst] = true
		}
		before := slices.Clone(p.state.Routes)
		for _, r := range before {
			if r.Dev == "eth0" {
				p.local = append(p.local, r)
			}
		}
		sortRoutes(p.local)
		p.state.Routes = slices.DeleteFunc(p.state.Routes, func(r Route) bool { return r.Dev == "eth0" })
		p.cut()
		p.state.Routes = mergeRoutes(p.state.Routes, p.local)
		if !slices.IsSortedFunc(p.state.Routes, Route.Compare) {
			t.Fatalf("not sorted: %v", p.state.Routes)
		}
		longest := func(routes []Route, a netip.Addr) (best Route) {
			for _, r := range routes {
				if r.Dst.Contains(a) && (!best.Dst.IsValid() || r.Dst.Bits() > best.Dst.Bits()) {
					best = r
				}
			}
			return best
		}
		for _, r := range before {
			for a := r.Dst.Addr(); r.Dst.Contains(a); a = a.Next() {
				want := longest(before, a)
				hole := slices.ContainsFunc(p.loc.owned, func(h netip.Prefix) bool { return h.Contains(a) && h.Bits() >= want.Dst.Bits() })
				if hole && want.Dev == "kilo0" {
					want = longest(p.local, a)
				}
				if got := longest(p.state.Routes, a); got.Src != want.Src || got.Dst.IsValid() != want.Dst.IsValid() {
					t.Fatalf("%v without %v is %v, which is wrong about %s", before, p.loc.owned, p.state.Routes, a)
				}
			}
		}
	})
}

func TestBroaderPrefixOfAnotherLocationIsCutAroundOurs(t *testing.T) {
	nodes, _ := matrixMesh()
	nodes[0].AllowedLocationIPs = prefixes("172.20.0.0/16")
	nodes[2].Location, nodes[1].Location, nodes[3].Location = "0", "0", "0"
	nodes[2].AllowedLocationIPs = prefixes("172.20.128.0/17")
	topology, _ := computed(t, testConfig(), nodes, nil)
	got := stateOf(t, topology, "b", oneLink("192.168.1.1/24")).String()
	if !strings.Contains(got, "route 172.20.0.0/17 via") || strings.Contains(got, "route 172.20.0.0/16") {
		t.Errorf("want the part of 172.20.0.0/16 that is not announced here:\n%s", got)
	}
}

func TestStateNeverMixesFamilies(t *testing.T) {
	cfg := testConfig()
	cfg.WireGuardCIDRs = prefixes("10.4.0.0/16", "fd00:4::/64")
	nodes, peers := matrixMesh()
	nodes[0].PodCIDRs = append(nodes[0].PodCIDRs, pfx("fd10:1::/64")) // but no IPv6 in location 2
	topology, _ := computed(t, cfg, nodes, peers)
	for _, name := range []string{"b", "c"} {
		s, problems, err := topology.State(name, secret(1), oneLink("192.168.1.1/24", "192.168.1.2/24"))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range s.Routes {
			if r.Via.IsValid() && r.Via.Is4() != r.Dst.Addr().Is4() || r.Src.IsValid() && r.Src.Is4() != r.Dst.Addr().Is4() {
				t.Errorf("State of %s: route %v mixes families", name, r)
			}
		}
		if name == "c" && len(problems) != 1 {
			t.Errorf("problems of c = %v, want the missing IPv6 internal IP once", problems)
		}
	}
}

func TestNoEndpointIsRoutedThroughTheTunnelThatCarriesIt(t *testing.T) {
	nodes := fourNodes()
	for i := range nodes {
		nodes[i].Endpoint.IP = nodes[0].InternalIPs[0].Addr()
	}
	nodes[0].InternalIPs = prefixes("192.168.9.1/32")
	nodes[3].Endpoint = at("192.168.9.1")
	topology, _ := computed(t, testConfig(), nodes, nil)
	for _, r := range stateOf(t, topology, "b", oneLink("192.168.0.1/32")).Routes {
		if r.Table == TableMain && r.Dev == "kilo0" && (r.Dst.Contains(addr("192.168.9.1")) || r.Dst.Contains(addr("192.168.0.1"))) {
			t.Errorf("route %v carries an endpoint", r)
		}
	}
}

func TestInternalIPOfALeaderBehindNATIsRoutedThroughTheMesh(t *testing.T) {
	nodes, _ := matrixMesh()
	nodes[0].Endpoint, nodes[0].PersistentKeepalive = at("192.168.0.1"), 25
	nodes[1].PersistentKeepalive = 25 // of its own, which says nothing about others
	topology, _ := computed(t, testConfig(), nodes, nil)
	got := stateOf(t, topology, "b", oneLink("192.168.1.1/24")).String()
	if !strings.Contains(got, "route 192.168.0.1/32 via 10.4.0.1 dev kilo0") || strings.Contains(got, "endpoint 192.168.0.1") {
		t.Errorf("want 192.168.0.1 to be reached through the mesh and no endpoint:\n%s", got)
	}
}

// Without NAT between two locations a leader that comes to us does so from its
// internal IP. Answers to there carry the tunnel, and cannot go through it; all
// else that is for the internal IP must.
func TestLeaderThatCameFromItsInternalIPIsReachedThere(t *testing.T) {
	nodes, _ := matrixMesh()
	nodes[0].Endpoint, nodes[0].PersistentKeepalive = at("192.168.0.1"), 25
	nodes[0].AllowedLocationIPs = prefixes("192.168.0.0/30")
	topology, _ := computed(t, testConfig(), nodes, nil)
	routes := func(seen map[PublicKey]netip.Addr) (out []string) {
		facts := oneLink("192.168.1.1/24")
		facts.PeerAddrs = seen
		for _, r := range stateOf(t, topology, "b", facts).Routes {
			if r.Dev == "kilo0" && pfx("192.168.0.0/24").Contains(r.Dst.Addr()) {
				out = append(out, fmt.Sprintf("%s table %d", r.Dst, r.Table))
			}
		}
		return out
	}
	whole := []string{"192.168.0.0/30 table 254", "192.168.0.1/32 table 254"}
	for _, tt := range []struct {
		name string
		seen map[PublicKey]netip.Addr
		want []string
	}{
		{"never heard", nil, whole},
		{"from behind NAT", map[PublicKey]netip.Addr{key(1): addr("198.51.100.9")}, whole},
		{"from its internal IP", map[PublicKey]netip.Addr{key(1): addr("192.168.0.1")}, []string{"192.168.0.0/32 table 254", "192.168.0.2/31 table 254", "192.168.0.1/32 table 1109"}},
		{"an unknown peer from there", map[PublicKey]netip.Addr{key(8): addr("192.168.0.1")}, whole},
	} {
		if got := routes(tt.seen); !slices.Equal(got, tt.want) {
			t.Errorf("%s: routes into the tunnel %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestNATedLeadersTryEachOther(t *testing.T) {
	nodes, _ := matrixMesh()
	nodes[0].Endpoint, nodes[0].PersistentKeepalive = at("192.168.0.1"), 25
	nodes[1].Endpoint, nodes[1].PersistentKeepalive = at("192.168.1.1"), 25
	topology, _ := computed(t, testConfig(), nodes, nil)
	if got := stateOf(t, topology, "b", oneLink("192.168.1.1/24")).String(); !strings.Contains(got, "endpoint 192.168.0.1:51820") {
		t.Errorf("want the private endpoint to be tried:\n%s", got)
	}
}

func TestMTUFollowsTheDefaultRoute(t *testing.T) {
	nodes, _ := matrixMesh()
	for _, tt := range []struct{ flag, link, want int }{{0, 1500, 1420}, {0, 9000, 8920}, {0, 1300, 1280}, {0, 0, 1420}, {1400, 9000, 1400}} {
		cfg := testConfig()
		cfg.MTU = tt.flag
		topology, _ := computed(t, cfg, nodes, nil)
		facts := oneLink("192.168.1.1/24")
		facts.DefaultMTU, facts.Addrs[0].MTU = tt.link, max(tt.link, 1500)
		if got := stateOf(t, topology, "b", facts).PodMTU; got != tt.want {
			t.Errorf("--mtu %d over a link of %d: MTU %d, want %d", tt.flag, tt.link, got, tt.want)
		}
	}
}

func TestCompactPrefixes(t *testing.T) {
	got := compactPrefixes(prefixes("10.2.1.0/24", "10.2.0.0/16", "fd00::1/128", "10.2.1.5/32", "fd00::/8", "10.3.0.0/16", "10.2.0.0/16"))
	if want := prefixes("10.2.0.0/16", "10.3.0.0/16", "fd00::/8"); !slices.Equal(got, want) {
		t.Errorf("compactPrefixes = %v, want %v", got, want)
	}
}

func TestTwoNeighboursWithOnePrefixGetOneRoute(t *testing.T) {
	nodes, _ := matrixMesh()
	nodes[3].PodCIDRs, nodes[3].InternalIPs = nodes[2].PodCIDRs, nodes[2].InternalIPs // e as c
	topology, problems := computed(t, testConfig(), nodes, nil)
	if len(problems) != 2 {
		t.Errorf("problems %v, want the pod CIDR and the internal IP of e", problems)
	}
	var got []string
	for _, r := range stateOf(t, topology, "b", oneLink("192.168.1.1/24")).Routes {
		if r.Dst == pfx("10.2.3.0/24") || r.Dst == pfx("192.168.1.2/32") {
			got = append(got, r.String())
		}
	}
	want := []string{"route 10.2.3.0/24 via 192.168.1.2 dev tunl0 src 192.168.1.1 onlink", "route 192.168.1.2/32 via 192.168.1.2 dev tunl0 src 192.168.1.1 table 1107 onlink"}
	if !slices.Equal(got, want) {
		t.Errorf("routes %q, want %q", got, want)
	}
}

func TestSecretKeyIsNeverPrinted(t *testing.T) {
	k := secret(0xab)
	d := Device{PrivateKey: k, Peers: []DevicePeer{{Key: key(1), PresharedKey: k}}}
	var log strings.Builder
	timeless := &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{} // in which the digits of a leak come up
		}
		return a
	}}
	for _, h := range []slog.Handler{slog.NewJSONHandler(&log, timeless), slog.NewTextHandler(&log, timeless)} {
		slog.New(h).Info("x", "key", k, "device", d)
	}
	js, err := json.Marshal(struct{ K SecretKey }{k})
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{string(js), log.String(), fmt.Sprint(k, d, new(k)), fmt.Errorf("%w %v", os.ErrInvalid, k).Error()}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%b", "%c", "%o"} {
		texts = append(texts, fmt.Sprintf(verb, k), fmt.Sprintf(verb, d))
	}
	for _, s := range texts {
		for _, leak := range []string{"171", "ab00", "AB00", "0xab", "qwAAAA", "10101011", "253"} {
			if strings.Contains(s, leak) {
				t.Errorf("%q shows the key: %q", s, leak)
			}
		}
	}
}

// Two clouds use one private range: a and c have the same internal IP, which
// a owns. Neither c nor its neighbours send packets for it to a's location, since
// they mean c; and c does not send from an address whose answers go to a (L4).
func TestEqualPrivateAddressesStayInTheirLocations(t *testing.T) {
	node := func(i byte, name, location, internal string, wants bool) Node {
		return Node{
			Name: name, Location: location, WantsLead: wants, Key: key(i), ListenPort: 51820, Endpoint: at("203.0.113." + strconv.Itoa(int(i))),
			InternalIPs: prefixes(internal), PodCIDRs: prefixes("10.2." + strconv.Itoa(int(i)) + ".0/24"),
		}
	}
	for _, leader := range []string{"b", "c"} {
		nodes := []Node{
			node(1, "a", "x", "192.168.0.1/24", false), node(2, "b", "y", "192.168.0.2/24", leader == "b"),
			node(3, "c", "y", "192.168.0.1/24", leader == "c"), node(4, "d", "y", "192.168.0.4/24", false),
		}
		topology, _ := computed(t, testConfig(), nodes, nil)
		for _, name := range []string{"b", "c", "d"} {
			s, _, err := topology.State(name, secret(1), Facts{})
			if err != nil {
				t.Fatal(err)
			}
			pods := false
			for _, r := range s.Routes {
				if r.Dst == pfx("192.168.0.1/32") && r.Table == TableMain {
					t.Errorf("%s leads: State of %s has %v", leader, name, r)
				}
				pods = pods || r.Dst == pfx("10.2.1.0/24")
				if name == "c" && r.Dev == "kilo0" && r.Src.IsValid() {
					t.Errorf("%s leads: %s has %v, want no source", leader, name, r)
				}
			}
			if !pods {
				t.Errorf("%s leads: State of %s has no route to a's pods", leader, name)
			}
		}
	}
}

// A host has a default route of its own, perhaps, and a route to the same
// destination would be refused.
func TestEverythingIsAnnouncedInTwoHalves(t *testing.T) {
	nodes, _ := matrixMesh()
	nodes[0].AllowedLocationIPs = prefixes("0.0.0.0/0")
	nodes[0].Endpoint, nodes[1].InternalIPs = Endpoint{DNS: "a.example", Port: 51820}, nil // so that no hole is to be cut
	topology, _ := computed(t, testConfig(), nodes[:2], nil)
	got := stateOf(t, topology, "b", oneLink("203.0.113.2/24")).String()
	if !strings.Contains(got, "route 0.0.0.0/1 via 10.4.0.1") || !strings.Contains(got, "route 128.0.0.0/1 via 10.4.0.1") || strings.Contains(got, "route 0.0.0.0/0") {
		t.Errorf("want the two halves of everything:\n%s", got)
	}
}

// What a location announces does not get the address of a neighbour of another,
// of which the announced is broader.
func TestMasqueradingStopsAtNarrowerPrefixesOfOthers(t *testing.T) {
	nodes, peers := matrixMesh()
	nodes[0].AllowedLocationIPs = prefixes("192.168.128.0/17")
	nodes[1].AllowedLocationIPs = prefixes("192.168.0.0/16")
	peers[0].AllowedIPs = prefixes("10.5.0.1/32", "192.0.0.0/8")
	topology, _ := computed(t, testConfig(), nodes, peers)
	f := stateOf(t, topology, "b", oneLink("192.168.1.1/24")).Firewall
	if want := prefixes("192.168.0.0/17"); !slices.Equal(f.MasqueradeTo, want) {
		t.Errorf("b masquerades to %v, want %v", f.MasqueradeTo, want)
	}
	for _, p := range f.Known {
		if p.Contains(addr("192.168.77.1")) {
			t.Errorf("known %v, which the peer has, holds the allowed location IPs", p)
		}
	}
	if !slices.ContainsFunc(f.Known, func(p netip.Prefix) bool { return p.Contains(addr("192.1.2.3")) }) {
		t.Errorf("known %v, want the rest of what the peer has", f.Known)
	}
}

func TestPodsFitTheSmallestLink(t *testing.T) {
	nodes, _ := matrixMesh()
	for _, tt := range []struct {
		encapsulation  Encapsulation
		tunnel         LinkKind
		node           string
		underlay, want int
	}{
		{EncapsulateAlways, KindIPIP, "b", 1500, 1420},
		{EncapsulateAlways, KindIPIP, "b", 9000, 1420},
		{EncapsulateAlways, KindIPIP, "b", 1400, 1380},
		{EncapsulateAlways, KindVXLAN, "b", 1400, 1350},
		{EncapsulateNever, KindIPIP, "b", 1500, 1420},
		{EncapsulateNever, KindIPIP, "b", 1400, 1400},       // in clear
		{EncapsulateCrossSubnet, KindIPIP, "b", 1400, 1380}, // to c in clear, to e not
		{EncapsulateAlways, KindIPIP, "a", 1400, 1420},      // no pod's packet leaves through its private link
	} {
		cfg := testConfig()
		cfg.Encapsulation, cfg.Tunnel, cfg.VXLANDev = tt.encapsulation, tt.tunnel, "kilo-vxlan"
		topology, _ := computed(t, cfg, nodes, nil)
		facts := oneLink("192.168.1.1/24", "192.168.0.1/24")
		facts.Addrs[0].MTU, facts.Addrs[1].MTU = tt.underlay, tt.underlay
		if got := stateOf(t, topology, tt.node, facts).PodMTU; got != tt.want {
			t.Errorf("%s, encapsulation %s in %s, private link of %d beside a default route of 1500: MTU of pods %d, want %d", tt.node, tt.encapsulation, tt.tunnel, tt.underlay, got, tt.want)
		}
	}
}

// The overhead of each tunnel is that of its outer headers.
func TestTunnelsFitTheUnderlay(t *testing.T) {
	for _, tt := range []struct {
		tunnel   LinkKind
		internal []string // of both nodes
		want     map[string]int
	}{
		{KindIPIP, []string{"192.168.1.1/24", "192.168.1.2/24"}, map[string]int{"tunl0": 1380}},
		{KindIPIP, []string{"fd01::1/64", "fd01::2/64"}, map[string]int{"tunl0-6": 1360}},
		{KindVXLAN, []string{"192.168.1.1/24", "192.168.1.2/24"}, map[string]int{"kilo-vxlan": 1350}},
		{KindVXLAN, []string{"fd01::1/64", "fd01::2/64"}, map[string]int{"kilo-vxlan": 1330}},
	} {
		nodes, _ := matrixMesh()
		nodes = nodes[1:3]
		cfg := testConfig()
		cfg.Tunnel, cfg.VXLANDev, cfg.WireGuardCIDRs = tt.tunnel, "kilo-vxlan", prefixes("10.4.0.0/16", "fd00:4::/64")
		for i := range nodes {
			nodes[i].InternalIPs = prefixes(tt.internal[i])
		}
		topology, _ := computed(t, cfg, nodes, nil)
		facts := oneLink(tt.internal[0])
		facts.Addrs[0].MTU = 1400
		s, _, err := topology.State("b", secret(1), facts)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]int{}
		for _, l := range s.Links {
			if l.Kind != KindWireGuard {
				got[l.Name] = l.MTU
			}
		}
		if !maps.Equal(got, tt.want) {
			t.Errorf("%s between %v over 1400 bytes: MTUs %v, want %v", tt.tunnel, tt.internal, got, tt.want)
		}
	}
}

// SealedDevs are the links by which pods of other locations are reached and heard.
func TestStrictEncryptionSealsTheLinksThatLeadToOtherLocations(t *testing.T) {
	nodes, peers := matrixMesh()
	for _, tt := range []struct {
		name, node    string
		encapsulation Encapsulation
		granularity   Granularity
		want          []string
	}{
		{"leader", "b", EncapsulateAlways, GranularityLocation, []string{"kilo0", "tunl0"}}, // as long as some send to the leader before
		{"leader that nothing is encapsulated for", "b", EncapsulateNever, GranularityLocation, []string{"kilo0"}},
		{"member behind a tunnel", "c", EncapsulateAlways, GranularityLocation, []string{"kilo0", "tunl0"}},
		{"member that nothing is encapsulated for", "c", EncapsulateNever, GranularityLocation, []string{"eth0", "kilo0"}},
		{"node that has its own tunnels", "c", EncapsulateAlways, GranularityFull, []string{"kilo0"}},
	} {
		cfg := testConfig()
		cfg.Encapsulation, cfg.Granularity, cfg.StrictEncryption = tt.encapsulation, tt.granularity, true
		topology, _ := computed(t, cfg, nodes, peers)
		f := stateOf(t, topology, tt.node, oneLink("192.168.1.1/24", "192.168.1.2/24")).Firewall
		sealed := prefixes("10.2.1.0/24")
		if tt.granularity == GranularityFull {
			sealed = prefixes("10.2.1.0/24", "10.2.2.0/24", "10.2.5.0/24")
		}
		if !slices.Equal(f.SealedDevs, tt.want) || !slices.Equal(f.Sealed, sealed) {
			t.Errorf("%s: %v sealed to %q, want %v to %q", tt.name, f.Sealed, f.SealedDevs, sealed, tt.want)
		}
		cfg.StrictEncryption = false
		topology, _ = computed(t, cfg, nodes, peers)
		if f := stateOf(t, topology, tt.node, oneLink("192.168.1.1/24", "192.168.1.2/24")).Firewall; len(f.Sealed)+len(f.SealedDevs) > 0 {
			t.Errorf("%s: sealed without being asked to", tt.name)
		}
	}
}

// What is reached in clear from here, though inside a pod CIDR of another location, is not sealed with it.
func TestStrictEncryptionDoesNotSealThisSite(t *testing.T) {
	for name, c := range map[string]struct {
		change func(nodes []Node)
		want   []string
	}{
		"pods of this location":      {func(nodes []Node) { nodes[0].PodCIDRs = prefixes("10.2.0.0/22") }, []string{"10.2.0.0/23"}},
		"nodes of this location":     {func(nodes []Node) { nodes[0].PodCIDRs = prefixes("192.168.1.0/30") }, []string{"192.168.1.0/32", "192.168.1.3/32"}},
		"endpoint of the tunnel":     {func(nodes []Node) { nodes[0].PodCIDRs, nodes[0].Endpoint = prefixes("100.64.0.0/31"), at("100.64.0.1") }, []string{"100.64.0.0/32"}},
		"but others' inside of ours": {func(nodes []Node) { nodes[1].PodCIDRs = prefixes("10.2.0.0/16") }, []string{"10.2.1.0/24"}},
	} {
		t.Run(name, func(t *testing.T) {
			nodes, _ := matrixMesh()
			c.change(nodes)
			cfg := testConfig()
			cfg.StrictEncryption = true
			topology, _ := computed(t, cfg, nodes[:3], nil)
			if got := stateOf(t, topology, "b", oneLink("192.168.1.1/24")).Firewall.Sealed; !slices.Equal(got, prefixes(c.want...)) {
				t.Errorf("sealed %v, want %v", got, c.want)
			}
		})
	}
}
