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

// A leader carries IPv6 for its location, also if its own pods have none.
func TestLeaderForwardsAFamilyThatItsOwnPodsLack(t *testing.T) {
	s := small(mesh.KindIPIP)
	s.cfg.WireGuardCIDRs = append(s.cfg.WireGuardCIDRs, pfx("fd00:4::/64"))
	for i, second := range []string{"fd80::1/64", "fd81::2/64", "fd81:1::3/64"} {
		n := &s.nodes[i]
		h := s.hosts[n.Name]
		n.InternalIPs = append(n.InternalIPs, pfx(second))
		h.Links[len(h.Links)-1].Addrs = append(h.Links[len(h.Links)-1].Addrs, pfx(second))
		if n.Name == "b" {
			continue
		}
		n.PodCIDRs = append(n.PodCIDRs, pfx([]string{"fd10:1::/64", "", "fd10:3::/64"}[i]))
		h.PodCIDRs = n.PodCIDRs
	}
	for name, router := range map[string]string{"b": "fd81::fe", "c": "fd81:1::fe"} {
		s.hosts[name].Routes = append(s.hosts[name].Routes, Route{Dst: pfx("::/0"), Via: ip(router), Dev: "eth0"})
		s.sites[1].Routers = append(s.sites[1].Routers, ip(router))
	}
	allPairs(t, s)
}

// The node a has a public endpoint, but in its own network b hears it from its
// internal IP. WireGuard's answers to there cannot go through the tunnel, yet all
// else that b sends to that internal IP must.
func TestWhatIsForAnAddressThatAPeerIsHeardFromIsSealed(t *testing.T) {
	s := oneSite(mesh.GranularityFull)
	s.nodes[1].PersistentKeepalive = 25
	allPairs(t, s)
}

// The peer is behind NAT, and another one has a prefix that holds its public address.
func TestPeerBehindNATIsAnsweredDespiteABroaderPrefix(t *testing.T) {
	for _, broad := range []string{"203.0.112.0/22", "0.0.0.0/0"} {
		s := small(mesh.KindIPIP)
		s.peers = append(s.peers, mesh.Peer{Name: "q", Key: publicKeys[secrets[9]], AllowedIPs: []netip.Prefix{pfx("10.5.0.2/32"), pfx(broad)}, PersistentKeepalive: 25})
		s.hosts["peer/q"], s.secrets["peer/q"] = behindRouter("peer/q", "office", "office", "172.16.1.2/24", "172.16.1.1"), secrets[9]
		s.sites = append(s.sites, Site{Name: "office", Routers: []netip.Addr{ip("172.16.1.1")}, NAT: []netip.Addr{ip("203.0.113.10")}})
		allPairs(t, s)
	}
}

// The network behind b does not know pods, whatever a peer has besides.
func TestPacketsToAllowedLocationIPsAreMasqueradedWithinAPeersBroaderPrefix(t *testing.T) {
	s := small(mesh.KindIPIP)
	s.peers[0].AllowedIPs = append(s.peers[0].AllowedIPs, pfx("192.168.0.0/16"))
	allPairs(t, s)
}

// The node d has the address of b, in another network, and advertises it: to c it
// is no way to d, and what c sends to it is for b.
func TestPrivateEndpointThatIsAnothersAddressIsSealed(t *testing.T) {
	s := oneSite(mesh.GranularityFull)
	d := s.nodes[0]
	d.Name, d.Location, d.Key, d.PersistentKeepalive = "d", "three", publicKeys[secrets[3]], 25
	d.PodCIDRs, d.Endpoint = []netip.Prefix{pfx("10.2.4.0/24")}, mesh.Endpoint{IP: ip("10.101.0.2"), Port: 51820}
	s.nodes = append(s.nodes, d)
	s.sites = append(s.sites, Site{Name: "three", Routers: []netip.Addr{ip("10.101.0.254")}, NAT: []netip.Addr{ip("203.0.113.3")}})
	s.hosts["d"], s.secrets["d"] = behindRouter("d", "three", "three/0", "10.101.0.2/24", "10.101.0.254"), secrets[3]
	s.hosts["d"].PodCIDRs = d.PodCIDRs
	allPairs(t, s)
}

// A location for which the range has no WireGuard IP left knows the way to those of the others.
func TestLocationWithoutAWireGuardIPAnswersTheOthers(t *testing.T) {
	s := oneSite(mesh.GranularityFull)
	s.cfg.WireGuardCIDRs = []netip.Prefix{pfx("10.4.0.0/31")} // for b alone, which talks from there
	s.nodes[0].Endpoint = mesh.Endpoint{IP: ip("10.101.0.2"), Port: 51820}
	allPairs(t, s)
}
