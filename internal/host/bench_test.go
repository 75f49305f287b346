// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"go4.org/netipx"

	"github.com/kilomesh/kilo/internal/mesh"
)

// plannedState is the State of the first of n nodes in the given number of locations.
func plannedState(b *testing.B, g mesh.Granularity, n, locations int) mesh.State {
	b.Helper()
	addr := func(first byte, i int) netip.Addr {
		return netip.AddrFrom4([4]byte{first, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	nodes := make([]mesh.Node, n)
	for i := range nodes {
		var key mesh.PublicKey
		binary.BigEndian.PutUint32(key[:], uint32(i+1)*2654435761) //nolint:gosec // spread, as real keys are
		key[31] = 1
		nodes[i] = mesh.Node{
			Name: fmt.Sprintf("node-%05d", i), Location: fmt.Sprint(i % locations), Key: key, ListenPort: 51820,
			Endpoint:    mesh.Endpoint{IP: addr(198, i+1), Port: 51820},
			InternalIPs: []netip.Prefix{netip.PrefixFrom(addr(10, i+1), 16)},
			PodCIDRs:    []netip.Prefix{netip.PrefixFrom(addr(20, i<<8), 24)},
		}
	}
	cfg := mesh.Config{
		Granularity: g, Encapsulation: mesh.EncapsulateNever, WireGuardCIDRs: []netip.Prefix{pfx("10.4.0.0/16")},
		ManageLocal: true, ManageCNI: true, WireGuardDev: "kilo0", TunnelDev: "tunl0",
	}
	t, _ := mesh.Compute(cfg, nodes, nil, mesh.StaticLeaders(g, nodes))
	facts := mesh.Facts{Addrs: []mesh.LinkAddr{{Dev: "eth0", Prefix: nodes[0].InternalIPs[0], MTU: 1500}}, DefaultDev: "eth0", DefaultMTU: 1500}
	s, _, err := t.State(nodes[0].Name, secret(1), facts)
	if err != nil {
		b.Fatal(err)
	}
	return s
}

// BenchmarkDiff compares a State with what a kernel holds that lacks one node:
// routes, WireGuard device and firewall sets, without reading the kernel.
func BenchmarkDiff(b *testing.B) {
	for _, bb := range []struct {
		name         string
		g            mesh.Granularity
		n, locations int
	}{
		{"full-1000", mesh.GranularityFull, 1000, 1000},
		{"full-5000", mesh.GranularityFull, 5000, 5000},
		{"5000-in-500-locations", mesh.GranularityLocation, 5000, 500},
	} {
		want := plannedState(b, bb.g, bb.n, bb.locations)
		less := plannedState(b, bb.g, bb.n-1, bb.locations)
		var have []*ownRoute
		for _, r := range less.Routes {
			have = append(have, &ownRoute{Route: r, key: keyOf(r)})
		}
		device := deviceOf(less.Device)
		var ranges [][]netipx.IPRange
		for _, s := range firewallTable(less.Firewall).sets {
			ranges = append(ranges, slices.Collect(s.ranges))
		}
		b.Run(bb.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				routes := diffRoutes(want.Routes, have)
				peers := diffDevice(want.Device, device, desired{}, time.Time{})
				changed := 0
				for i, s := range firewallTable(want.Firewall).sets {
					add, del := diffRanges(s.ranges, ranges[i])
					changed += len(add) + len(del)
				}
				if len(routes.add) == 0 || len(routes.add)+len(routes.stale)+len(peers.grow)+len(peers.shrink)+changed > 20 {
					b.Fatalf("%d routes, %d peers, %d ranges differ, want those of one node", len(routes.add), len(peers.grow), changed)
				}
			}
		})
	}
}
