// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"slices"
)

// Leaders names the leader of each location, by Location.ID.
type Leaders map[string]string

// StaticLeaders judges by the nodes' properties alone, so every node comes to
// the same result without talking. The best of a location leads it: annotated
// and public, then annotated, then public, then the others; among equals the
// first by name.
func StaticLeaders(g Granularity, nodes []Node) Leaders {
	best := map[string]Node{}
	for _, n := range nodes {
		if n.missing() != nil {
			continue
		}
		id := locationID(g, n)
		if b, ok := best[id]; !ok || compareCandidates(n, b) < 0 {
			best[id] = n
		}
	}
	leaders := make(Leaders, len(best))
	for id, n := range best {
		leaders[id] = n.Name
	}
	return leaders
}

// compareCandidates orders the better leader first.
func compareCandidates(a, b Node) int {
	return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
}

func rank(n Node) int {
	switch public := hasPublicEndpoint(n); {
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
func hasPublicEndpoint(n Node) bool {
	return n.Endpoint.DNS != "" || IsPublic(n.Endpoint.IP)
}

// locationID returns the key of the location that n is in, as far as tunnels go.
func locationID(g Granularity, n Node) string {
	if g == GranularityLocation {
		return siteID(n)
	}
	return "node:" + n.Name
}

// siteID returns the key of the nodes that n reaches without the mesh. A node
// without an internal IP cannot be reached by its neighbours except through the
// mesh, so it is on its own.
func siteID(n Node) string {
	if len(n.InternalIPs) == 0 {
		return "node:" + n.Name
	}
	return "location:" + n.Location
}

func sortedByName(nodes []Node) []Node {
	return slices.SortedFunc(slices.Values(nodes), func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
}
