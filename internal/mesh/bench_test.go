// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"testing"
)

// largeMesh has n nodes in the given number of locations, each with all that a
// node of a running cluster publishes.
func largeMesh(n, locations int) []Node {
	nodes := make([]Node, n)
	for i := range nodes {
		number := func(first byte, i int) netip.Addr {
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], uint32(first)<<24|uint32(i))
			return netip.AddrFrom4(b)
		}
		var key PublicKey
		binary.BigEndian.PutUint32(key[:], uint32(i+1)*2654435761) // spread, as real keys are
		key[31] = 1
		nodes[i] = Node{
			Name: fmt.Sprintf("node-%05d", i), Location: "location-" + strconv.Itoa(i%locations),
			Endpoint:    Endpoint{IP: number(198, i+1), Port: 51820},
			InternalIPs: []netip.Prefix{netip.PrefixFrom(number(10, i+1), 16)},
			PodCIDRs:    []netip.Prefix{netip.PrefixFrom(number(20, i<<8), 24)},
			Key:         key, ListenPort: 51820,
		}
	}
	cfg := benchConfig(GranularityFull)
	t, _ := Compute(cfg, nodes, nil, StaticLeaders(cfg.Granularity, nodes))
	for i := range t.Locations {
		lead := t.Locations[i].Lead()
		for j := range nodes {
			if nodes[j].Name == lead.Name {
				nodes[j].WireGuardIPs = t.Locations[i].WireGuardIPs
				break
			}
		}
		if i > 50 { // a part of the claims is enough
			break
		}
	}
	return nodes
}

func benchConfig(g Granularity) Config {
	cfg := testConfig()
	cfg.Granularity, cfg.Encapsulation = g, EncapsulateCrossSubnet
	return cfg
}

// BenchmarkPlan is the whole way from nodes to the State of a leader. The
// existing Kilo needs 48 ms and 35 MB for 5,000 nodes in granularity full.
func BenchmarkPlan(b *testing.B) {
	for _, bb := range []struct {
		name         string
		g            Granularity
		n, locations int
	}{
		{"full-1000", GranularityFull, 1000, 1000},
		{"full-5000", GranularityFull, 5000, 5000},
		{"5000-in-500-locations", GranularityLocation, 5000, 500},
	} {
		nodes := largeMesh(bb.n, bb.locations)
		cfg := benchConfig(bb.g)
		facts := Facts{Addrs: []LinkAddr{{Dev: "eth0", Prefix: nodes[0].InternalIPs[0], MTU: 1500}}, DefaultDev: "eth0", DefaultMTU: 1500}
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				t, _ := Compute(cfg, nodes, nil, StaticLeaders(cfg.Granularity, nodes))
				if _, _, err := t.State(nodes[0].Name, secret(1), facts); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
