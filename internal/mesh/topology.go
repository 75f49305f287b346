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
// node that sees the same cluster.
type Topology struct {
	cfg Config
	// Locations by ID.
	Locations []Location
	// Peers by name, each with the allowed IPs that it owns.
	Peers []Peer
}

// Location is a group of nodes that reach each other without the mesh.
type Location struct {
	// ID is "location:" and the name that the user gave, or "node:" and the
	// name of a node that is a location of its own.
	ID string
	// Site is the key of the Locations that reach each other without the mesh:
	// more than one in granularity cross alone, else the same as ID.
	Site string
	// Nodes by name.
	Nodes []Node
	// Leader is the index in Nodes of the node that carries the location's traffic.
	Leader int
	// WireGuardIPs are the location's addresses in the mesh, at most one for each family.
	WireGuardIPs []netip.Addr
	// PodCIDRs, InternalIPs (as single addresses) and AllowedLocationIPs are
	// the prefixes of its nodes that the location owns.
	PodCIDRs, InternalIPs, AllowedLocationIPs []netip.Prefix
}

// Lead returns the leader.
func (l *Location) Lead() *Node { return &l.Nodes[l.Leader] }

// WireGuardIP returns the location's address of the family of like, zero without one.
func (l *Location) WireGuardIP(like netip.Addr) netip.Addr {
	for _, ip := range l.WireGuardIPs {
		if ip.Is4() == like.Is4() {
			return ip
		}
	}
	return netip.Addr{}
}

// known lists what the location owns and packets keep their source for.
func (l *Location) known() []netip.Prefix {
	ps := slices.Concat(l.PodCIDRs, l.InternalIPs)
	for _, ip := range l.WireGuardIPs {
		ps = append(ps, single(ip))
	}
	return ps
}

// Compute joins nodes and peers to a mesh. Nodes that have not published all
// they must, locations without a leader and prefixes that another owns are left
// out; Problems say which and why. A node that never published a key has no
// agent yet, and is no Problem.
func Compute(cfg Config, nodes []Node, peers []Peer, leaders Leaders) (*Topology, []Problem) {
	t := &Topology{cfg: cfg}
	var problems []Problem
	report := func(object, field string, err error) {
		problems = append(problems, Problem{object, field, err})
	}
	owners := map[PublicKey]string{}
	t.Locations = gather(cfg, nodes, leaders, owners, report)
	allocate(cfg.WireGuardCIDRs, t.Locations, report)
	claims := ownership{}
	claims.nodes(t.Locations, report)
	claims.allowedLocationIPs(t.Locations, report)
	t.Peers = claims.peers(peers, owners, report)
	reportMissingCIDRs(cfg, t.Locations, report)
	return t, sortCompactProblems(problems)
}

type reportFunc func(object, field string, err error)

// gather groups the nodes that can take part and have a leader. owners gets
// the name of the node that each key belongs to.
func gather(cfg Config, nodes []Node, leaders Leaders, owners map[PublicKey]string, report reportFunc) []Location {
	byID := map[string]*Location{}
	for _, n := range sortedByName(nodes) {
		object := "node/" + n.Name
		if err := n.missing(); err != nil {
			if !n.Key.IsZero() {
				report(object, "", fmt.Errorf("is left out of the mesh: %w", err))
			}
			continue
		}
		if owner, ok := owners[n.Key]; ok {
			report(object, "key", fmt.Errorf("public key %s is left out of the mesh: it is that of %s; want a key of its own, from a key file that was not copied", n.Key, owner))
			continue
		}
		owners[n.Key] = object
		id := locationID(cfg.Granularity, n)
		l := byID[id]
		if l == nil {
			l = &Location{ID: id, Site: id, Leader: -1}
			if cfg.Granularity == GranularityCross {
				l.Site = siteID(n)
			}
			byID[id] = l
		}
		if leaders[id] == n.Name {
			l.Leader = len(l.Nodes)
		}
		l.Nodes = append(l.Nodes, n)
	}
	locations := make([]Location, 0, len(byID))
	for _, l := range byID {
		if l.Leader < 0 {
			report(l.ID, "", fmt.Errorf("is left out of the mesh: %q, chosen to lead it, is none of its nodes that take part", leaders[l.ID]))
			continue
		}
		locations = append(locations, *l)
	}
	slices.SortFunc(locations, func(a, b Location) int { return cmp.Compare(a.ID, b.ID) })
	return locations
}

// reportMissingCIDRs finds families of pods for which there are no WireGuard IPs.
func reportMissingCIDRs(cfg Config, locations []Location, report reportFunc) {
	for _, l := range locations {
		for _, p := range l.PodCIDRs {
			if _, ok := ofFamily(cfg.WireGuardCIDRs, p.Addr()); !ok {
				report("flag/--subnet", "", fmt.Errorf("has no %s range, but nodes have pod CIDRs like %s; want one range for each family", familyName(p.Addr()), p))
				return
			}
		}
	}
}

// index returns where the node is: the location and the place in it.
func (t *Topology) index(name string) (location, node int, ok bool) {
	for i := range t.Locations {
		j, ok := slices.BinarySearchFunc(t.Locations[i].Nodes, name, func(n Node, name string) int { return cmp.Compare(n.Name, name) })
		if ok {
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
	p = PublicationOf(t.cfg, l.Nodes[j])
	if j == l.Leader {
		for _, ip := range l.WireGuardIPs {
			cidr, _ := ofFamily(t.cfg.WireGuardCIDRs, ip)
			p.WireGuardIPs = append(p.WireGuardIPs, netip.PrefixFrom(ip, cidr.Bits()))
		}
	}
	return p, true
}

// PublicationOf returns what a node that is not part of the mesh yet tells the others.
func PublicationOf(cfg Config, n Node) Publication {
	return Publication{Key: n.Key, Endpoint: n.Endpoint, InternalIPs: n.InternalIPs, Granularity: cfg.Granularity}
}

// Leads reports whether the node of that name leads its location.
func (t *Topology) Leads(name string) bool {
	i, j, ok := t.index(name)
	return ok && t.Locations[i].Leader == j
}

// NodeCount returns how many nodes take part.
func (t *Topology) NodeCount() int {
	n := 0
	for _, l := range t.Locations {
		n += len(l.Nodes)
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
