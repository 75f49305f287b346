// SPDX-License-Identifier: Apache-2.0

// Package mesh is the pure core of Kilo: what should one node look like, given
// the cluster? It has no I/O, no clock, no goroutine, no logger and no
// Kubernetes type; the same input gives the same output on every machine.
//
// In go
//
//   - Config, what the flags say;
//   - []Node and []Peer, what the API server says of everybody;
//   - Leaders, who leads each location: decided outside, by StickyLeaders or
//     StaticLeaders, never by Compute;
//   - Facts, what this host's kernel says, and Declared, what users and
//     Kubernetes say of this node. Detect makes the own Node of them.
//
// Out come
//
//   - Topology, who talks to whom, which every node computes alike;
//   - State, what one node's kernel needs, and the whole contract with the
//     package that applies it;
//   - Problems, the inputs that the mesh had to work around.
//
// What holds, and is tested:
//
//   - order: permuting nodes and peers changes nothing;
//   - one owner: no prefix belongs to two keys. Nodes' pod CIDRs, WireGuard IPs
//     and internal IPs come before allowed location IPs, these before peers;
//     among equals the first by name wins. The loser is a Problem;
//   - stable addresses: a location that published its WireGuard IP keeps it,
//     whoever comes and goes; the lowest free one goes to a new location;
//   - robustness: a broken node or peer gives a Problem and the same mesh
//     without it;
//   - two families: IPv4 and IPv6 never mix in a route, and a cluster of one
//     family is planned as if the other did not exist.
package mesh
