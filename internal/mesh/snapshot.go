// SPDX-License-Identifier: Apache-2.0

package mesh

import "net/netip"

// Snapshot is the cluster as the API server last told it. Nobody mutates it.
type Snapshot struct {
	// Nodes and Peers that could be read, by name. Nodes contains the own node
	// as it published itself; Detect says what it is now.
	Nodes []Node
	Peers []Peer
	// Self is what users and Kubernetes say of the own node; nil if it has no Node object.
	Self *Declared
	// Problems of the objects that could not be read, or not whole.
	Problems []Problem
}

// Declared is what users and Kubernetes, and not Kilo, say of a node.
type Declared struct {
	// Node holds the fields that are only ever declared: Name, Location,
	// WantsLead, PodCIDRs, PersistentKeepalive and AllowedLocationIPs, and
	// WireGuardIPs and LocationIPs, the claims that an earlier run published.
	Node Node
	// ForceEndpoint is the annotation force-endpoint, zero without one. Its
	// port is also the local listen port.
	ForceEndpoint Endpoint
	// ForceInternalIPs is the annotation force-internal-ip; NoInternalIP says
	// that it is there and denies the node one.
	ForceInternalIPs []netip.Prefix
	NoInternalIP     bool
	// InternalIPs and ExternalIPs are status.addresses of those types, in the object's order.
	InternalIPs []netip.Addr
	ExternalIPs []netip.Addr
}

// Publication is what a node tells the others about itself.
type Publication struct {
	Key      PublicKey
	Endpoint Endpoint
	// InternalIPs with the length of the subnet they are in, at most one for each family.
	InternalIPs []netip.Prefix
	// WireGuardIPs with the length of the WireGuard CIDR; only of a leader, at most one for each family.
	WireGuardIPs []netip.Prefix
	// LocationIPs are the leader's WireGuardIPs, of a node that has another leader.
	LocationIPs []netip.Prefix
	// CNICompatibilityIPs as single addresses, in the add-on modes that need them.
	CNICompatibilityIPs []netip.Prefix
	Granularity         Granularity
}
