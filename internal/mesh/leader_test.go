// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestStaticLeadersPrefersAnnotatedThenPublicThenName(t *testing.T) {
	private, public := at("10.0.0.1"), at("203.0.113.1")
	node := func(name string, e Endpoint, wants bool) Node {
		return Node{Name: name, Location: "x", Endpoint: e, WantsLead: wants, Key: PublicKey{0: name[0]}, InternalIPs: prefixes("192.168.0." + strconv.Itoa(int(name[0])) + "/24"), PodCIDRs: prefixes("10.2.1.0/24")}
	}
	tests := []struct {
		name  string
		nodes []Node
		want  string
	}{
		{"single", []Node{node("a", private, false)}, "a"},
		{"public before private", []Node{node("a", private, false), node("b", public, false), node("c", public, false)}, "b"},
		{"annotated public before annotated private", []Node{node("a", private, true), node("b", public, true)}, "b"},
		{"annotated public before public", []Node{node("a", public, false), node("b", public, false), node("c", public, true)}, "c"},
		{"annotated private before others", []Node{node("a", private, false), node("b", private, true)}, "b"},
		{"annotated private before public", []Node{node("a", public, false), node("b", private, true)}, "b"},
		{"unresolved name counts as public", []Node{node("a", private, false), node("b", Endpoint{DNS: "b.example", Port: 1}, false)}, "b"},
		{"who has no key cannot lead", []Node{{Name: "a", Location: "x", Endpoint: public, InternalIPs: prefixes("192.168.0.1/24"), PodCIDRs: prefixes("10.2.1.0/24"), WantsLead: true}, node("b", private, false)}, "b"},
	}
	copied := node("c", public, true)
	copied.Key = tests[0].nodes[0].Key
	silent := node("a", public, true)
	silent.Silent = true
	tests = append(tests, []struct {
		name  string
		nodes []Node
		want  string
	}{
		{"who has the key of an earlier node cannot lead", []Node{node("a", private, false), node("b", private, false), copied}, "a"},
		{"who is silent leads nobody who speaks", []Node{silent, node("b", private, false)}, "b"},
	}...)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := StaticLeaders(GranularityLocation, tt.nodes)["location:x"]; got != tt.want {
				t.Errorf("leader = %q, want %q", got, tt.want)
			}
			slices.Reverse(tt.nodes)
			if got := StaticLeaders(GranularityLocation, tt.nodes)["location:x"]; got != tt.want {
				t.Errorf("leader of the reversed list = %q, want %q", got, tt.want)
			}
		})
	}
}

// A node with a smaller name, or with another one's annotation, does not move
// the leader (L15).
func TestAnEqualCandidateDoesNotTakeOver(t *testing.T) {
	private, public := at("10.0.0.1"), at("203.0.113.1")
	node := func(name string, e Endpoint, wants bool, claims ...string) Node {
		n := Node{Name: name, Location: "x", Endpoint: e, WantsLead: wants, Key: PublicKey{0: name[0]}, InternalIPs: prefixes("192.168.0." + strconv.Itoa(int(name[0])) + "/24"), PodCIDRs: prefixes("10.2.1.0/24")}
		for _, c := range claims {
			n.WireGuardIPs = append(n.WireGuardIPs, addr(c))
		}
		return n
	}
	const claim = "10.4.0.1"
	silent := func(n Node) Node {
		n.Silent = true
		return n
	}
	tests := []struct {
		name  string
		nodes []Node
		// self is what a and the others, named apart, take for the leader.
		a, others string
	}{
		{"fresh", []Node{node("a", private, false), node("b", private, false)}, "a", "a"},
		{"smaller name", []Node{node("a", private, false), node("b", private, false, claim)}, "b", "b"},
		{"annotated beside an annotated leader", []Node{node("a", public, true), node("b", public, true, claim)}, "b", "b"},
		{"worse beside a better leader", []Node{node("a", private, false), node("b", public, true, claim)}, "b", "b"},
		{"better one that is not ready yet", []Node{node("a", public, true), node("b", public, false, claim)}, "a", "b"},
		{"better one that is ready", []Node{node("a", public, true, claim), node("b", public, false, claim)}, "a", "a"},
		{"better one, but another is better still", []Node{node("a", public, false), node("b", private, false, claim), node("c", public, true)}, "b", "b"},
		{"both lead after a partition", []Node{node("a", public, false, claim), node("b", public, false, claim)}, "a", "a"},
		{"leader that fell silent", []Node{node("a", private, false), silent(node("b", public, true, claim))}, "a", "a"},
		{"all are silent", []Node{silent(node("a", private, false)), silent(node("b", private, false))}, "a", "a"},
		{"leader that lost its endpoint", []Node{node("a", private, false), node("b", Endpoint{}, false, claim)}, "a", "a"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, self := range []struct{ name, want string }{{"a", tt.a}, {"b", tt.others}, {"elsewhere", tt.others}} {
				if got := StickyLeaders(GranularityLocation, tt.nodes, self.name)["location:x"]; got != self.want {
					t.Errorf("leader, as %s sees it, = %q, want %q", self.name, got, self.want)
				}
			}
		})
	}
}

// Whoever comes and goes, a location's leader stays as long as nobody better comes.
func TestLeadersStay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes, _ := randomMesh(t)
		kept := rapid.IntRange(0, len(nodes)).Draw(t, "nodes at first")
		some, all := slices.Clone(nodes[:kept]), slices.Clone(nodes)
		leaders := StickyLeaders(GranularityLocation, some, "")
		for i := range all { // all that lead publish it
			leads := i < kept && leaders[siteOf(&all[i]).id()] == all[i].Name
			all[i].WireGuardIPs = nil
			if leads {
				all[i].WireGuardIPs = []netip.Addr{addr("10.4.0.1")}
			}
		}
		after := StickyLeaders(GranularityLocation, all, "")
		for site, name := range leaders {
			if after[site] != name {
				t.Fatalf("%s: leader %s, was %s before other nodes came", site, after[site], name)
			}
		}
		// The judges agree where nobody leads yet.
		for i := range all {
			all[i].WireGuardIPs = nil
		}
		if diff := cmp.Diff(StaticLeaders(GranularityLocation, all), StickyLeaders(GranularityLocation, all, all[0].Name)); diff != "" {
			t.Fatalf("(-static +sticky)\n%s", diff)
		}
	})
}
