// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestSortsAgreeWithTheirOrders(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefix := func(label string) netip.Prefix {
			b := [16]byte{0: 0xfd, 14: byte(rapid.IntRange(0, 255).Draw(t, label)), 15: byte(rapid.IntRange(0, 255).Draw(t, label))}
			if rapid.Bool().Draw(t, label+" IPv6") {
				return netip.PrefixFrom(netip.AddrFrom16(b), rapid.IntRange(112, 128).Draw(t, label)).Masked()
			}
			return netip.PrefixFrom(netip.AddrFrom4([4]byte(b[12:])), rapid.IntRange(0, 32).Draw(t, label)).Masked()
		}
		seen := map[Route]bool{}
		var routes []Route
		var ps []netip.Prefix
		for range rapid.IntRange(0, 30).Draw(t, "routes") {
			r := Route{Dst: prefix("dst"), Table: rapid.SampledFrom([]int{TableMain, TableTunnel}).Draw(t, "table")}
			ps = append(ps, r.Dst)
			if !seen[r] {
				seen[r] = true
				routes = append(routes, r)
			}
		}
		wantRoutes, wantPrefixes := slices.SortedFunc(slices.Values(routes), Route.Compare), slices.SortedFunc(slices.Values(ps), ComparePrefix)
		SortPrefixes(ps)
		sortRoutes(routes)
		if !slices.Equal(routes, wantRoutes) {
			t.Errorf("sortRoutes: %v, want %v", routes, wantRoutes)
		}
		if !slices.Equal(ps, wantPrefixes) {
			t.Errorf("SortPrefixes: %v, want %v", ps, wantPrefixes)
		}
	})
}

// Keys that share their first bits are rare, and so drawn on purpose.
func TestKeysAreSortedAndFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		key := func(label string) PublicKey {
			return PublicKey{0: byte(rapid.IntRange(0, 2).Draw(t, label)), 5: byte(rapid.IntRange(0, 255).Draw(t, label)), 31: byte(rapid.IntRange(0, 3).Draw(t, label))}
		}
		var nodes []*Node
		var peers []DevicePeer
		for i := range rapid.IntRange(0, 40).Draw(t, "nodes") {
			nodes = append(nodes, &Node{Key: key("key")})
			peers = append(peers, DevicePeer{Key: nodes[i].Key})
		}
		first := func(k PublicKey) *Node {
			if i := slices.IndexFunc(nodes, func(n *Node) bool { return n.Key == k }); i >= 0 {
				return nodes[i]
			}
			return nil
		}
		ring, shared := newKeyring(nodes), false
		for _, n := range nodes {
			shared = shared || first(n.Key) != n
			if got := ring.find(n.Key); got != first(n.Key) {
				t.Fatalf("find(%v) is not the first node with that key", n.Key)
			}
		}
		if other := key("another"); ring.find(other) != first(other) {
			t.Fatalf("find(%v) = %v", other, ring.find(other))
		}
		if ring.shared() != shared {
			t.Fatalf("shared = %v, want %v", ring.shared(), shared)
		}
		sortPeers(peers)
		if !slices.IsSortedFunc(peers, func(a, b DevicePeer) int { return a.Key.Compare(b.Key) }) {
			t.Fatalf("sortPeers: %v", peers)
		}
	})
}
