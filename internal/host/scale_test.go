// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// bigState is a leader in a mesh of n locations of one node each.
func bigState(n int) mesh.State {
	s := fullState()
	s.Device.Peers, s.Routes, s.Firewall.Known = nil, nil, nil
	for i := range n {
		a, b := byte(i>>8), byte(i)
		key := mesh.PublicKey{1, b, a}
		wg := netip.AddrFrom4([4]byte{10, 4, a + 1, b})
		peer := mesh.DevicePeer{Key: key, Name: fmt.Sprint(i), IsNode: true}
		for _, p := range []netip.Prefix{
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 128 + a, b, 0}), 24),
			netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16 + a, b, 1}), 32),
		} {
			peer.AllowedIPs = append(peer.AllowedIPs, p)
			s.Firewall.Known = append(s.Firewall.Known, p)
			s.Routes = append(s.Routes, mesh.Route{Dst: p, Via: wg, Dev: "kilo0", Src: ip("192.168.1.1"), Table: mesh.TableMain, OnLink: true})
		}
		s.Device.Peers = append(s.Device.Peers, peer)
	}
	s.Sort()
	return s
}

func TestOneChangeInALargeMeshIsAFewWrites(t *testing.T) {
	eachDevice(t, testOneChangeInALargeMeshIsAFewWrites)
}

func testOneChangeInALargeMeshIsAFewWrites(t *testing.T, makeDevice func(*testing.T)) {
	nettest.New(t)
	uplink(t)
	makeDevice(t)
	h := newHost(t)
	const n = 1000
	start := time.Now()
	mustApply(t, h, bigState(n))
	first := time.Since(start)
	start = time.Now()
	mustBeQuiet(t, h, bigState(n))
	quiet := time.Since(start)
	before := h.Writes()
	start = time.Now()
	mustApply(t, h, bigState(n+1))
	t.Logf("%d locations: first pass %s, quiet pass %s, one more location %s", n, first, quiet, time.Since(start))
	// Its peer, its elements and its two routes.
	if got := h.Writes() - before; got != 4 {
		t.Errorf("%d writes for one more location, want 4", got)
	}
	checkState(t, h, bigState(n+1))
}
