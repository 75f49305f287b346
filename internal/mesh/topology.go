// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Topology is the computed mesh: who talks to whom. It is the same on every
// node that sees the same cluster. It refers to the Nodes that it was computed from.
type Topology struct {
	cfg Config
	// prefixes counts what all Locations own, claims says who.
	prefixes int
	claims   nodeClaims
	// Locations by ID.
	Locations []Location
	// Peers by name, each with the allowed IPs that it owns.
	Peers []Peer
}

// Location is a group of nodes that reach each other without the mesh.
type Location struct {
	place, site place
	// Nodes by name.
	Nodes []*Node
	// Leader is the index in Nodes of the node that carries the location's traffic.
	Leader int
	// WireGuardIPs are the location's addresses in the mesh, at most one for each family.
	WireGuardIPs []netip.Addr
	// owned are the prefixes of its nodes that the location owns: pod CIDRs, as many
	// as pods, internal IPs, as many as internals, WireGuard IPs, allowed location IPs.
	owned           []netip.Prefix
	pods, internals int32
}

// ID is "location:" and the name that the user gave, or "node:" and the
// name of a node that is a location of its own.
func (l *Location) ID() string { return l.place.id() }

// Site is the ID of the Locations that reach each other without the mesh:
// more than one in granularity cross alone, else the same as ID.
func (l *Location) Site() string { return l.site.id() }

// PodCIDRs returns those of its nodes that the location owns.
func (l *Location) PodCIDRs() []netip.Prefix { return l.owned[:l.pods:l.pods] }

// InternalIPs returns those of its nodes that the location owns, as single addresses.
func (l *Location) InternalIPs() []netip.Prefix {
	end := l.pods + l.internals
	return l.owned[l.pods:end:end]
}

// AllowedLocationIPs returns those of its nodes that the location owns.
func (l *Location) AllowedLocationIPs() []netip.Prefix { return slices.Clip(l.owned[l.known():]) }

// known counts what packets keep their source for: all but the allowed location IPs.
func (l *Location) known() int { return int(l.pods+l.internals) + len(l.WireGuardIPs) }

// Owned returns all that the location owns, WireGuard IPs among it.
func (l *Location) Owned() []netip.Prefix { return slices.Clip(l.owned) }

// Lead returns the leader.
func (l *Location) Lead() *Node { return l.Nodes[l.Leader] }

// WireGuardIP returns the location's address of the family of like, zero without one.
func (l *Location) WireGuardIP(like netip.Addr) netip.Addr {
	for _, ip := range l.WireGuardIPs {
		if ip.Is4() == like.Is4() {
			return ip
		}
	}
	return netip.Addr{}
}

// Compute joins nodes and peers to a mesh. Nodes that have not published all
// they must, locations without a leader and prefixes that another owns are left
// out; Problems say which and why. A node that never published a key has no
// agent yet, and is no Problem. Neither slice is changed.
func Compute(cfg Config, nodes []Node, peers []Peer, leaders Leaders) (*Topology, []Problem) {
	t := &Topology{cfg: cfg}
	var problems []Problem
	report := func(object, field string, err error) {
		problems = append(problems, Problem{object, field, err})
	}
	members, keys := participants(nodes, report)
	t.Locations = gather(cfg.Granularity, members, leaders, report)
	allocate(cfg.WireGuardCIDRs, t.Locations, report)
	claims := newOwnership(t.Locations, report)
	claims.nodes()
	claims.allowedLocationIPs()
	t.Peers = claims.peers(peers, keys)
	for i := range t.Locations {
		t.prefixes += len(t.Locations[i].owned)
	}
	t.claims = claims.nodeClaims
	reportMissingCIDRs(cfg, t.Locations, report)
	reportGranularities(cfg, members, report)
	return t, sortCompactProblems(problems)
}

type reportFunc func(object, field string, err error)

// participants returns the nodes that can take part, by name, and the object that each key belongs to.
func participants(nodes []Node, report reportFunc) (members []*Node, keys keyring) {
	members = slices.DeleteFunc(sortedByName(nodes), func(n *Node) bool {
		err := n.missing()
		if err != nil && !n.Key.IsZero() {
			report("node/"+n.Name, "", fmt.Errorf("is left out of the mesh: %w", err))
		}
		return err != nil
	})
	keys = newKeyring(members)
	if !keys.shared() {
		return members, keys
	}
	members = slices.DeleteFunc(slices.Clone(members), func(n *Node) bool {
		other := keys.find(n.Key)
		if other != n {
			report("node/"+n.Name, "key", fmt.Errorf("public key %s is left out of the mesh: it is that of node/%s; want a key of its own, from a key file that was not copied", n.Key, other.Name))
		}
		return other != n
	})
	return members, keys
}

// gather groups the members, which are sorted, to Locations that have a leader.
func gather(g Granularity, members []*Node, leaders Leaders, report reportFunc) []Location {
	if g != GranularityLocation {
		return gatherSingles(g, members)
	}
	index := map[place]int{}
	var locations []Location
	for _, n := range members {
		p := siteOf(n)
		at, ok := index[p]
		if !ok {
			at = len(locations)
			index[p] = at
			locations = append(locations, Location{place: p, site: p})
		}
		locations[at].Nodes = append(locations[at].Nodes, n)
	}
	locations = slices.DeleteFunc(locations, func(l Location) bool {
		if len(l.Nodes) > 1 && l.lead(leaders[l.ID()]) < 0 {
			report(l.ID(), "", fmt.Errorf("is left out of the mesh: %q, chosen to lead it, is none of its nodes that take part", leaders[l.ID()]))
			return true
		}
		return false
	})
	for i := range locations {
		if l := &locations[i]; len(l.Nodes) > 1 {
			l.Leader = l.lead(leaders[l.ID()])
		}
	}
	slices.SortFunc(locations, func(a, b Location) int { return a.place.compare(b.place) })
	return locations
}

// gatherSingles makes a Location of each member.
func gatherSingles(g Granularity, members []*Node) []Location {
	locations := make([]Location, len(members))
	for i, n := range members {
		l := &locations[i]
		l.place = place{own: true, name: n.Name}
		l.Nodes = members[i : i+1 : i+1]
		if l.site = l.place; g == GranularityCross {
			l.site = siteOf(n)
		}
	}
	return locations // the order of names is that of IDs
}

// lead returns the place in Nodes of the node of that name, -1 without one.
func (l *Location) lead(name string) int {
	return slices.IndexFunc(l.Nodes, func(n *Node) bool { return n.Name == name })
}

// reportMissingCIDRs finds families of pods for which there are no WireGuard IPs.
func reportMissingCIDRs(cfg Config, locations []Location, report reportFunc) {
	for i := range locations {
		for _, p := range locations[i].PodCIDRs() {
			if _, ok := ofFamily(cfg.WireGuardCIDRs, p.Addr()); !ok {
				report("flag/--subnet", "", fmt.Errorf("has no %s range, but nodes have pod CIDRs like %s; want one range for each family", familyName(p.Addr()), p))
				return
			}
		}
	}
}

// reportGranularities finds nodes whose agents take part in another kind of mesh.
func reportGranularities(cfg Config, members []*Node, report reportFunc) {
	for _, n := range members {
		if n.Granularity != "" && n.Granularity != cfg.Granularity {
			report("node/"+n.Name, "granularity", fmt.Errorf("its agent runs with granularity %s, and this one with %s; want one --mesh-granularity on all nodes", n.Granularity, cfg.Granularity))
		}
	}
}

// PublishedGranularity returns the granularity that the mesh of the nodes has,
// whatever their order; an error if none published one, or several differ.
func PublishedGranularity(nodes []Node) (Granularity, error) {
	var first *Node
	for _, n := range sortedByName(nodes) {
		switch {
		case n.Granularity == "":
		case first == nil:
			first = n
		case n.Granularity != first.Granularity:
			return "", fmt.Errorf("node/%s has granularity %s and node/%s has %s; want one --mesh-granularity on all nodes", first.Name, first.Granularity, n.Name, n.Granularity)
		}
	}
	if first == nil {
		return "", errors.New("no node has published its granularity; want at least one whose agent runs")
	}
	return first.Granularity, nil
}

// index returns where the node is: the location and the place in it.
func (t *Topology) index(name string) (location, node int, ok bool) {
	alone := place{own: true, name: name}
	i, ok := slices.BinarySearchFunc(t.Locations, alone, func(l Location, p place) int { return l.place.compare(p) })
	if ok {
		return i, 0, true
	}
	for i := range t.Locations {
		l := &t.Locations[i]
		if l.place.own { // as are all that follow
			break
		}
		if j, ok := slices.BinarySearchFunc(l.Nodes, name, func(n *Node, name string) int { return cmp.Compare(n.Name, name) }); ok {
			return i, j, true
		}
	}
	return 0, 0, false
}

// Publication returns what the node of that name tells the others; ok is
// false if it is not part of the mesh.
func (t *Topology) Publication(name string) (p Publication, ok bool) {
	i, j, ok := t.index(name)
	if !ok {
		return Publication{}, false
	}
	l := &t.Locations[i]
	p = PublicationOf(t.cfg, *l.Nodes[j])
	var ips []netip.Prefix
	for _, ip := range l.WireGuardIPs {
		cidr, _ := ofFamily(t.cfg.WireGuardCIDRs, ip)
		ips = append(ips, netip.PrefixFrom(ip, cidr.Bits()))
	}
	if j == l.Leader {
		p.WireGuardIPs = ips
	} else {
		p.LocationIPs = ips
	}
	return p, true
}

// PublicationOf returns what a node that is not part of the mesh yet tells the others.
func PublicationOf(cfg Config, n Node) Publication {
	p := Publication{Key: n.Key, Endpoint: n.Endpoint, InternalIPs: n.InternalIPs, Granularity: cfg.Granularity}
	if cfg.AddOn == AddOnCilium {
		for _, ip := range n.CNICompatibilityIPs {
			p.CNICompatibilityIPs = append(p.CNICompatibilityIPs, single(ip))
		}
	}
	return p
}

// Leads reports whether the node of that name leads its location.
func (t *Topology) Leads(name string) bool {
	i, j, ok := t.index(name)
	return ok && t.Locations[i].Leader == j
}

// NodeCount returns how many nodes take part.
func (t *Topology) NodeCount() int {
	n := 0
	for i := range t.Locations {
		n += len(t.Locations[i].Nodes)
	}
	return n
}

func sortCompactProblems(ps []Problem) []Problem {
	slices.SortFunc(ps, Problem.compare)
	return slices.CompactFunc(ps, func(a, b Problem) bool { return a.compare(b) == 0 })
}

func single(ip netip.Addr) netip.Prefix { return netip.PrefixFrom(ip, ip.BitLen()) }

func familyName(ip netip.Addr) string {
	if ip.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

var errExhausted = errors.New("has no free address left")
