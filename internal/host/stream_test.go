// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// stream is a stream of numbered datagrams, of which every hundred are a flow of
// their own, so that connection tracking always has new ones to judge.
type stream struct {
	server   net.PacketConn
	source   netip.Addr
	cancel   context.CancelFunc
	sender   sync.WaitGroup
	receiver sync.WaitGroup
	sent     atomic.Uint64
	// what arrived for the first time, again, and from another source than it was sent from.
	arrived, again, foreign atomic.Uint64
}

// startStream sends datagrams from a namespace to another, so many a second, until stop.
func startStream(t *testing.T, from, to *nettest.NS, src, dst string, rate int) *stream {
	t.Helper()
	const buffer = 64 << 20
	s := &stream{source: ip(src)}
	to.Do(t, func() { s.server = nettest.Must(net.ListenPacket("udp", net.JoinHostPort(dst, "7777")))(t) })
	raw := nettest.Must(s.server.(*net.UDPConn).SyscallConn())(t)
	must(t, raw.Control(func(fd uintptr) {
		must(t, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer))
	}))
	ctx, cancel := context.WithCancel(t.Context())
	s.cancel = cancel
	t.Cleanup(func() {
		cancel()
		s.sender.Wait()
		_ = s.server.Close()
		s.receiver.Wait()
	})
	s.receiver.Go(s.receive)
	from.Go(t, &s.sender, func() {
		if err := s.send(ctx, netip.AddrPortFrom(ip(dst), 7777), rate); err != nil {
			t.Errorf("stream to %s: %v", dst, err)
		}
	})
	return s
}

func (s *stream) send(ctx context.Context, dst netip.AddrPort, rate int) error {
	const flow = 100
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	var c *net.UDPConn
	var b [8]byte
	for n := uint64(0); ; {
		select {
		case <-ctx.Done():
			return c.Close()
		case <-tick.C:
		}
		for range rate / 1000 {
			if n%flow == 0 {
				next, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.source, 0)), net.UDPAddrFromAddrPort(dst))
				if err != nil {
					return err
				}
				if c != nil {
					_ = c.Close()
				}
				c = next
			}
			binary.BigEndian.PutUint64(b[:], n)
			if _, err := c.Write(b[:]); err != nil {
				return err
			}
			n++
			s.sent.Store(n)
		}
	}
}

func (s *stream) receive() {
	var seen []bool
	var b [8]byte
	for {
		_, who, err := s.server.ReadFrom(b[:])
		if err != nil {
			return // closed
		}
		n := binary.BigEndian.Uint64(b[:])
		for uint64(len(seen)) <= n {
			seen = append(seen, false)
		}
		if who.(*net.UDPAddr).AddrPort().Addr().Unmap() != s.source {
			s.foreign.Add(1)
		}
		if seen[n] {
			s.again.Add(1)
			continue
		}
		seen[n] = true
		s.arrived.Add(1)
	}
}

// stop ends the stream. All must have arrived once, as it was sent.
func (s *stream) stop(t *testing.T, what string) {
	t.Helper()
	s.cancel()
	s.sender.Wait()
	sent := s.sent.Load()
	for end := time.Now().Add(2 * time.Second); s.arrived.Load() < sent && time.Now().Before(end); time.Sleep(time.Millisecond) {
		continue // the last are under way
	}
	if arrived, again, foreign := s.arrived.Load(), s.again.Load(), s.foreign.Load(); arrived != sent || again+foreign > 0 {
		t.Errorf("%s: of %d packets %d arrived, %d again, %d from another source", what, sent, arrived, again, foreign)
	} else {
		t.Logf("%s: %d packets", what, sent)
	}
}

// podBehind joins a namespace with a pod's address to that of a node.
func podBehind(t *testing.T, node *nettest.NS) *nettest.NS {
	t.Helper()
	pod := nettest.Make(t)
	nettest.Veth(t, pod, "eth0", "10.2.1.2/24", node, "pods", "10.2.1.254/24")
	pod.Do(t, func() { nettest.NoErr(t, addRoutes("10.2.1.254", "0.0.0.0/0")) })
	return pod
}

// masquerading is the firewall of node 1 of pairState; other makes its table another.
func masquerading(other bool) mesh.Firewall {
	f := mesh.Firewall{
		MasqueradeFrom: []netip.Prefix{pfx("10.2.1.0/24")},
		Known:          []netip.Prefix{pfx("10.2.2.0/24"), pfx("192.0.2.2/32")},
	}
	if other {
		f.TunnelFrom = []netip.Prefix{pfx("192.0.2.77/32")}
		f.ClampDevs = []string{"kilo0"}
	}
	return f
}

func TestKnownTrafficSurvivesReplacementsOfTheTable(t *testing.T) {
	node, remote := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, node, "eth0", "192.0.2.1/24", remote, "eth0", "192.0.2.2/24")
	pod := podBehind(t, node)
	remote.Do(t, func() { nettest.NoErr(t, addRoutes("192.0.2.1", "10.2.1.0/24")) })
	states := [2]mesh.State{}
	for i := range states {
		states[i] = firewallState(masquerading(i == 1))
		states[i].Forward4 = true
	}
	node.Do(t, func() {
		h := newHost(t)
		mustApply(t, h, states[0])
		s := startStream(t, pod, remote, "10.2.1.2", "192.0.2.2", 10000)
		nettest.Await(t, "first packets", func() bool { return s.arrived.Load() > 100 })
		for i := range 100 {
			before := s.arrived.Load()
			if changes := mustApply(t, h, states[(i+1)%2]); len(changes) != 1 || changes[0].Kind != KindTable {
				t.Fatalf("changes %v, want the table as a whole", changes)
			}
			nettest.Await(t, "packets after a replacement", func() bool { return s.arrived.Load() > before+100 })
		}
		s.stop(t, "known traffic")
	})
}

// churned is what the agent that is killed goes to and fro between.
func churned(other bool) mesh.State {
	s := pairState(1, 2)
	s.Firewall, s.Forward4 = masquerading(other), true
	if other {
		for i := range byte(20) {
			dst := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 3, i, 0}), 24)
			s.Routes = append(s.Routes, mesh.Route{Dst: dst, Via: ip("10.4.0.3"), Dev: "kilo0", Table: mesh.TableMain, OnLink: true})
			s.Device.Peers = append(s.Device.Peers, mesh.DevicePeer{Key: mesh.PublicKey{9, i}, Name: fmt.Sprint("x", i), IsNode: true, AllowedIPs: []netip.Prefix{dst}})
		}
		s.Addrs = append(s.Addrs, mesh.Addr{Dev: "kilo0", Prefix: pfx("10.4.7.7/32")})
		s.Rules = append(s.Rules, mesh.Rule{To: pfx("0.0.0.0/0"), Table: mesh.TableAddOn})
		s.Links[0].MTU = 1400
	}
	return sorted(s)
}

// churn applies one State and another until it is killed.
func churn([]string) error {
	h, err := New(Config{WireGuardDev: "kilo0", TunnelDev: "tunl0"})
	if err != nil {
		return err
	}
	for i := 0; ; i++ {
		if _, err := h.Apply(context.Background(), churned(i%2 == 0)); err != nil {
			return errors.Join(err, h.Close())
		}
		if i == 0 {
			fmt.Println("began")
		}
	}
}

func TestAgentMayBeKilledAtAnyMoment(t *testing.T) {
	t.Run("userspace", func(t *testing.T) {
		nettest.SkipInVM(t) // what the processor of that can do is for the kernel's devices
		testAgentMayBeKilledAtAnyMoment(t, func(t *testing.T) { startWireGuard(t) })
	})
	t.Run("kernel", func(t *testing.T) {
		requireLinkKind(t, mesh.KindWireGuard)
		testAgentMayBeKilledAtAnyMoment(t, makeKernelWireGuard)
	})
}

func testAgentMayBeKilledAtAnyMoment(t *testing.T, makeDevice func(*testing.T)) {
	kills, rate := 200, 10000
	if nettest.InVM() {
		kills, rate = 20, 1000 // what the processor can do
	}
	ns, hosts := pair(t, makeDevice)
	pod := podBehind(t, ns[1])
	var empty string
	ns[1].Do(t, func() {
		mustApply(t, hosts[1], churned(true)) // for the sysctls that stay
		must(t, hosts[1].CleanUp(t.Context(), false))
		empty = nettest.World(t)
		mustApply(t, hosts[1], churned(false))
	})
	mustReach(t, ns[1], ns[2], "10.2.2.1")
	sealed := startStream(t, pod, ns[2], "10.2.1.2", "10.2.2.1", 1000)
	plain := startStream(t, pod, ns[2], "10.2.1.2", "192.0.2.2", rate)
	ns[2].Do(t, func() { nettest.NoErr(t, addRoutes("192.0.2.1", "10.2.1.0/25")) })
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // to be repeated
	ns[1].Do(t, func() {
		want := nettest.World(t)
		for i := range kills {
			agent := nettest.Start(t, "churn")
			nettest.Await(t, "the agent's first pass", func() bool { return agent.Output() != "" })
			time.Sleep(time.Duration(r.Int64N(int64(20 * time.Millisecond)))) // the random moment
			agent.Signal(t, os.Kill)
			_ = agent.Wait() // killed
			if i%10 < 9 {
				continue // the next one starts from what this one left
			}
			mustApply(t, newHost(t), churned(false))
			if diff := cmp.Diff(want, nettest.World(t)); diff != "" {
				t.Fatalf("after %d agents: (-want +got)\n%s", i+1, diff)
			}
		}
		sealed.stop(t, "through the tunnel")
		plain.stop(t, "beside it")
		mustApply(t, newHost(t), churned(true)) // whose MTU stays
		must(t, newHost(t).CleanUp(t.Context(), false))
		if diff := cmp.Diff(empty, nettest.World(t)); diff != "" {
			t.Errorf("after clean-up (-want +got)\n%s", diff)
		}
	})
}
