// SPDX-License-Identifier: Apache-2.0

// Package kube is the API server's side of Kilo: Snapshot says what the cluster
// looks like, Publish and Withdraw write the annotations of the own node.
//
// In: Nodes and Peers, watched. Out: values of package mesh, parsed, checked
// and sorted, and a Problem for everything in them that could not be read.
//
// ParseNode and ParsePeer are the only readers of annotations and of Peer
// specs, and are pure. An informer's transform calls them as soon as an object
// arrives: each version of an object is parsed once, the caches hold results
// alone, and whatever else is in a Node (images, conditions, managed fields)
// is let go before it is stored. Two versions with the same result are the same,
// so a kubelet's status heartbeat wakes nobody.
//
// Events carry no data. The handlers only poke, and a Snapshot is computed from
// the caches as they are: tombstones, restarted watches, objects that turn
// invalid and valid again or come back under the same name all lead to what a
// fresh start would find.
//
// Limits: there are no Events, Leases or Peer conditions here yet. The package
// knows nothing of the host, and decides nothing about the mesh: prefixes that
// overlap between objects are for mesh.Compute.
package kube
