// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kilomesh/kilo/internal/mesh"
)

func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func ip(s string) netip.Addr    { return netip.MustParseAddr(s) }

// small is a mesh of location one with the public node a, location two with its
// leader b, who is behind NAT with a forwarded port, and c in another subnet,
// and a VPN peer behind NAT. All packets inside a location go through a tunnel.
func small(tunnel mesh.LinkKind) *scene {
	node := func(i int, name, site, internal, pods string, endpoint mesh.Endpoint) mesh.Node {
		return mesh.Node{
			Name: name, Location: site, Key: publicKeys[secrets[i]], Endpoint: endpoint, ListenPort: 51820,
			InternalIPs: []netip.Prefix{pfx(internal)}, PodCIDRs: []netip.Prefix{pfx(pods)},
		}
	}
	s := &scene{
		cfg: mesh.Config{
			Granularity: mesh.GranularityLocation, Encapsulation: mesh.EncapsulateAlways, Tunnel: tunnel, ManageLocal: true, ManageCNI: true,
			WireGuardDev: "kilo0", TunnelDev: "tunl0", VXLANDev: "kilo-vxlan", WireGuardCIDRs: []netip.Prefix{pfx("10.4.0.0/16")},
		},
		nodes: []mesh.Node{
			node(0, "a", "one", "10.100.0.1/24", "10.2.1.0/24", mesh.Endpoint{IP: ip("198.51.100.1"), Port: 51820}),
			node(1, "b", "two", "10.101.0.2/24", "10.2.2.0/24", mesh.Endpoint{IP: ip("203.0.113.2"), Port: 40000}),
			node(2, "c", "two", "10.101.1.3/24", "10.2.3.0/24", mesh.Endpoint{IP: ip("10.101.1.3"), Port: 51820}),
		},
		peers: []mesh.Peer{{Name: "p", Key: publicKeys[secrets[8]], AllowedIPs: []netip.Prefix{pfx("10.5.0.1/32")}, PersistentKeepalive: 25, PresharedKey: mesh.NewSecretKey([mesh.KeySize]byte{1})}},
		sites: []Site{
			{Name: "one", Routers: []netip.Addr{ip("198.51.100.14"), ip("10.100.0.254")}},
			{
				Name: "two", Routers: []netip.Addr{ip("10.101.0.254"), ip("10.101.1.254")}, NAT: []netip.Addr{ip("203.0.113.2")}, Strict: true,
				Forward:  map[netip.AddrPort]netip.AddrPort{netip.MustParseAddrPort("203.0.113.2:40000"): netip.MustParseAddrPort("10.101.0.2:51820")},
				Networks: []netip.Prefix{pfx("192.168.2.0/24")},
			},
			{Name: "home", Routers: []netip.Addr{ip("172.16.0.1")}, NAT: []netip.Addr{ip("203.0.113.9")}},
		},
		hosts: map[string]*Host{
			"a": {
				Name: "a", Site: "one", Links: []Link{{Name: "eth0", Segment: "one", Addrs: []netip.Prefix{pfx("198.51.100.1/28")}}, {Name: "eth1", Segment: "one-private", Addrs: []netip.Prefix{pfx("10.100.0.1/24")}}},
				Routes: []Route{{Dst: pfx("0.0.0.0/0"), Via: ip("198.51.100.14"), Dev: "eth0"}},
			},
			"b":      behindRouter("b", "two", "two/0", "10.101.0.2/24", "10.101.0.254"),
			"c":      behindRouter("c", "two", "two/1", "10.101.1.3/24", "10.101.1.254"),
			"peer/p": behindRouter("peer/p", "home", "home", "172.16.0.2/24", "172.16.0.1"),
		},
		secrets: map[string]mesh.SecretKey{"a": secrets[0], "b": secrets[1], "c": secrets[2], "peer/p": secrets[8]},
	}
	s.nodes[1].AllowedLocationIPs = []netip.Prefix{pfx("192.168.2.0/24")}
	for _, n := range s.nodes {
		s.hosts[n.Name].PodCIDRs = n.PodCIDRs
	}
	return s
}

func behindRouter(name, site, segment, addr, router string) *Host {
	return &Host{
		Name: name, Site: site, Links: []Link{{Name: "eth0", Segment: segment, Addrs: []netip.Prefix{pfx(addr)}}},
		Routes: []Route{{Dst: pfx("0.0.0.0/0"), Via: ip(router), Dev: "eth0"}},
	}
}

func (c *computed) host(name string) *Host {
	return &c.hosts[slices.IndexFunc(c.hosts, func(h Host) bool { return h.Name == name })]
}

// disown takes a prefix from every peer of the host's device.
func disown(h *Host, p netip.Prefix) {
	for i := range h.State.Device.Peers {
		peer := &h.State.Device.Peers[i]
		peer.AllowedIPs = slices.DeleteFunc(slices.Clone(peer.AllowedIPs), func(q netip.Prefix) bool { return q == p })
	}
}

func (c *computed) site(name string) *Site {
	return &c.sites[slices.IndexFunc(c.sites, func(s Site) bool { return s.Name == name })]
}

func mustCompute(t testing.TB, s *scene) *computed {
	t.Helper()
	c, err := s.compute()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestSmallMeshIsWhole(t *testing.T) {
	for _, tunnel := range []mesh.LinkKind{mesh.KindIPIP, mesh.KindVXLAN} {
		c := mustCompute(t, small(tunnel))
		n, failures, err := c.prove()
		if err != nil || len(failures) > 0 || n != 38 {
			t.Errorf("tunnel %s: %d pairs, %v, %v; want 38 pairs and no failure", tunnel, n, err, failures)
		}
	}
}

func TestTraceSaysWhatHappened(t *testing.T) {
	w, err := mustCompute(t, small(mesh.KindIPIP)).world()
	if err != nil {
		t.Fatal(err)
	}
	trace, err := w.Ping(Packet{From: "a", Src: ip("10.2.1.3"), Dst: ip("10.2.3.3")})
	if err != nil {
		t.Fatal(err)
	}
	if trace.At != (Place{"c", "two", true}) || trace.Seen != ip("10.2.1.3") || trace.Sealed != 2 || len(trace.Clear) != 0 {
		t.Errorf("arrived at %v with source %v, sealed %d times, in clear %v", trace.At, trace.Seen, trace.Sealed, trace.Clear)
	}
	for _, want := range []string{
		"a: seal via 203.0.113.2 dev kilo0 to b [10.2.1.3 > 10.2.3.3]",
		"b: encapsulate via 10.101.1.3 dev tunl0 [10.2.1.3 > 10.2.3.3]",
		"c: route dev kube-bridge [10.2.1.3 > 10.2.3.3]",
		"c: encapsulate via 10.101.0.2 dev tunl0 [10.2.3.3 > 10.2.1.3]",
	} {
		if !strings.Contains(trace.String(), want+"\n") {
			t.Errorf("the trace lacks %q:\n%v", want, trace)
		}
	}
}

// TestEveryCauseOfDeath breaks the small mesh in each way. A simulator that
// cannot fail proves nothing.
func TestEveryCauseOfDeath(t *testing.T) {
	podA, podB, podC := ip("10.2.1.3"), ip("10.2.2.3"), ip("10.2.3.3")
	podsB := pfx("10.2.2.0/24")
	aToB := Packet{From: "a", Src: podA, Dst: podB}
	bToC := Packet{From: "b", Src: podB, Dst: podC}
	keyB := publicKeys[secrets[1]]
	setPeer := func(h *Host, change func(*mesh.DevicePeer)) {
		change(h.State.Device.Peer(keyB))
	}
	tests := []struct {
		name   string
		want   Cause
		packet Packet
		vxlan  bool
		change func(c *computed)
	}{
		{"unknown host", CauseNoHost, Packet{From: "x", Dst: podB}, false, nil},
		{"no route", CauseNoRoute, aToB, false, func(c *computed) { c.host("a").State.Routes, c.host("a").Routes = nil, nil }},
		{"route over a link that is missing", CauseNoLink, aToB, false, func(c *computed) { c.host("a").State.Links = nil }},
		{"own WireGuard link down", CauseLinkDown, aToB, false, func(c *computed) { setLinks(c.host("a"), false) }},
		{"no address to send from", CauseNoSource, Packet{From: "a", Dst: ip("fd10::1")}, false, func(c *computed) { c.host("a").Routes = []Route{{Dst: pfx("::/0"), Dev: "eth0"}} }},
		{"forwarding off", CauseNotForwarding, aToB, false, func(c *computed) { c.host("b").State.Forward4 = false }},
		{"route in a circle", CauseTTL, bToC, false, func(c *computed) {
			c.host("c").PodCIDRs = nil
			c.host("c").State.Routes = append(c.host("c").State.Routes, mesh.Route{Dst: pfx("10.2.3.0/24"), Via: ip("10.101.0.2"), Dev: "tunl0", Table: mesh.TableMain})
		}},
		{"own source comes in", CauseMartian, Packet{From: "a", Src: podA, Dst: podB}, false, func(c *computed) {
			c.host("b").State.Addrs = append(c.host("b").State.Addrs, mesh.Addr{Dev: "tunl0", Prefix: pfx("10.2.1.3/32")})
		}},
		{"no such pod", CauseNoPod, aToB, false, func(c *computed) {
			c.host("b").PodCIDRs = nil
			c.host("b").Routes = append(c.host("b").Routes, Route{Dst: pfx("10.2.2.0/24"), Dev: bridgeDev})
		}},
		{"next hop is not on the segment", CauseNextHop, bToC, false, func(c *computed) { reroute(c.host("b"), "tunl0", "eth0") }},
		{"pod's source on the underlay", CauseForeignSource, bToC, false, func(c *computed) {
			reroute(c.host("b"), "tunl0", "eth0")
			c.host("b").State.Routes = slices.DeleteFunc(c.host("b").State.Routes, func(r mesh.Route) bool { return r.Dev == "eth0" })
		}},
		{"pod's destination on a strict segment", CauseForeignDest, Packet{From: "b", Src: ip("10.101.0.2"), Dst: podC}, false, func(c *computed) {
			reroute(c.host("b"), "tunl0", "eth0")
			c.host("c").Links[0].Segment = "two/0"
		}},
		{"private address of another site", CauseUnreachable, Packet{From: "b", Dst: ip("10.100.0.1")}, false, func(c *computed) { c.host("b").State.Routes = nil }},
		{"nobody has the public address", CauseUnreachable, Packet{From: "a", Dst: ip("203.0.113.77")}, false, nil},
		{"no NAT", CauseNoNAT, Packet{From: "b", Dst: ip("198.51.100.1")}, false, func(c *computed) { c.site("two").NAT = nil }},
		{"no allowed IP", CauseNoAllowedIP, aToB, false, func(c *computed) { disown(c.host("a"), pfx("10.2.2.0/24")) }},
		{"peer's key belongs to nobody", CauseNoPeer, aToB, false, func(c *computed) { c.host("b").State.Device.PrivateKey = secrets[5] }},
		{"peer does not know us", CauseNotMutual, aToB, false, func(c *computed) {
			d := &c.host("b").State.Device
			d.Peers = slices.DeleteFunc(d.Peers, func(p mesh.DevicePeer) bool { return p.Key == publicKeys[secrets[0]] })
		}},
		{"preshared keys differ", CausePresharedKey, aToB, false, func(c *computed) {
			setPeer(c.host("a"), func(p *mesh.DevicePeer) { p.PresharedKey = secrets[0] })
		}},
		{"peer's WireGuard link down", CausePeerDown, aToB, false, func(c *computed) { setLinks(c.host("b"), false) }},
		{"nobody speaks first", CauseNoEndpoint, aToB, false, func(c *computed) {
			setPeer(c.host("a"), func(p *mesh.DevicePeer) { p.Endpoint = netip.AddrPort{} })
		}},
		{"endpoint of somebody else", CauseWrongEndpoint, aToB, false, func(c *computed) {
			c.site("two").Forward[netip.MustParseAddrPort("203.0.113.2:40000")] = netip.MustParseAddrPort("10.101.1.3:51820")
		}},
		{"wrong port", CausePort, aToB, false, func(c *computed) { c.host("b").State.Device.ListenPort = 1 }},
		{"endpoint through its own tunnel", CauseTunnelLoop, aToB, false, func(c *computed) {
			c.host("a").State.Routes = append(c.host("a").State.Routes, mesh.Route{Dst: pfx("203.0.113.0/24"), Dev: "kilo0", Table: mesh.TableMain})
		}},
		{"source that the receiver expects from nobody", CauseWrongSource, aToB, false, func(c *computed) { disown(c.host("b"), pfx("10.2.1.0/24")) }},
		{"receiver without a tunnel link", CauseNoTunnelLink, bToC, false, func(c *computed) { c.host("c").State.Links = c.host("c").State.Links[:1] }},
		{"tunnel link down", CauseNoTunnelLink, bToC, false, func(c *computed) { setLinks(c.host("c"), false) }},
		{"firewall does not admit the tunnel", CauseTunnelFrom, bToC, false, func(c *computed) {
			c.host("c").State.Firewall.TunnelFrom = []netip.Prefix{pfx("10.101.1.3/32")}
		}},
		{"firewall does not admit the vxlan tunnel", CauseTunnelFrom, bToC, true, func(c *computed) {
			c.host("c").State.Firewall.TunnelFrom = []netip.Prefix{pfx("10.101.1.3/32")}
		}},
		{"sealed packet leaves by another link", CauseSealed, aToB, false, func(c *computed) {
			c.host("a").State.Firewall.Sealed, c.host("a").State.Firewall.SealedDevs = []netip.Prefix{podsB}, []string{"other0"}
		}},
		{"sealed packet comes by another link", CauseSealed, aToB, false, func(c *computed) {
			c.host("b").State.Firewall.Sealed, c.host("b").State.Firewall.SealedDevs = []netip.Prefix{pfx("10.2.1.0/24")}, []string{"eth0"}
		}},
		{"no neighbour entry", CauseNoNeigh, bToC, true, func(c *computed) { c.host("b").State.Neighs = nil }},
		{"wrong MAC", CauseWrongMAC, bToC, true, func(c *computed) { c.host("b").State.Neighs[0].MAC[5]++ }},
		{"vxlan link at another address", CauseNoTunnelLink, bToC, true, func(c *computed) {
			for i := range c.host("c").State.Links {
				c.host("c").State.Links[i].Local = ip("10.101.1.99")
			}
		}},
		{"unknown gateway of an overlay", CauseOverlay, bToC, false, func(c *computed) {
			c.host("b").Links = append(c.host("b").Links, Link{Name: "flannel.1", Overlay: map[netip.Addr]string{}})
			reroute(c.host("b"), "tunl0", "flannel.1")
		}},
		{"overlay to another site", CauseOverlay, aToB, false, func(c *computed) {
			c.host("a").Links = append(c.host("a").Links, Link{Name: "flannel.1", Overlay: map[netip.Addr]string{ip("10.4.0.2"): "b"}})
			reroute(c.host("a"), "kilo0", "flannel.1")
		}},
		{"machine behind the router that does not know pods", CauseForeignSource, Packet{From: "a", Src: podA, Dst: ip("192.168.2.2")}, false, func(c *computed) {
			c.host("b").State.Firewall.MasqueradeTo = nil
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tunnel := mesh.KindIPIP
			if tt.vxlan {
				tunnel = mesh.KindVXLAN
			}
			c := mustCompute(t, small(tunnel))
			if tt.change != nil {
				tt.change(c)
			}
			w, err := c.world()
			if err != nil {
				t.Fatal(err)
			}
			_, err = w.Ping(tt.packet)
			var d *Death
			if !errors.As(err, &d) || d.Cause != tt.want {
				t.Errorf("Ping(%v) = %v, want death: %s", tt.packet, err, tt.want)
			}
		})
	}
}

func setLinks(h *Host, up bool) {
	for i := range h.State.Links {
		h.State.Links[i].Up = up
	}
}

// reroute moves the routes of one link to another, and drops the rules.
func reroute(h *Host, from, to string) {
	h.State.Rules = nil
	for i := range h.State.Routes {
		if r := &h.State.Routes[i]; r.Dev == from {
			r.Dev = to
		}
	}
}

// TestCheckFindsWhatArrivesWrongly covers packets that arrive, but not as they should.
func TestCheckFindsWhatArrivesWrongly(t *testing.T) {
	aToB := Packet{From: "a", Src: ip("10.2.1.3"), Dst: ip("10.2.2.3")}
	atB := Place{"b", "two", true}
	// clear connects a and b without the mesh.
	clear := func(c *computed) {
		for _, h := range []*Host{c.host("a"), c.host("b")} {
			h.Site, h.State.Routes = "two", nil
			h.Links = []Link{{Name: "eth0", Segment: "two/0", Addrs: h.Node.InternalIPs}}
			h.Routes = []Route{{Dst: pfx("10.2.1.0/24"), Via: ip("10.100.0.1"), Dev: "eth0"}, {Dst: pfx("10.2.2.0/24"), Via: ip("10.101.0.2"), Dev: "eth0"}}
		}
		c.host("a").Routes, c.host("b").Routes = c.host("a").Routes[1:], c.host("b").Routes[:1]
		c.site("two").Strict = false
	}
	tests := []struct {
		name   string
		want   Cause
		pair   Pair
		change func(c *computed)
	}{
		{"elsewhere", CauseMisdelivered, Pair{Packet: aToB, To: Place{"c", "two", true}}, nil},
		{"in clear between locations", CauseClear, Pair{Packet: aToB, To: atB}, clear},
		{"in clear inside a location, but to be sealed", CauseNotSealed, Pair{Packet: aToB, To: atB, Sealed: true}, func(c *computed) {
			clear(c)
			c.host("a").Location = c.host("b").Location
		}},
		{"masqueraded", CauseSource, Pair{Packet: aToB, To: atB}, func(c *computed) { c.host("a").State.Firewall.Known = nil }},
		{"not masqueraded", CauseSource, Pair{Packet: aToB, To: atB, Masqueraded: true}, nil},
		{"source not wished for", CauseSource, Pair{Packet: Packet{From: "a", Dst: ip("10.2.2.3")}, To: atB, Sources: []netip.Addr{ip("10.4.0.1")}}, nil},
		{"answer to somebody else", CauseMisdelivered, Pair{Packet: Packet{From: "a", Src: ip("10.2.1.3"), Dst: ip("10.2.2.3")}, To: atB}, func(c *computed) {
			r := c.host("b").State.Routes
			for i := range r {
				if r[i].Dst == pfx("10.2.1.0/24") {
					r[i] = mesh.Route{Dst: r[i].Dst, Via: ip("10.101.1.3"), Dev: "tunl0", Table: mesh.TableMain}
				}
			}
			c.host("c").PodCIDRs = append(c.host("c").PodCIDRs, pfx("10.2.1.0/24"))
			c.host("c").State.Routes = nil
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := mustCompute(t, small(mesh.KindIPIP))
			if tt.change != nil {
				tt.change(c)
			}
			w, err := c.world()
			if err != nil {
				t.Fatal(err)
			}
			_, err = w.Check(tt.pair)
			var d *Death
			if !errors.As(err, &d) || d.Cause != tt.want {
				t.Errorf("Check = %v, want %s", err, tt.want)
			}
		})
	}
}
