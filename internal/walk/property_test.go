// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kilomesh/kilo/internal/mesh"
)

// drawn is a source of choices that rapid can shrink.
type drawn struct{ *rapid.T }

func (d drawn) IntN(n int) int { return rapid.IntRange(0, n-1).Draw(d.T, "choice") }

func TestEveryPairTalks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, err := generate(drawn{t}).compute()
		if err != nil {
			t.Fatal(err)
		}
		if _, failures, err := c.prove(); err != nil || len(failures) > 0 {
			t.Fatalf("%v%v\n%v", err, failures, c.scene)
		}
	})
}

// seeds runs f on many scenes.
func seeds(t *testing.T, n int, f func(t *testing.T, r source, s *scene)) {
	for i := range n {
		seed := *firstSeed + uint64(i)
		r := seeded(seed)
		s := generate(r)
		f(t, r, s)
		if t.Failed() {
			t.Fatalf("seed %d\n%v", seed, s)
		}
	}
}

func TestOrderOfTheInputIsIrrelevant(t *testing.T) {
	seeds(t, 300, func(t *testing.T, r source, s *scene) {
		c := mustCompute(t, s)
		other := *s
		other.nodes, other.peers = shuffled(r, s.nodes), shuffled(r, s.peers)
		d := mustCompute(t, &other)
		for i := range c.hosts {
			if a, b := c.hosts[i].State.String(), d.hosts[i].State.String(); a != b {
				t.Errorf("State of %s depends on the order:\n%s\n%s", c.hosts[i].Name, a, b)
			}
		}
	})
}

func shuffled[T any](r source, in []T) []T {
	out := slices.Clone(in)
	for i := len(out) - 1; i > 0; i-- {
		j := r.IntN(i + 1)
		out[i], out[j] = out[j], out[i]
	}
	return out
}

func TestEveryPrefixHasOneOwner(t *testing.T) {
	seeds(t, 300, func(t *testing.T, _ source, s *scene) {
		c := mustCompute(t, s)
		owners := map[netip.Prefix]string{}
		claim := func(p netip.Prefix, owner string) {
			if by, ok := owners[p]; ok && by != owner {
				t.Errorf("%v belongs to %s and to %s", p, by, owner)
			}
			owners[p] = owner
		}
		for i := range c.topology.Locations {
			l := &c.topology.Locations[i]
			for _, p := range l.Owned() {
				claim(p, l.ID())
			}
		}
		for _, p := range c.topology.Peers {
			for _, a := range p.AllowedIPs {
				claim(a, "peer/"+p.Name)
			}
		}
		for _, h := range c.hosts {
			type key struct {
				table int
				dst   netip.Prefix
			}
			routes := map[key]mesh.Route{}
			for _, r := range h.State.Routes {
				k := key{r.Table, r.Dst}
				if first, ok := routes[k]; ok {
					t.Errorf("%s has two routes: %v, %v", h.Name, first, r)
				}
				routes[k] = r
			}
		}
	})
}

func TestRemovingANodeLeavesOtherLocationsAlone(t *testing.T) {
	seeds(t, 300, func(t *testing.T, r source, s *scene) {
		s.settle(mustCompute(t, s))
		before := mustCompute(t, s)
		gone := s.nodes[r.IntN(len(s.nodes))]
		var lost *mesh.Location
		for i := range before.topology.Locations {
			if l := &before.topology.Locations[i]; slices.ContainsFunc(l.Nodes, func(n *mesh.Node) bool { return n.Name == gone.Name }) {
				lost = l
			}
		}
		if lost == nil {
			return
		}
		less := *s
		less.nodes = slices.DeleteFunc(slices.Clone(s.nodes), func(n mesh.Node) bool { return n.Name == gone.Name })
		after := mustCompute(t, &less)
		unrelated(t, before, after, lost)
	})
}

// settle makes every leader claim what it got, as it would publish.
func (s *scene) settle(c *computed) {
	for i := range s.nodes {
		s.nodes[i].WireGuardIPs = nil
		for _, l := range c.topology.Locations {
			if l.Lead().Name == s.nodes[i].Name {
				s.nodes[i].WireGuardIPs = l.WireGuardIPs
			}
		}
	}
}

// unrelated compares all locations but the one that lost a node, and those that
// lie in one site with it.
func unrelated(t *testing.T, before, after *computed, lost *mesh.Location) {
	t.Helper()
	mine := concerns(lost)
	for i := range after.topology.Locations {
		if l := &after.topology.Locations[i]; l.ID() == lost.ID() { // it may have another leader and address now
			mine = append(mine, concerns(l)...)
		}
	}
	for i := range before.topology.Locations {
		b := &before.topology.Locations[i]
		if b.ID() == lost.ID() {
			continue
		}
		j := slices.IndexFunc(after.topology.Locations, func(l mesh.Location) bool { return l.ID() == b.ID() })
		if j < 0 {
			t.Errorf("location %s is gone", b.ID())
			continue
		}
		a := &after.topology.Locations[j]
		if !slices.Equal(a.WireGuardIPs, b.WireGuardIPs) || a.Lead().Name != b.Lead().Name {
			t.Errorf("location %s: WireGuard IPs %v, leader %s; were %v, %s", b.ID(), a.WireGuardIPs, a.Lead().Name, b.WireGuardIPs, b.Lead().Name)
		}
		if b.Site() == lost.Site() {
			continue
		}
		for _, n := range b.Nodes {
			for _, change := range changedItems(before.stateOf(n.Name), after.stateOf(n.Name)) {
				if !slices.ContainsFunc(mine, func(word string) bool { return strings.Contains(change, word) }) {
					t.Errorf("State of %s in location %s: %q came or went, which has nothing to do with %s (%v)", n.Name, b.ID(), change, lost.ID(), mine)
				}
			}
		}
	}
}

// concerns lists the words by which a location shows in a State.
func concerns(l *mesh.Location) []string {
	var words []string
	for _, ps := range [][]netip.Prefix{l.PodCIDRs(), l.InternalIPs(), l.AllowedLocationIPs()} {
		for _, p := range ps {
			words = append(words, p.String())
		}
	}
	for _, a := range l.WireGuardIPs {
		words = append(words, a.String())
	}
	for _, n := range l.Nodes {
		words = append(words, n.Key.String())
		if ap, ok := n.Endpoint.AddrPort(); ok {
			words = append(words, ap.Addr().String())
		}
	}
	return words
}

// changedItems lists what only one of two States has, element by element.
func changedItems(a, b string) []string {
	items := func(s string) map[string]bool {
		out := map[string]bool{}
		for line := range strings.Lines(s) {
			words := strings.Fields(line)
			last := words[len(words)-1]
			for item := range strings.SplitSeq(last, ",") {
				out[fmt.Sprint(strings.Join(words[:len(words)-1], " "), " ", item)] = true
			}
		}
		return out
	}
	x, y := items(a), items(b)
	var out []string
	for item := range maps.Keys(x) {
		if !y[item] {
			out = append(out, item)
		}
	}
	for item := range maps.Keys(y) {
		if !x[item] {
			out = append(out, item)
		}
	}
	return out
}

// benchScene is a world of the largest size: eight nodes, both families, two peers.
func benchScene(b *testing.B) *scene {
	for seed := uint64(1); ; seed++ {
		s := generate(seeded(seed))
		if len(s.nodes) != maxNodes || !s.dual || len(s.peers) != maxPeers || s.cfg.Granularity != mesh.GranularityLocation || !s.cfg.ManageLocal {
			continue
		}
		if n, failures, err := mustCompute(b, s).prove(); err == nil && len(failures) == 0 && n > 400 {
			b.Logf("seed %d, %d pairs", seed, n)
			return s
		}
	}
}

func BenchmarkWalkLargestWorld(b *testing.B) {
	c := mustCompute(b, benchScene(b))
	b.ReportAllocs()
	for b.Loop() {
		if _, failures, err := c.prove(); err != nil || len(failures) > 0 {
			b.Fatal(err, failures)
		}
	}
}

func BenchmarkProveRandomMesh(b *testing.B) {
	b.ReportAllocs()
	seed := uint64(0)
	for b.Loop() {
		seed++
		if _, report := proveSeed(seed); report != "" {
			b.Fatal(report)
		}
	}
}
