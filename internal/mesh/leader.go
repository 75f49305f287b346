// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"slices"
)

// Leaders names the leader of each location, by Location.ID. A location of one
// node is led by it and need not be named.
type Leaders map[string]string

// LeaderElection says who judges which node leads a location.
type LeaderElection string

// The judges. "sticky": see StickyLeaders. "static": see StaticLeaders.
const (
	LeaderElectionSticky LeaderElection = "sticky"
	LeaderElectionStatic LeaderElection = "static"
)

// ParseLeaderElection reads a LeaderElection.
func ParseLeaderElection(s string) (LeaderElection, error) {
	return parseEnum("leader election", s, LeaderElectionSticky, LeaderElectionStatic)
}

// StaticLeaders judges by the nodes' properties alone, as the existing Kilo
// does, so every node comes to the same result without talking. The best of a
// location leads it: annotated and public, then annotated, then public, then
// the others, and those that are silent last; among equals the first by name.
func StaticLeaders(g Granularity, nodes []Node) Leaders {
	leaders := Leaders{}
	for p, n := range bestOf(candidates(g, nodes)) {
		leaders[p.id()] = n.Name
	}
	return leaders
}

// StickyLeaders leaves a location to the node that leads it as it published,
// and only where there is none to the best, as in StaticLeaders: so a candidate
// that is no better never takes over from a leader. One that is better does: it
// begins once it finds itself so, as self alone does, and the others follow when it
// has published that it leads, and so is ready. Of several that published it the best counts.
func StickyLeaders(g Granularity, nodes []Node, self string) Leaders {
	all := candidates(g, nodes)
	leaders := Leaders{}
	best := bestOf(all)
	leading := bestOf(slices.DeleteFunc(all, func(n *Node) bool { return len(n.WireGuardIPs) == 0 || n.Silent }))
	for p, n := range best {
		if l, ok := leading[p]; ok && (n.Name != self || rank(n) >= rank(l)) {
			n = l
		}
		leaders[p.id()] = n.Name
	}
	return leaders
}

// candidates returns the nodes that can lead others: those that Compute does not leave out.
func candidates(g Granularity, nodes []Node) []*Node {
	if g != GranularityLocation {
		return nil // every node is on its own
	}
	members, _ := participants(nodes, func(string, string, error) {})
	return slices.DeleteFunc(members, func(n *Node) bool { return siteOf(n).own })
}

// bestOf returns the best candidate of each location.
func bestOf(candidates []*Node) map[place]*Node {
	best := map[place]*Node{}
	for _, n := range candidates {
		p := siteOf(n)
		if b, ok := best[p]; !ok || compareCandidates(n, b) < 0 {
			best[p] = n
		}
	}
	return best
}

// compareCandidates orders the better leader first.
func compareCandidates(a, b *Node) int {
	return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
}

func rank(n *Node) int {
	switch public := hasPublicEndpoint(n); {
	case n.Silent:
		return 4
	case n.WantsLead && public:
		return 0
	case n.WantsLead:
		return 1
	case public:
		return 2
	default:
		return 3
	}
}

// hasPublicEndpoint takes a DNS name as public, whatever it resolves to, so
// that those who have resolved it and those who have not agree.
func hasPublicEndpoint(n *Node) bool {
	return n.Endpoint.DNS != "" || IsPublic(n.Endpoint.IP)
}

// place is the key of a location: the name of the user, or of a node that is on its own.
type place struct {
	own  bool
	name string
}

// id is the Location.ID.
func (p place) id() string {
	if p.own {
		return "node:" + p.name
	}
	return "location:" + p.name
}

// compare orders as the IDs do.
func (p place) compare(o place) int {
	if p.own != o.own {
		if o.own {
			return -1
		}
		return 1
	}
	return cmp.Compare(p.name, o.name)
}

// siteOf returns the place whose nodes n reaches without the mesh. A node
// without an internal IP cannot be reached by its neighbours except through the
// mesh, so it is on its own.
func siteOf(n *Node) place {
	if len(n.InternalIPs) == 0 {
		return place{own: true, name: n.Name}
	}
	return place{name: n.Location}
}

func sortedByName(nodes []Node) []*Node {
	out := make([]*Node, len(nodes))
	for i := range nodes {
		out[i] = &nodes[i]
	}
	byName := func(a, b *Node) int { return cmp.Compare(a.Name, b.Name) }
	if !slices.IsSortedFunc(out, byName) {
		slices.SortFunc(out, byName)
	}
	return out
}
