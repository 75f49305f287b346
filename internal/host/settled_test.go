// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// watched runs h.Watch in the current namespace until the test ends, and counts
// what it tells.
func watched(t testing.TB, ns *nettest.NS, h *Host) *atomic.Int32 {
	t.Helper()
	var told atomic.Int32
	ctx, cancel := context.WithCancel(context.Background())
	started, ended := make(chan struct{}), make(chan error, 1)
	var all sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		all.Wait()
		if err := <-ended; err != nil {
			t.Errorf("Watch: %v", err)
		}
	})
	ns.Go(t, &all, func() {
		ended <- h.Watch(ctx, func() { close(started) }, func() { told.Add(1) })
	})
	<-started
	return &told
}

// reads reports whether a pass for s reads everything.
func reads(t *testing.T, h *Host, s mesh.State) bool {
	t.Helper()
	before := h.settled.read
	mustApply(t, h, s)
	return h.settled.read != before
}

// drawn is a State whose links and addresses are always the same.
func drawn(r *rand.Rand) mesh.State {
	s := fullState()
	owners := map[netip.Prefix]mesh.PublicKey{}
	var peers []mesh.DevicePeer
	for i := range byte(1 + r.IntN(8)) {
		p := mesh.DevicePeer{Key: mesh.PublicKey{1, i}, Name: fmt.Sprint(i), PersistentKeepalive: uint16(25 * r.IntN(2))} //nolint:gosec // 0 or 25
		if i > 0 {
			// The first never has one.
			p.Endpoint = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, i}), uint16(51820+r.IntN(2))) //nolint:gosec // a port
		}
		if r.IntN(3) == 0 {
			p.PresharedKey = secret(byte(10 + r.IntN(2)))
		}
		peers = append(peers, p)
	}
	for i := range byte(16) {
		v4 := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 2, 100 + i, 0}), 24)
		v6 := netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 2, 100 + i}), 64)
		for _, dst := range []netip.Prefix{v4, v6} {
			if r.IntN(3) == 0 {
				continue
			}
			owners[dst] = peers[r.IntN(len(peers))].Key
			route := mesh.Route{Dst: dst, Dev: "kilo0", Table: []int{mesh.TableMain, mesh.TableSealed}[r.IntN(2)]}
			if r.IntN(2) == 0 {
				route.Via, route.OnLink = ip(fmt.Sprintf("10.4.0.%d", 2+r.IntN(3))), true
				if dst.Addr().Is6() {
					route.Via = ip(fmt.Sprintf("fd10:4::%d", 2+r.IntN(3)))
				}
			}
			s.Routes = append(s.Routes, route)
			s.Firewall.Known = append(s.Firewall.Known, dst)
		}
	}
	s.Device.Peers = peers
	s.Device = owning(s.Device, owners)
	if r.IntN(4) == 0 {
		s.Device.ListenPort++
	}
	if r.IntN(4) == 0 {
		s.Firewall.TunnelFrom = nil // and with it a chain
	}
	return sorted(s)
}

// TestAPassThatReadsLittleLeavesWhatOthersWouldHaveMade: one that reads all finds nothing to do.
func TestAPassThatReadsLittleLeavesWhatOthersWouldHaveMade(t *testing.T) {
	eachDevice(t, func(t *testing.T, makeDevice func(*testing.T)) {
		ns := nettest.New(t)
		uplink(t)
		makeDevice(t)
		h, auditor := newHost(t), newHost(t)
		watched(t, ns, h)
		passes := 60
		if nettest.InVM() {
			passes = 20
		}
		full := 0
		for seed := range uint64(passes) { //nolint:gosec // 60 at most
			s := drawn(rand.New(rand.NewPCG(seed, 1))) //nolint:gosec // to be repeated
			if reads(t, h, s) {
				full++
			}
			mustBeQuiet(t, auditor, s)
			checkState(t, auditor, s)
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		// The watch may be behind, and take what was desired a moment ago for another's.
		t.Logf("%d of %d passes read everything", full, passes)
		if full > passes/2 {
			t.Errorf("%d of %d passes read everything", full, passes)
		}
	})
}

// TestWhatNoWatchTellsOfIsFoundInTime: WireGuard devices say nothing.
func TestWhatNoWatchTellsOfIsFoundInTime(t *testing.T) {
	ns := nettest.New(t)
	uplink(t)
	startWireGuard(t)
	h, s := newHost(t), fullState()
	now := time.Now()
	h.now = func() time.Time { now = now.Add(time.Millisecond); return now }
	if mustApply(t, h, s); !reads(t, h, s) {
		t.Error("a pass went by what the last one left though nobody watches")
	}
	watched(t, ns, h)
	mustApply(t, h, s)
	peer := wgtypes.PeerConfig{PublicKey: wgtypes.Key(s.Device.Peers[0].Key), Remove: true}
	must(t, h.wg.ConfigureDevice("kilo0", wgtypes.Config{Peers: []wgtypes.PeerConfig{peer}}))
	now = now.Add(trustFor - time.Second)
	if reads(t, h, s) {
		t.Error("a pass read everything though nothing happened")
	}
	now = now.Add(2 * time.Second)
	if !reads(t, h, s) {
		t.Error("a pass long after the last one that did reads nothing")
	}
	checkState(t, newHost(t), s)
}

// TestAFailedPassIsNotGoneBy: nor is one after it, until one succeeds.
func TestAFailedPassIsNotGoneBy(t *testing.T) {
	ns := nettest.New(t)
	uplink(t)
	startWireGuard(t)
	h, s := newHost(t), fullState()
	watched(t, ns, h)
	mustApply(t, h, s)
	more := s
	more.Routes = slices.Concat(s.Routes, []mesh.Route{{Dst: pfx("10.2.99.0/24"), Dev: "kilo0", Table: mesh.TableMain}})
	more.Sort()
	h.beforeWrite = func(uint64) error { return errFault }
	if _, err := h.Apply(t.Context(), more); err == nil {
		t.Fatal("the injected error is missing")
	}
	h.beforeWrite = nil
	if !reads(t, h, more) {
		t.Error("the pass after one that failed went by that")
	}
	checkState(t, newHost(t), more)
}

// TestOurOwnFirewallIsNoNews: the first thing that the watch tells is what another did.
func TestOurOwnFirewallIsNoNews(t *testing.T) {
	ns := nettest.New(t)
	uplink(t)
	startWireGuard(t)
	h, s := newHost(t), fullState()
	mustApply(t, h, s)
	told := watched(t, ns, h)
	s.Firewall.Known = append(slices.Clone(s.Firewall.Known), pfx("fd77::/16"))
	mustApply(t, h, s)
	s.Firewall.TunnelFrom = nil
	mustApply(t, h, s)
	conn := nettest.Must(nftables.New())(t)
	conn.AddChain(&nftables.Chain{Name: "others", Table: kiloTable()})
	must(t, conn.Flush())
	nettest.Await(t, "news of the chain", func() bool { return told.Load() > 0 })
	if n := told.Load(); n != 1 {
		t.Errorf("the watch told %d times, want once", n)
	}
}
