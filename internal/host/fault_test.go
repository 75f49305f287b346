// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// join is a with what b has besides.
func join(a, b mesh.State) mesh.State {
	a.Links, a.Addrs = slices.Concat(a.Links, b.Links), slices.Concat(a.Addrs, b.Addrs)
	a.Routes, a.Neighs = slices.Concat(a.Routes, b.Routes), slices.Concat(a.Neighs, b.Neighs)
	a.Firewall.TunnelPort, a.Firewall.TunnelFrom = b.Firewall.TunnelPort, b.Firewall.TunnelFrom
	return sorted(a)
}

// withoutPeer is s after the peer left.
func withoutPeer(s mesh.State, name string) mesh.State {
	i := slices.IndexFunc(s.Device.Peers, func(p mesh.DevicePeer) bool { return p.Name == name })
	gone := s.Device.Peers[i].AllowedIPs
	s.Device.Peers = slices.Delete(slices.Clone(s.Device.Peers), i, i+1)
	s.Routes = slices.DeleteFunc(slices.Clone(s.Routes), func(r mesh.Route) bool { return slices.Contains(gone, r.Dst) })
	s.Firewall.Known = slices.DeleteFunc(slices.Clone(s.Firewall.Known), func(p netip.Prefix) bool { return slices.Contains(gone, p) })
	return s
}

// steppedDown is s of a node that does not lead any more: what went into its
// WireGuard link goes to the new leader.
func steppedDown(s mesh.State) mesh.State {
	s.Links = slices.Clone(s.Links)
	for i := range s.Links {
		s.Links[i].Up = s.Links[i].Up && s.Links[i].Kind != mesh.KindWireGuard
	}
	s.Addrs = slices.DeleteFunc(slices.Clone(s.Addrs), func(a mesh.Addr) bool { return a.Dev == "kilo0" })
	s.Device.Peers = nil
	s.Rules = slices.DeleteFunc(slices.Clone(s.Rules), func(r mesh.Rule) bool { return r.IIf != "" })
	s.Routes = slices.Clone(s.Routes)
	for i := range s.Routes {
		r := &s.Routes[i]
		if r.Dev == "kilo0" {
			*r = mesh.Route{Dst: r.Dst, Dev: "eth0", Table: r.Table}
		}
	}
	return sorted(s)
}

// movedTunnel is s whose tunnel link is at another address.
func movedTunnel(s mesh.State) mesh.State {
	s.Links = slices.Clone(s.Links)
	for i := range s.Links {
		if s.Links[i].Kind == mesh.KindVXLAN {
			s.Links[i].MAC[5]++
		}
	}
	return s
}

// errFault is what a failing kernel says in these tests.
var errFault = errors.New("injected")

// TestAnyWriteMayFail: whichever write fails, or is the last before the agent
// dies, the next agent brings the host to what is desired, and takes all back.
func TestAnyWriteMayFail(t *testing.T) {
	whole := join(fullState(), vxlanState(1))
	for _, c := range []struct {
		name     string
		from, to mesh.State
	}{
		{"first start", mesh.State{}, whole},
		{"node joins", withoutPeer(whole, "a"), whole},
		{"node leaves", whole, withoutPeer(whole, "b")},
		{"leader steps down", whole, steppedDown(whole)},
		{"leader steps up", steppedDown(whole), whole},
		{"tunnel link moves", whole, movedTunnel(whole)},
		{"tunnel ends", whole, fullState()},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			nettest.New(t)
			uplink(t)
			if kernelHas(t, mesh.KindWireGuard) {
				makeKernelWireGuard(t)
			} else {
				startWireGuard(t)
			}
			clean := func() { must(t, newHost(t).CleanUp(t.Context(), false)) }
			mustApply(t, newHost(t), whole) // for the sysctls that stay
			clean()
			empty := nettest.World(t)
			mustApply(t, newHost(t), c.from)
			h := newHost(t)
			mustApply(t, h, c.to)
			want, writes := nettest.World(t), h.Writes()
			for n := uint64(1); n <= writes; n++ {
				for fault, fails := range map[string]func(uint64) bool{
					"fails":       func(i uint64) bool { return i == n },
					"is not made": func(i uint64) bool { return i >= n },
				} {
					mustApply(t, newHost(t), c.from)
					h := newHost(t)
					h.beforeWrite = func(i uint64) error {
						if fails(i) {
							return errFault
						}
						return nil
					}
					_, err := h.Apply(t.Context(), c.to)
					if h.Writes() < n || err != nil && !errors.Is(err, errFault) {
						t.Errorf("write %d of %d %s: error %v after %d writes", n, writes, fault, err, h.Writes())
					}
					mustApply(t, newHost(t), c.to)
					if diff := cmp.Diff(want, nettest.World(t)); diff != "" {
						t.Errorf("write %d %s: after the next start (-want +got)\n%s", n, fault, diff)
					}
					checkState(t, newHost(t), c.to)
					clean()
					if diff := cmp.Diff(empty, nettest.World(t)); diff != "" {
						t.Errorf("write %d %s: after clean-up (-want +got)\n%s", n, fault, diff)
					}
					if t.Failed() {
						return
					}
				}
			}
			t.Logf("%d writes", writes)
		})
	}
}
