// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// summary is what a test wants of a Location.
type summary struct {
	ID, Leader  string
	Nodes       []string
	WireGuardIP string
	AllowedIPs  []string
	ALIPs       []string
}

func summarise(t *Topology) (out []summary) {
	for i := range t.Locations {
		l := &t.Locations[i]
		s := summary{ID: l.ID(), Leader: l.Lead().Name}
		for _, n := range l.Nodes {
			s.Nodes = append(s.Nodes, n.Name)
		}
		for _, ip := range l.WireGuardIPs {
			s.WireGuardIP = ip.String()
		}
		for _, p := range l.owned[:l.known()] {
			s.AllowedIPs = append(s.AllowedIPs, p.String())
		}
		for _, p := range l.AllowedLocationIPs() {
			s.ALIPs = append(s.ALIPs, p.String())
		}
		out = append(out, s)
	}
	return out
}

func TestComputeGroupsNodesByLocation(t *testing.T) {
	topology, problems := computed(t, testConfig(), fourNodes(), twoPeers())
	want := []summary{
		{"location:1", "a", []string{"a"}, "10.4.0.1", []string{"10.2.1.0/24", "192.168.0.1/32", "10.4.0.1/32"}, nil},
		{"location:2", "b", []string{"b", "c"}, "10.4.0.2", []string{"10.2.2.0/24", "10.2.3.0/24", "192.168.0.2/32", "10.4.0.2/32"}, []string{"192.168.178.3/32"}},
		{"node:d", "d", []string{"d"}, "10.4.0.3", []string{"10.2.4.0/24", "10.4.0.3/32"}, nil},
	}
	if diff := cmp.Diff(want, summarise(topology)); diff != "" {
		t.Errorf("locations (-want +got):\n%s", diff)
	}
	// Two nodes with one internal IP cannot both own it (L4).
	if len(problems) != 1 || !strings.Contains(problems[0].Error(), "node/b: internal-ip: 192.168.0.1/32 is not used: it already belongs to node/a") {
		t.Errorf("problems = %v, want only the second owner of 192.168.0.1/32 named", problems)
	}
}

func TestComputeFullGivesEachNodeItsOwnLocation(t *testing.T) {
	cfg := testConfig()
	cfg.Granularity = GranularityFull
	topology, _ := computed(t, cfg, fourNodes(), twoPeers())
	var ids, ips []string
	for _, s := range summarise(topology) {
		ids, ips = append(ids, s.ID), append(ips, s.WireGuardIP)
	}
	if diff := cmp.Diff([]string{"node:a", "node:b", "node:c", "node:d"}, ids); diff != "" {
		t.Errorf("locations (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"10.4.0.1", "10.4.0.2", "10.4.0.3", "10.4.0.4"}, ips); diff != "" {
		t.Errorf("WireGuard IPs (-want +got):\n%s", diff)
	}
}

func TestPublicationNamesTheWireGuardIPOfALeaderOnly(t *testing.T) {
	topology, _ := computed(t, testConfig(), fourNodes(), nil)
	for name, want := range map[string][]netip.Prefix{"a": prefixes("10.4.0.1/16"), "b": prefixes("10.4.0.2/16"), "c": nil, "d": prefixes("10.4.0.3/16")} {
		p, ok := topology.Publication(name)
		if !ok || !slices.Equal(p.WireGuardIPs, want) {
			t.Errorf("Publication(%s) = %v, %v, want WireGuard IPs %v", name, p, ok, want)
		}
	}
}

func TestIsPublicByRFC(t *testing.T) {
	for ip, want := range map[string]bool{
		"10.0.0.1": false, "172.16.0.0": false, "172.24.135.46": false, "172.31.255.255": false, "192.168.0.0": false,
		"172.15.255.255": true, "172.32.0.0": true, "172.160.255.255": true, "8.8.8.8": true, "203.0.113.1": true,
		"100.64.0.1": false, "100.127.255.255": false, "100.128.0.1": true, "127.0.0.1": false, "169.254.1.1": false,
		"0.0.0.0": false, "0.1.2.3": false, "224.0.0.1": false, "240.0.0.1": false, "255.255.255.255": false,
		"fc00::1": false, "fd68::1": false, "fe80::1": false, "::1": false, "::": false, "ff02::1": false, "2001:db8::1": true, "2a00::1": true,
	} {
		if got := IsPublic(addr(ip)); got != want {
			t.Errorf("IsPublic(%s) = %v, want %v", ip, got, want)
		}
	}
}

func TestExhaustedWireGuardCIDRIsAProblemOfThatLocationAlone(t *testing.T) {
	for _, tt := range []struct {
		cidr string
		want []string // WireGuard IPs by location, "" for none
	}{
		{"10.4.0.0/30", []string{"10.4.0.1", "10.4.0.2", "10.4.0.3", ""}},
		{"10.4.0.0/31", []string{"10.4.0.1", "", "", ""}},
		{"10.4.0.0/32", []string{"", "", "", ""}},
	} {
		cfg := testConfig()
		cfg.Granularity, cfg.WireGuardCIDRs = GranularityFull, prefixes(tt.cidr)
		topology, problems := computed(t, cfg, fourNodes(), nil)
		var got []string
		exhausted := 0
		for _, s := range summarise(topology) {
			got = append(got, s.WireGuardIP)
		}
		for _, p := range problems {
			if p.Field == "wireguard-ip" {
				exhausted++
			}
		}
		missing := 0
		for _, ip := range tt.want {
			if ip == "" {
				missing++
			}
		}
		if !slices.Equal(got, tt.want) || exhausted != missing {
			t.Errorf("%s: WireGuard IPs %q with %d problems, want %q with %d", tt.cidr, got, exhausted, tt.want, missing)
		}
	}
}

func TestLocationKeepsItsWireGuardIPWhoeverComesAndGoes(t *testing.T) {
	nodes := fourNodes()[1:] // without a, location 2 gets the first address
	topology, _ := computed(t, testConfig(), nodes, nil)
	for i := range nodes {
		if p, ok := topology.Publication(nodes[i].Name); ok {
			for _, ip := range p.WireGuardIPs {
				nodes[i].WireGuardIPs = append(nodes[i].WireGuardIPs, ip.Addr())
			}
		}
	}
	topology, _ = computed(t, testConfig(), append(nodes, fourNodes()[0]), nil)
	got := map[string]string{}
	for _, s := range summarise(topology) {
		got[s.ID] = s.WireGuardIP
	}
	want := map[string]string{"location:1": "10.4.0.3", "location:2": "10.4.0.1", "node:d": "10.4.0.2"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("WireGuard IPs after a location joined (-want +got):\n%s", diff)
	}
}

func TestNewLeaderInheritsTheWireGuardIP(t *testing.T) {
	nodes := fourNodes()[1:3]
	nodes[0].WireGuardIPs = []netip.Addr{addr("10.4.7.7")}
	nodes[1].WantsLead = true
	topology, _ := computed(t, testConfig(), nodes, nil)
	want := []summary{{"location:2", "c", []string{"b", "c"}, "10.4.7.7", []string{"10.2.2.0/24", "10.2.3.0/24", "192.168.0.1/32", "192.168.0.2/32", "10.4.7.7/32"}, []string{"192.168.178.3/32"}}}
	if diff := cmp.Diff(want, summarise(topology)); diff != "" {
		t.Errorf("locations (-want +got):\n%s", diff)
	}
}

func TestLocationKeepsItsWireGuardIPWhenTheLeadersNodeIsDeleted(t *testing.T) {
	cfg, nodes := testConfig(), fourNodes()
	nodes[1].InternalIPs = prefixes("192.168.0.3/32")
	nodes[1].WireGuardIPs = []netip.Addr{addr("10.4.7.7")}
	topology, _ := computed(t, cfg, nodes, nil)
	p, _ := topology.Publication("c")
	if !slices.Equal(p.LocationIPs, prefixes("10.4.7.7/16")) || p.WireGuardIPs != nil {
		t.Fatalf("c publishes %+v, want the location's address, but not as leader", p)
	}
	nodes[2].LocationIPs = []netip.Addr{p.LocationIPs[0].Addr()}
	nodes = slices.Delete(nodes, 1, 2)
	topology, _ = computed(t, cfg, nodes, nil)
	if p, _ := topology.Publication("c"); !slices.Equal(p.WireGuardIPs, prefixes("10.4.7.7/16")) {
		t.Errorf("c publishes %+v, want to have inherited 10.4.7.7", p)
	}
}

func TestMemberThatMovedTakesNoAddressAlong(t *testing.T) {
	nodes := fourNodes()
	nodes[1].WireGuardIPs = []netip.Addr{addr("10.4.7.7")} // leads 2
	nodes[2].Location, nodes[2].LocationIPs = "0", []netip.Addr{addr("10.4.7.7")}
	topology, _ := computed(t, testConfig(), nodes, nil)
	got := map[string]string{}
	for _, s := range summarise(topology) {
		got[s.ID] = s.WireGuardIP
	}
	if got["location:2"] != "10.4.7.7" || got["location:0"] != "10.4.0.1" {
		t.Errorf("WireGuard IPs %v, want location 2 to keep its own", got)
	}
}

func TestClaimsOutsideTheRangeAreIgnoredAndConflictsSettleByName(t *testing.T) {
	nodes := fourNodes()
	nodes[0].WireGuardIPs = []netip.Addr{addr("10.9.0.1")}
	nodes[1].WireGuardIPs = []netip.Addr{addr("10.4.0.9")}
	nodes[3].WireGuardIPs = []netip.Addr{addr("10.4.0.9")}
	topology, _ := computed(t, testConfig(), nodes, nil)
	var got []string
	for _, s := range summarise(topology) {
		got = append(got, s.WireGuardIP)
	}
	if want := []string{"10.4.0.1", "10.4.0.9", "10.4.0.2"}; !slices.Equal(got, want) {
		t.Errorf("WireGuard IPs = %q, want %q", got, want)
	}
}

func TestAllowedLocationIPsLoseToWhatTheyLieWithin(t *testing.T) {
	tests := []struct {
		name  string
		alips map[string][]netip.Prefix // by node
		want  map[string][]string       // by location
		lost  int
	}{
		{"equal to a WireGuard IP", map[string][]netip.Prefix{"b": prefixes("10.4.0.1/32")}, map[string][]string{}, 1},
		{"equal to a node's internal IP", map[string][]netip.Prefix{"a": prefixes("192.168.0.2/32")}, map[string][]string{}, 1},
		{"broader than an internal IP", map[string][]netip.Prefix{"a": prefixes("192.168.0.0/24")}, map[string][]string{"location:1": {"192.168.0.0/24"}}, 0},
		{"broader than a pod CIDR with the same base", map[string][]netip.Prefix{"b": prefixes("10.2.1.0/16")}, map[string][]string{"location:2": {"10.2.1.0/16"}}, 0},
		{"inside a pod CIDR", map[string][]netip.Prefix{"b": prefixes("10.2.1.128/25")}, map[string][]string{}, 1},
		{"two locations: the first wins", map[string][]netip.Prefix{"a": prefixes("172.20.0.0/16"), "c": prefixes("172.20.0.0/16")}, map[string][]string{"location:1": {"172.20.0.0/16"}}, 1},
		{"two nodes of one location announce together", map[string][]netip.Prefix{"b": prefixes("172.20.0.0/16"), "c": prefixes("172.20.0.0/16")}, map[string][]string{"location:2": {"172.20.0.0/16"}}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			nodes := fourNodes()
			nodes[1].InternalIPs = prefixes("192.168.0.3/32")
			for i := range nodes {
				nodes[i].AllowedLocationIPs = tt.alips[nodes[i].Name]
			}
			topology, problems := computed(t, testConfig(), nodes, nil)
			got := map[string][]string{}
			for _, s := range summarise(topology) {
				if s.ALIPs != nil {
					got[s.ID] = s.ALIPs
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("allowed location IPs (-want +got):\n%s", diff)
			}
			if len(problems) != tt.lost {
				t.Errorf("problems = %v, want %d", problems, tt.lost)
			}
		})
	}
}

func TestPeersDoNotTakeWhatNodesAndEarlierPeersOwn(t *testing.T) {
	peers := []Peer{
		{Name: "1", Key: key(21), AllowedIPs: prefixes("10.0.0.1/32", "10.0.0.2/32", "10.2.1.0/24", "10.2.1.7/32")},
		{Name: "2", Key: key(22), AllowedIPs: prefixes("10.0.0.1/32", "10.0.0.3/32")},
		{Name: "3", Key: key(23), AllowedIPs: prefixes("10.0.0.2/32", "10.0.0.3/32", "10.0.0.1/32")},
		{Name: "4", Key: key(24), AllowedIPs: prefixes("10.0.0.4/32")},
		{Name: "5", Key: key(24), AllowedIPs: prefixes("10.0.0.5/32")},
		{Name: "6", Key: key(1), AllowedIPs: prefixes("10.0.0.6/32")},
	}
	slices.Reverse(peers)
	topology, problems := computed(t, testConfig(), fourNodes()[:1], peers)
	got := map[string]string{}
	for _, p := range topology.Peers {
		got[p.Name] = joinPrefixes(p.AllowedIPs)
	}
	if diff := cmp.Diff(map[string]string{"1": "10.0.0.1/32,10.0.0.2/32", "2": "10.0.0.3/32", "3": "", "4": "10.0.0.4/32"}, got); diff != "" {
		t.Errorf("allowed IPs of peers (-want +got):\n%s", diff)
	}
	if len(problems) != 8 { // two prefixes of a node, four of earlier peers, two keys
		t.Errorf("%d problems, want 8: %v", len(problems), problems)
	}
}

func TestNodeThatLacksSomethingIsLeftOut(t *testing.T) {
	whole := fourNodes()[1]
	for name, breakIt := range map[string]func(*Node){
		"key": func(n *Node) { n.Key = PublicKey{} }, "endpoint": func(n *Node) { n.Endpoint = Endpoint{} },
		"port": func(n *Node) { n.Endpoint.Port = 0 }, "pod CIDR": func(n *Node) { n.PodCIDRs = nil },
	} {
		n := whole
		breakIt(&n)
		topology, problems := computed(t, testConfig(), []Node{fourNodes()[0], n}, nil)
		if topology.NodeCount() != 1 {
			t.Errorf("without %s: %d nodes take part, want 1", name, topology.NodeCount())
		}
		if wantProblem := name != "key"; (len(problems) == 1) != wantProblem {
			t.Errorf("without %s: problems %v, want one: %v", name, problems, wantProblem)
		}
	}
}

func TestTwoNodesWithOneKey(t *testing.T) {
	nodes := fourNodes()
	nodes[2].Key = nodes[0].Key
	topology, problems := computed(t, testConfig(), nodes, nil)
	if topology.NodeCount() != 3 || !slices.ContainsFunc(problems, func(p Problem) bool { return p.Object == "node/c" && p.Field == "key" }) {
		t.Errorf("%d nodes, problems %v; want node c left out with a problem", topology.NodeCount(), problems)
	}
}

// randomMesh draws nodes and peers that overlap now and then.
func randomMesh(t *rapid.T) ([]Node, []Peer) {
	ip4 := func(label string) netip.Addr {
		return netip.AddrFrom4([4]byte{10, byte(rapid.IntRange(0, 3).Draw(t, label)), byte(rapid.IntRange(0, 3).Draw(t, label)), byte(rapid.IntRange(1, 9).Draw(t, label))})
	}
	prefix := func(label string) netip.Prefix {
		p, _ := ip4(label).Prefix(rapid.IntRange(14, 32).Draw(t, label+" bits"))
		return p
	}
	var nodes []Node
	for i := range rapid.IntRange(1, 8).Draw(t, "nodes") {
		n := Node{
			Name: "n" + strconv.Itoa(i), Location: rapid.SampledFrom([]string{"x", "y", "z"}).Draw(t, "location"),
			Endpoint: Endpoint{IP: ip4("endpoint"), Port: 51820}, Key: key(byte(rapid.IntRange(0, 9).Draw(t, "key"))),
			WantsLead: rapid.Bool().Draw(t, "leader"), ListenPort: 51820,
			PodCIDRs: []netip.Prefix{prefix("pods")},
		}
		if rapid.Bool().Draw(t, "internal") {
			n.InternalIPs = []netip.Prefix{netip.PrefixFrom(ip4("internal"), 24)}
		}
		if rapid.Bool().Draw(t, "alip") {
			n.AllowedLocationIPs = []netip.Prefix{prefix("alip")}
		}
		if rapid.Bool().Draw(t, "claim") {
			n.WireGuardIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 4, 0, byte(rapid.IntRange(0, 6).Draw(t, "claim"))})}
		}
		nodes = append(nodes, n)
	}
	var peers []Peer
	for i := range rapid.IntRange(0, 4).Draw(t, "peers") {
		peers = append(peers, Peer{Name: "p" + strconv.Itoa(i), Key: key(byte(rapid.IntRange(5, 14).Draw(t, "key"))), AllowedIPs: []netip.Prefix{prefix("allowed"), prefix("allowed")}})
	}
	return nodes, peers
}

func TestOrderOfInputChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes, peers := randomMesh(t)
		leaders := StaticLeaders(GranularityLocation, nodes)
		one, problems1 := Compute(testConfig(), slices.Clone(nodes), slices.Clone(peers), leaders)
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		r.Shuffle(len(nodes), reflect.Swapper(nodes))
		r.Shuffle(len(peers), reflect.Swapper(peers))
		two, problems2 := Compute(testConfig(), nodes, peers, StaticLeaders(GranularityLocation, nodes))
		if diff := cmp.Diff(one, two, cmp.AllowUnexported(Topology{}, Location{}, nodeClaims{}, place{}, SecretKey{}), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Fatalf("topology (-first +shuffled):\n%s", diff)
		}
		if len(problems1) != len(problems2) {
			t.Fatalf("problems %v and %v", problems1, problems2)
		}
	})
}

func TestNoPrefixHasTwoOwnersAndNoAddressTwoLocations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes, peers := randomMesh(t)
		topology, _ := Compute(testConfig(), nodes, peers, StaticLeaders(GranularityLocation, nodes))
		owners := map[netip.Prefix]string{}
		for i := range topology.Locations {
			l := &topology.Locations[i]
			for _, p := range l.Owned() {
				if by, ok := owners[p]; ok {
					t.Fatalf("%s belongs to %s and %s", p, by, l.ID())
				}
				owners[p] = l.ID()
			}
		}
		for _, peer := range topology.Peers {
			for _, p := range peer.AllowedIPs {
				if by, ok := owners[p]; ok {
					t.Fatalf("%s belongs to %s and peer %s", p, by, peer.Name)
				}
				owners[p] = peer.Name
			}
		}
	})
}

// The granularity of a mesh is read from all nodes, not from any one (L16).
func TestGranularityIsFoundWhateverTheOrderOfNodes(t *testing.T) {
	node := func(name string, g Granularity) Node { return Node{Name: name, Granularity: g} }
	for _, tt := range []struct {
		name  string
		nodes []Node
		want  Granularity
		err   string
	}{
		{"all agree", []Node{node("a", GranularityFull), node("b", GranularityFull)}, GranularityFull, ""},
		{"some have no agent yet", []Node{node("a", ""), node("b", GranularityCross), node("c", "")}, GranularityCross, ""},
		{"nobody has", []Node{node("a", "")}, "", "no node has published"},
		{"no nodes", nil, "", "no node has published"},
		{"they differ", []Node{node("a", GranularityFull), node("b", GranularityLocation)}, "", "node/a has granularity full and node/b has location"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for range 2 {
				got, err := PublishedGranularity(tt.nodes)
				if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
					t.Errorf("granularity %q, %v; want %q, %q", got, err, tt.want, tt.err)
				}
				slices.Reverse(tt.nodes)
			}
		})
	}
}

func TestANodeOfAnotherGranularityIsAProblem(t *testing.T) {
	nodes := fourNodes()
	nodes[3].Granularity = GranularityFull
	nodes[2].Granularity = GranularityLocation
	_, problems := computed(t, testConfig(), nodes, nil)
	if !slices.ContainsFunc(problems, func(p Problem) bool { return p.Object == "node/"+nodes[3].Name && p.Field == "granularity" }) || len(problems) != 2 {
		t.Errorf("problems %v, want one about the granularity of %s", problems, nodes[3].Name)
	}
}
