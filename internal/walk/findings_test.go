// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/kilomesh/kilo/internal/mesh"
)

// These meshes were found by TestRandomMeshes, or thought of while looking at what it found.

// allPairs proves a scene.
func allPairs(t *testing.T, s *scene) {
	t.Helper()
	c := mustCompute(t, s)
	_, failures, err := c.prove()
	if err != nil || len(failures) > 0 {
		t.Errorf("%v%v", err, errors.Join(failures...))
	}
}

// oneSite is two nodes of one network, without peers; every node has its own tunnels.
func oneSite(g mesh.Granularity) *scene {
	s := small(mesh.KindIPIP)
	s.cfg.Granularity, s.cfg.Encapsulation = g, mesh.EncapsulateNever
	s.peers, s.nodes = nil, s.nodes[1:]
	s.nodes[0].AllowedLocationIPs = nil
	s.sites[1].Strict = false
	s.nodes[1].InternalIPs = []netip.Prefix{pfx("10.101.0.3/24")}
	s.nodes[1].Endpoint.IP = ip("10.101.0.3")
	s.hosts["c"] = behindRouter("c", "two", "two/0", "10.101.0.3/24", "10.101.0.254")
	s.hosts["c"].PodCIDRs = s.nodes[1].PodCIDRs
	return s
}

// A node advertises its internal IP as endpoint, so others have no route for that
// through the tunnel. What the node itself sends must have another source (its
// WireGuard IP): answers to the internal IP leave in clear, or get lost.
func TestNodeWhoseInternalIPIsItsEndpointTalksEncrypted(t *testing.T) {
	allPairs(t, oneSite(mesh.GranularityFull))
}

// The node c is behind NAT for others and keeps its ways open, but shares a
// network with b, who takes c's endpoint for one that means nothing here and
// routes it through the tunnel: answers to where c's packets come from loop.
func TestNodeBehindNATIsReachedInItsOwnNetwork(t *testing.T) {
	s := oneSite(mesh.GranularityFull)
	s.nodes[1].PersistentKeepalive = 25
	s.nodes[0].Endpoint = mesh.Endpoint{IP: ip("198.51.100.33"), Port: 51820}
	s.hosts["b"].Links = append(s.hosts["b"].Links, Link{Name: "eth1", Segment: "two/public", Addrs: []netip.Prefix{pfx("198.51.100.33/28")}})
	allPairs(t, s)
}

// In cross a pod's packet to the allowed location IPs of a neighbour leaves on
// the underlay, so it must be masqueraded on every node of the location, as in
// granularity location, also if another program is the pod network.
func TestNeighboursAllowedLocationIPsInCrossAreMasqueraded(t *testing.T) {
	s := oneSite(mesh.GranularityCross)
	s.cfg.ManageCNI = false
	s.nodes[0].AllowedLocationIPs = []netip.Prefix{pfx("192.168.2.0/24")}
	allPairs(t, s)
}

// With Cilium the gateway is an address of its overlay, never in the own subnet:
// two nodes of one subnet need the tunnel link too.
func TestCiliumTunnelExistsInOneSubnet(t *testing.T) {
	s := oneSite(mesh.GranularityLocation)
	s.cfg.Encapsulation, s.cfg.AddOn, s.cfg.ManageCNI = mesh.EncapsulateCrossSubnet, mesh.AddOnCilium, false
	s.addOn()
	allPairs(t, s)
}

// Flannel has routes to the pods of all nodes, those of other locations too, to
// the same destinations as ours, and would send them through its own tunnel in clear.
func TestFlannelDoesNotCarryPacketsToOtherLocations(t *testing.T) {
	s := small(mesh.KindIPIP)
	s.cfg.AddOn, s.cfg.ManageCNI = mesh.AddOnFlannel, false
	s.addOn()
	allPairs(t, s)
}

// A location may announce what lies within a broader prefix of another; packets
// for it that its leader gets must not go back there.
func TestNarrowerAllowedLocationIPsDoNotLoop(t *testing.T) {
	s := small(mesh.KindIPIP)
	s.nodes[0].AllowedLocationIPs = []netip.Prefix{pfx("192.168.0.0/16")}
	s.nodes[1].Location, s.nodes[2].Location = "a-two", "a-two" // the narrower one is accepted first
	allPairs(t, s)
}
