// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kilomesh/kilo/internal/mesh"
)

// TestPublicationRoundTrip: what a node publishes is what the others read.
func TestPublicationRoundTrip(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := drawPublication(rt)
		node := testNode(annotations{})
		for key, v := range difference(nil, annotationsOf(p)) {
			if v == nil {
				rt.Fatalf("%s removed from nothing", key)
			}
			node.Annotations[key] = *v
		}
		got, _, problems := ParseNode(node, topologyLabel)
		want := mesh.Node{Name: "n", Key: p.Key, Endpoint: p.Endpoint, InternalIPs: p.InternalIPs, Granularity: p.Granularity}
		for _, ip := range p.WireGuardIPs {
			want.WireGuardIPs = append(want.WireGuardIPs, ip.Addr())
		}
		for _, ip := range p.LocationIPs {
			want.LocationIPs = append(want.LocationIPs, ip.Addr())
		}
		for _, ip := range p.CNICompatibilityIPs {
			want.CNICompatibilityIPs = append(want.CNICompatibilityIPs, ip.Addr())
		}
		if diff := cmp.Diff(want, got, compare()); diff != "" || len(problems) > 0 {
			rt.Fatalf("problems %v, node (-want +got):\n%s", problems, diff)
		}
		if again := difference(node.Annotations, annotationsOf(p)); len(again) > 0 {
			rt.Fatalf("published, and yet different: %v", again)
		}
	})
}

func drawPublication(t *rapid.T) mesh.Publication {
	key := mesh.PublicKey(rapid.SliceOfN(rapid.Byte(), mesh.KeySize, mesh.KeySize).Draw(t, "key"))
	p := mesh.Publication{Key: key, InternalIPs: drawPair(t, "internal"), WireGuardIPs: drawPair(t, "wireguard"), CNICompatibilityIPs: drawPair(t, "cilium"), LocationIPs: drawPair(t, "location")}
	port := rapid.Uint16Min(1).Draw(t, "port")
	switch rapid.IntRange(0, 2).Draw(t, "endpoint") {
	case 1:
		p.Endpoint = mesh.Endpoint{IP: drawPrefix(t, rapid.Bool().Draw(t, "v4")).Addr(), Port: port}
	case 2:
		p.Endpoint = mesh.Endpoint{DNS: rapid.StringMatching(`[a-z]([a-z0-9-]{0,20}[a-z0-9])?\.[a-z]{2,5}`).Draw(t, "name"), Port: port}
	}
	p.Granularity = rapid.SampledFrom([]mesh.Granularity{mesh.GranularityLocation, mesh.GranularityFull}).Draw(t, "granularity")
	return p
}

// drawPair draws at most one prefix of each family, IPv4 first.
func drawPair(t *rapid.T, label string) []netip.Prefix {
	var out []netip.Prefix
	if rapid.Bool().Draw(t, label+" v4") {
		out = append(out, drawPrefix(t, true))
	}
	if rapid.Bool().Draw(t, label+" v6") {
		out = append(out, drawPrefix(t, false))
	}
	return out
}

func drawPrefix(t *rapid.T, v4 bool) netip.Prefix {
	size := 16
	if v4 {
		size = 4
	}
	ip, _ := netip.AddrFromSlice(rapid.SliceOfN(rapid.Byte(), size, size).Draw(t, "address"))
	if ip.Is4In6() {
		ip = netip.MustParseAddr("fd00::1")
	}
	return netip.PrefixFrom(ip, rapid.IntRange(0, ip.BitLen()).Draw(t, "length"))
}

// FuzzParseNode: whatever the text, messages are bounded and values are as promised.
func FuzzParseNode(f *testing.F) {
	f.Add("10.0.0.1:51820", "10.1.0.1/24,fd00::1", "10.1.0.0/16, 10.2.0.1", "25", keyA, "10.4.0.1/16", "10.2.1.0/24")
	f.Add("[::ffff:1.2.3.4]:1", "-", ",", "-5", "", "::ffff:1.2.3.4/96", "::ffff:0:0/0")
	f.Add("[fe80::1%eth0]:1", "fe80::1%0/64", "::/0", "1e3", keyB, "fe80::1%1", "0.0.0.0/0")
	f.Fuzz(func(t *testing.T, endpoint, internal, allowed, keepalive, key, wireGuard, podCIDR string) {
		node := testNode(annotations{
			AnnotationForceEndpoint: endpoint, AnnotationEndpoint: endpoint, AnnotationForceInternalIP: internal, AnnotationInternalIP: internal,
			AnnotationInternalIPv6: wireGuard, AnnotationAllowedLocationIPs: allowed, AnnotationPersistentKeepalive: keepalive,
			AnnotationKey: key, AnnotationWireGuardIP: wireGuard, AnnotationWireGuardIPv6: internal,
		})
		node.Spec.PodCIDRs = []string{podCIDR, internal}
		n, d, problems := ParseNode(node, topologyLabel)
		for _, p := range problems {
			if p.Object != "node/n" || p.Field == "" || len(p.Err.Error()) > 4*maxQuoted+300 {
				t.Errorf("problem %q", p)
			}
		}
		for _, p := range append(n.PodCIDRs, n.AllowedLocationIPs...) {
			if p != p.Masked() || !p.IsValid() || p.Addr().Is4In6() {
				t.Errorf("prefix %s", p)
			}
		}
		for _, list := range [][]netip.Prefix{n.PodCIDRs, n.InternalIPs, d.ForceInternalIPs} {
			if len(list) > 2 || len(list) == 2 && list[0].Addr().Is4() == list[1].Addr().Is4() {
				t.Errorf("more than one of a family: %v", list)
			}
			for _, p := range list {
				if !p.IsValid() || p.Addr().Is4In6() || p.Addr().Zone() != "" {
					t.Errorf("prefix %s", p)
				}
			}
		}
	})
}
