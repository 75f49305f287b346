// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// pairState is one of two nodes, 1 and 2, that are joined by a veth pair.
func pairState(self, other byte) mesh.State {
	n := func(format string, n byte) string { return fmt.Sprintf(format, n) }
	key := public(other)
	return mesh.State{
		Links: []mesh.Link{{Name: "kilo0", Kind: mesh.KindWireGuard, MTU: 1420, Up: true}},
		Addrs: []mesh.Addr{{Dev: "kilo0", Prefix: pfx(n("10.4.0.%d/16", self))}, {Dev: "kilo0", Prefix: pfx(n("fd10:4::%d/64", self))}, {Dev: "kilo0", Prefix: pfx(n("10.2.%d.1/32", self))}},
		Routes: []mesh.Route{
			{Dst: pfx(n("10.2.%d.0/24", other)), Via: ip(n("10.4.0.%d", other)), Dev: "kilo0", Src: ip(n("10.2.%d.1", self)), Table: mesh.TableMain, OnLink: true},
		},
		Device: owning(mesh.Device{
			PrivateKey: secret(self), ListenPort: 51820,
			Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{key: {Name: "other", IsNode: true, Endpoint: netip.MustParseAddrPort(n("192.0.2.%d:51820", other))}}),
		}, map[netip.Prefix]mesh.PublicKey{pfx(n("10.4.0.%d/32", other)): key, pfx(n("fd10:4::%d/128", other)): key, pfx(n("10.2.%d.0/24", other)): key}),
	}
}

// pair makes two namespaces with a node each that can reach each other.
func pair(t *testing.T, makeDevice func(*testing.T)) (ns [3]*nettest.NS, hosts [3]*Host) {
	t.Helper()
	ns[1], ns[2] = nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, ns[1], "eth0", "192.0.2.1/24", ns[2], "eth0", "192.0.2.2/24")
	for self := byte(1); self <= 2; self++ {
		ns[self].Do(t, func() {
			makeDevice(t)
			hosts[self] = newHost(t)
			mustApply(t, hosts[self], pairState(self, 3-self))
		})
	}
	return ns, hosts
}

// mustReach sends a datagram from one namespace to an address in the other until an answer comes.
func mustReach(t *testing.T, from, to *nettest.NS, addr string) {
	t.Helper()
	var server net.PacketConn
	to.Do(t, func() { server = nettest.Must(net.ListenPacket("udp", net.JoinHostPort(addr, "7")))(t) })
	defer server.Close()
	go func() {
		b := make([]byte, 100)
		for {
			n, who, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = server.WriteTo(b[:n], who)
		}
	}()
	from.Do(t, func() {
		c := nettest.Must(net.Dial("udp", server.LocalAddr().String()))(t)
		defer c.Close()
		nettest.Await(t, "answer from "+addr, func() bool {
			_, _ = c.Write([]byte("x"))
			_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
			_, err := c.Read(make([]byte, 1))
			return err == nil
		})
	})
}

func TestPacketsPassBetweenTwoAppliedStates(t *testing.T) {
	eachDevice(t, testPacketsPassBetweenTwoAppliedStates)
}

func testPacketsPassBetweenTwoAppliedStates(t *testing.T, makeDevice func(*testing.T)) {
	ns, hosts := pair(t, makeDevice)
	mustReach(t, ns[1], ns[2], "10.4.0.2")
	mustReach(t, ns[2], ns[1], "fd10:4::1")
	mustReach(t, ns[1], ns[2], "10.2.2.1")
	ns[1].Do(t, func() {
		got := nettest.Must(hosts[1].Peers(t.Context()))(t)
		if len(got) != 1 {
			t.Fatalf("peers %+v, want 1", got)
		}
		if p := got[0]; p.Key != public(2) || p.Endpoint.String() != "192.0.2.2:51820" || time.Since(p.LastHandshake) > time.Minute || p.RxBytes == 0 || p.TxBytes == 0 {
			t.Errorf("peer %+v", p)
		}
		mustBeQuiet(t, hosts[1], pairState(1, 2))
	})
}

func TestRoamingPeerIsFollowed(t *testing.T) { eachDevice(t, testRoamingPeerIsFollowed) }

func testRoamingPeerIsFollowed(t *testing.T, makeDevice func(*testing.T)) {
	ns, hosts := pair(t, makeDevice)
	mustReach(t, ns[1], ns[2], "10.4.0.2")
	// Node 2 gets another address and port, and speaks.
	s := pairState(2, 1)
	s.Device.ListenPort = 4444
	ns[2].Do(t, func() {
		nettest.Up(t, "eth0", "192.0.2.22/24")
		mustApply(t, hosts[2], s)
	})
	mustReach(t, ns[2], ns[1], "10.4.0.1")
	endpoint := func(h *Host) string { return nettest.Must(h.Peers(t.Context()))(t)[0].Endpoint.String() }
	ns[1].Do(t, func() {
		nettest.Await(t, "the endpoint to follow", func() bool { return endpoint(hosts[1]) == "192.0.2.2:4444" })
		mustBeQuiet(t, hosts[1], pairState(1, 2))
		mustBeQuiet(t, newHost(t), pairState(1, 2)) // nor does a new process know better
		if got := endpoint(hosts[1]); got != "192.0.2.2:4444" {
			t.Errorf("endpoint %s, want the one that it roamed to", got)
		}
		if got := nettest.Must(hosts[1].Facts(t.Context()))(t).PeerAddrs; len(got) != 1 || got[public(2)] != ip("192.0.2.2") {
			t.Errorf("the device sends to %v, want to where node 2 was heard from", got)
		}
		// A new configuration counts.
		moved := pairState(1, 2)
		moved.Device.Peer(public(2)).Endpoint = netip.MustParseAddrPort("192.0.2.22:4444")
		if changes := mustApply(t, hosts[1], moved); len(changes) != 1 || !strings.Contains(changes[0].Text, "endpoint 192.0.2.22:4444") {
			t.Errorf("changes %v, want the new endpoint alone", changes)
		}
		// And silence counts: as seen a while later.
		hosts[1].now = func() time.Time { return time.Now().Add(rejectAfter + time.Minute) }
		hosts[1].desired = desired{device: pairState(1, 2).Device}
		if changes := mustApply(t, hosts[1], pairState(1, 2)); len(changes) != 1 || !strings.Contains(changes[0].Text, "endpoint 192.0.2.2:51820") {
			t.Errorf("changes %v, want the configured endpoint again", changes)
		}
	})
}

func TestDeviceIsConfiguredAnewAfterItsProcessRestarted(t *testing.T) {
	nettest.New(t)
	uplink(t)
	p := startWireGuard(t)
	h := newHost(t, func(c *Config) { c.WireGuardMode = WireGuardUserspace })
	mustApply(t, h, fullState())
	p.Signal(t, os.Kill)
	_ = p.Wait()
	if _, err := h.Apply(t.Context(), fullState()); err == nil {
		t.Error("no error without the link")
	}
	startWireGuard(t)
	mustApply(t, h, fullState())
	checkState(t, h, fullState())
	mustBeQuiet(t, h, fullState())
}

func TestDeviceIsMadeAnewAfterItWasDeleted(t *testing.T) {
	requireLinkKind(t, mesh.KindWireGuard)
	uplink(t)
	h := newHost(t)
	for range 2 {
		mustApply(t, h, fullState())
		checkState(t, h, fullState())
		mustBeQuiet(t, h, fullState())
		must(t, netlink.LinkDel(nettest.Must(netlink.LinkByName("kilo0"))(t)))
	}
}

// fakeWG refuses one peer.
type fakeWG struct {
	wgClient
	bad wgtypes.Key
}

var errBad = errors.New("bad peer")

func (f fakeWG) ConfigureDevice(name string, cfg wgtypes.Config) error {
	for _, p := range cfg.Peers {
		if p.PublicKey == f.bad {
			return errBad
		}
	}
	return f.wgClient.ConfigureDevice(name, cfg)
}

func TestOneBadPeerDoesNotStopTheOthers(t *testing.T) {
	eachDevice(t, testOneBadPeerDoesNotStopTheOthers)
}

func testOneBadPeerDoesNotStopTheOthers(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	h := newHost(t)
	real := h.wg
	h.wg = fakeWG{real, wgtypes.Key(public(2))}
	_, err := h.Apply(t.Context(), fullState())
	if !errors.Is(err, errBad) || strings.Count(err.Error(), "\n") > 0 || !strings.Contains(err.Error(), "wg set kilo0 peer "+public(2).String()) {
		t.Errorf("error %v, want one about the bad peer", err)
	}
	if strings.Contains(err.Error(), "AAAAAAAAA") {
		t.Errorf("error tells a secret: %v", err)
	}
	if got := nettest.Must(h.Peers(t.Context()))(t); len(got) != 1 || got[0].Key != public(3) {
		t.Errorf("peers %+v, want the good one", got)
	}
	h.wg = real
	mustApply(t, h, fullState())
	checkState(t, h, fullState())
}

func TestPortInUseIsExplainedAndStopsNothingElse(t *testing.T) {
	eachDevice(t, testPortInUseIsExplainedAndStopsNothingElse)
}

func testPortInUseIsExplainedAndStopsNothingElse(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	for _, network := range []string{"udp4", "udp6"} {
		c := nettest.Must(net.ListenPacket(network, ":51821"))(t)
		defer c.Close()
	}
	h := newHost(t)
	mustApply(t, h, fullState())
	s := fullState()
	s.Device.ListenPort = 51821
	_, err := h.Apply(t.Context(), s)
	if err == nil || !strings.Contains(err.Error(), "wg set kilo0 listen-port 51821: another program, perhaps another WireGuard, has UDP port 51821") {
		t.Errorf("error %v", err)
	}
}

func TestManyPeersAreAFewWrites(t *testing.T) { eachDevice(t, testManyPeersAreAFewWrites) }

func testManyPeersAreAFewWrites(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	h := newHost(t)
	s := mesh.State{Links: fullState().Links, Device: mesh.Device{PrivateKey: secret(1), ListenPort: 51820}}
	for i := range 300 {
		key := mesh.PublicKey{1, byte(i), byte(i >> 8)}
		peer := mesh.DevicePeer{Key: key, Name: fmt.Sprint(i), IsNode: true, PersistentKeepalive: 25}
		for j := range 3 {
			peer.AllowedIPs = append(peer.AllowedIPs, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(j), byte(i), byte(i >> 8)}), 32))
		}
		s.Device.Peers = append(s.Device.Peers, peer)
	}
	s.Sort()
	mustApply(t, h, s)
	checkState(t, h, s)
	mustBeQuiet(t, h, s)
	before := h.Writes()
	give(s.Device, pfx("10.9.0.0/16"), mesh.PublicKey{1, 7, 0})
	mustApply(t, h, s)
	if n := h.Writes() - before; n != 1 {
		t.Errorf("%d writes for one prefix, want 1", n)
	}
	checkState(t, h, s)
}

// Packets to the address from which a peer is heard go through the tunnel, and
// those that carry it do not; nor does a strict reverse path filter drop these (ip-sysctl).
func TestPacketsToWhereAPeerIsHeardFromAreSealed(t *testing.T) {
	eachDevice(t, testPacketsToWhereAPeerIsHeardFromAreSealed)
}

func testPacketsToWhereAPeerIsHeardFromAreSealed(t *testing.T, makeDevice func(*testing.T)) {
	ns, hosts := pair(t, makeDevice)
	for self, other := range map[byte]byte{1: 2, 2: 1} {
		s := pairState(self, other)
		seen := netip.PrefixFrom(ip(fmt.Sprintf("192.0.2.%d", other)), 32)
		peer := s.Device.Peer(public(other))
		peer.AllowedIPs = append(peer.AllowedIPs, seen)
		mesh.SortPrefixes(peer.AllowedIPs)
		s.Routes = append(s.Routes, mesh.Route{Dst: seen, Src: ip(fmt.Sprintf("192.0.2.%d", self)), Dev: "kilo0", Table: mesh.TableSealed})
		s.Rules = append(s.Rules, mesh.SealingRules(pfx("0.0.0.0/0"), s.Device.ListenPort)...)
		s.Sort()
		ns[self].Do(t, func() {
			for _, dev := range []string{"all", "eth0"} {
				must(t, os.WriteFile("/proc/sys/net/ipv4/conf/"+dev+"/rp_filter", []byte("1"), 0))
			}
			mustApply(t, hosts[self], s)
			mustBeQuiet(t, hosts[self], s)
		})
	}
	// What comes in clear is dropped by the filter, for the way back leads into the tunnel.
	mustReach(t, ns[1], ns[2], "192.0.2.2")
	mustReach(t, ns[2], ns[1], "192.0.2.1")
}
