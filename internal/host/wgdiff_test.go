// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kilomesh/kilo/internal/mesh"
)

// planText prints a plan in wg-set(8) syntax, growing and shrinking part apart.
func planText(p devicePlan) []string {
	var out []string
	if p.privateKey != nil {
		out = append(out, fmt.Sprintf("private-key %v", *p.privateKey))
	}
	if p.listenPort != nil {
		out = append(out, fmt.Sprintf("listen-port %d", *p.listenPort))
	}
	for _, c := range p.grow {
		out = append(out, string(c.op)+" "+c.text())
	}
	for _, c := range p.shrink {
		out = append(out, "then "+string(c.op)+" "+c.text())
	}
	names := strings.NewReplacer(public(2).String(), "A", public(3).String(), "B", public(4).String(), "C")
	for i := range out {
		out[i] = names.Replace(out[i])
	}
	return out
}

func TestDiffDevice(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	fresh, old := now.Add(-rejectAfter), now.Add(-rejectAfter-time.Second)
	e1, e2, e3 := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:2"), netip.MustParseAddrPort("192.0.2.3:3")
	a, b, c := public(2), public(3), public(4)
	set := func(ps ...string) map[netip.Prefix]bool {
		out := map[netip.Prefix]bool{}
		for _, p := range ps {
			out[pfx(p)] = true
		}
		return out
	}
	wantA := func(w mesh.DevicePeer) mesh.Device {
		return mesh.Device{Peers: map[mesh.PublicKey]mesh.DevicePeer{a: w}}
	}
	haveA := func(h devicePeer) device { return device{peers: map[mesh.PublicKey]devicePeer{a: h}} }
	for _, test := range []struct {
		name string
		want mesh.Device
		have device
		last map[mesh.PublicKey]netip.AddrPort
		plan []string
	}{
		{name: "nothing", want: mesh.Device{}, have: device{}},
		{name: "key and port", want: mesh.Device{PrivateKey: secret(1), ListenPort: 51820}, plan: []string{"private-key (hidden)", "listen-port 51820"}},
		{name: "no port wanted", want: mesh.Device{}, have: device{listenPort: 4711}},
		{
			name: "new peer", want: wantA(mesh.DevicePeer{Endpoint: e1, PersistentKeepalive: 5, PresharedKey: secret(9)}),
			plan: []string{"add peer A endpoint 192.0.2.1:1 persistent-keepalive 5 preshared-key (hidden)"},
		},
		{name: "new peer without anything", want: wantA(mesh.DevicePeer{}), plan: []string{"add peer A"}},
		{
			name: "keepalive and preshared key off", want: wantA(mesh.DevicePeer{}),
			have: haveA(devicePeer{keepalive: 25, presharedKey: secret(9)}),
			plan: []string{"replace peer A persistent-keepalive 0 preshared-key (hidden)"},
		},
		{name: "unknown peer", have: haveA(devicePeer{}), plan: []string{"then delete peer A remove"}},
		// Endpoints.
		{name: "no endpoint yet", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{lastHandshake: fresh}), plan: []string{"replace peer A endpoint 192.0.2.1:1"}},
		{name: "roamed", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh}), last: map[mesh.PublicKey]netip.AddrPort{a: e1}},
		{name: "roamed before we started", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh})},
		{name: "roamed and then silent", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2, lastHandshake: old}), last: map[mesh.PublicKey]netip.AddrPort{a: e1}, plan: []string{"replace peer A endpoint 192.0.2.1:1"}},
		{name: "never heard of", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2}), plan: []string{"replace peer A endpoint 192.0.2.1:1"}},
		{name: "roamed and newly configured", want: wantA(mesh.DevicePeer{Endpoint: e3}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh}), last: map[mesh.PublicKey]netip.AddrPort{a: e1}, plan: []string{"replace peer A endpoint 192.0.2.3:3"}},
		{name: "newly configured where it already is", want: wantA(mesh.DevicePeer{Endpoint: e2}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh}), last: map[mesh.PublicKey]netip.AddrPort{a: e1}},
		{name: "no endpoint wanted", want: wantA(mesh.DevicePeer{}), have: haveA(devicePeer{endpoint: e2, lastHandshake: old}), last: map[mesh.PublicKey]netip.AddrPort{a: e1}},
		{name: "IPv4 as IPv6", want: wantA(mesh.DevicePeer{Endpoint: netip.MustParseAddrPort("[::ffff:192.0.2.2]:2")}), have: haveA(devicePeer{endpoint: e2})},
		// Allowed IPs.
		{
			name: "prefix added",
			want: owning(mesh.Device{Peers: map[mesh.PublicKey]mesh.DevicePeer{a: {}}}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): a, pfx("fd00::/64"): a}),
			have: haveA(devicePeer{allowedIPs: set("10.0.0.0/24")}),
			plan: []string{"replace peer A allowed-ips +fd00::/64"},
		},
		{
			name: "prefix removed",
			want: owning(mesh.Device{Peers: map[mesh.PublicKey]mesh.DevicePeer{a: {}, b: {}}}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): a, pfx("10.0.1.0/24"): b}),
			have: device{peers: map[mesh.PublicKey]devicePeer{a: {allowedIPs: set("10.0.0.0/24", "10.9.0.0/24")}, b: {allowedIPs: set("10.0.1.0/24")}}},
			plan: []string{"then replace peer A allowed-ips 10.0.0.0/24"},
		},
		{
			name: "last prefix removed", want: wantA(mesh.DevicePeer{}), have: haveA(devicePeer{allowedIPs: set("10.9.0.0/24")}),
			plan: []string{"then replace peer A allowed-ips "},
		},
		{
			name: "prefix moved, old owner is not rewritten",
			want: owning(mesh.Device{Peers: map[mesh.PublicKey]mesh.DevicePeer{a: {}, b: {}}}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): a, pfx("10.0.1.0/24"): b}),
			have: device{peers: map[mesh.PublicKey]devicePeer{a: {allowedIPs: set("10.0.0.0/24", "10.0.1.0/24")}, b: {}}},
			plan: []string{"replace peer B allowed-ips +10.0.1.0/24"},
		},
		{
			name: "prefixes swapped",
			want: owning(mesh.Device{Peers: map[mesh.PublicKey]mesh.DevicePeer{a: {}, b: {}}}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): b, pfx("10.0.1.0/24"): a}),
			have: device{peers: map[mesh.PublicKey]devicePeer{a: {allowedIPs: set("10.0.0.0/24")}, b: {allowedIPs: set("10.0.1.0/24")}}},
			plan: []string{"replace peer A allowed-ips +10.0.1.0/24", "replace peer B allowed-ips +10.0.0.0/24"},
		},
		{
			name: "owner removed after its prefix moved",
			want: owning(mesh.Device{Peers: map[mesh.PublicKey]mesh.DevicePeer{c: {}}}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): c}),
			have: haveA(devicePeer{allowedIPs: set("10.0.0.0/24")}),
			plan: []string{"add peer C allowed-ips +10.0.0.0/24", "then delete peer A remove"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			// The fixed order is that of keys, which is not that of the letters.
			got := planText(diffDevice(test.want, test.have, test.last, now))
			slices.Sort(got)
			slices.Sort(test.plan)
			if diff := cmp.Diff(test.plan, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

func TestDiffDeviceRefusesOwnKeyAndASecondOwner(t *testing.T) {
	first, second := public(3), public(4)
	if first.Compare(second) > 0 {
		first, second = second, first
	}
	both := []netip.Prefix{pfx("10.0.0.0/24")}
	plan := diffDevice(mesh.Device{
		PrivateKey: secret(2),
		Peers:      map[mesh.PublicKey]mesh.DevicePeer{public(2): {Name: "node/self"}, first: {AllowedIPs: both}, second: {AllowedIPs: both}},
	}, device{privateKey: secret(2)}, nil, time.Time{})
	err := errors.Join(plan.errs...)
	if !errors.Is(err, errOwnKey) || !errors.Is(err, errTwoOwners) || len(plan.grow) != 2 || len(plan.grow[0].allowedIPs) != 1 || len(plan.grow[1].allowedIPs) != 0 {
		t.Errorf("plan %v, error %v", planText(plan), err)
	}
}

// wireGuard is what a device does with a configuration: kernel and userspace
// agree that a prefix has one owner, the last one it was given to.
func (d device) configure(changes []peerChange) {
	for _, c := range changes {
		if c.op == OpDelete {
			delete(d.peers, c.key)
			continue
		}
		p := d.peers[c.key]
		if p.allowedIPs == nil || c.replaceIPs {
			p.allowedIPs = map[netip.Prefix]bool{}
		}
		if c.endpoint.IsValid() {
			p.endpoint = c.endpoint
		}
		if c.presharedKey != nil {
			p.presharedKey = *c.presharedKey
		}
		if c.keepalive != nil {
			p.keepalive = *c.keepalive
		}
		d.peers[c.key] = p
		for _, prefix := range c.allowedIPs {
			for k := range d.peers {
				delete(d.peers[k].allowedIPs, prefix)
			}
			p.allowedIPs[prefix] = true
		}
	}
}

// owned reports whether some peer has the prefix.
func (d device) owned(p netip.Prefix) bool {
	for _, peer := range d.peers {
		if peer.allowedIPs[p] {
			return true
		}
	}
	return false
}

func TestDiffDeviceConvergesAndLosesNoPrefix(t *testing.T) {
	keys := []mesh.PublicKey{public(2), public(3), public(4), public(5)}
	desired := rapid.Custom(func(t *rapid.T) mesh.Device {
		d := mesh.Device{Peers: map[mesh.PublicKey]mesh.DevicePeer{}}
		for i, k := range keys {
			if rapid.Bool().Draw(t, "peer") {
				d.Peers[k] = mesh.DevicePeer{
					PersistentKeepalive: rapid.Uint16Range(0, 2).Draw(t, "keepalive"),
					Endpoint:            netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), rapid.Uint16Range(1, 3).Draw(t, "port")),
				}
			}
		}
		owners := slices.SortedFunc(maps.Keys(d.Peers), mesh.PublicKey.Compare)
		for i := range 6 {
			if len(owners) > 0 && rapid.Bool().Draw(t, "prefix") {
				give(d, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16), rapid.SampledFrom(owners).Draw(t, "owner"))
			}
		}
		return d
	})
	rapid.Check(t, func(t *rapid.T) {
		have := device{peers: map[mesh.PublicKey]devicePeer{}}
		last := map[mesh.PublicKey]netip.AddrPort{}
		for range 3 {
			want := desired.Draw(t, "desired")
			before := device{peers: maps.Clone(have.peers)}
			kept := map[netip.Prefix]bool{}
			owners, _ := ownersOf(want)
			for p := range owners {
				kept[p] = before.owned(p)
			}
			plan := diffDevice(want, have, last, time.Time{})
			for _, c := range slices.Concat(plan.grow, plan.shrink) {
				have.configure([]peerChange{c})
				for p := range kept {
					if kept[p] && !have.owned(p) {
						t.Fatalf("%s had an owner and is to have one, but has none after %s", p, c.text())
					}
				}
			}
			last = plan.endpoints
			if again := diffDevice(want, have, last, time.Time{}); len(again.grow)+len(again.shrink) > 0 {
				t.Fatalf("not converged: %v", planText(again))
			}
			if diff := cmp.Diff(deviceText(deviceOf(want)), deviceText(have)); diff != "" {
				t.Fatalf("(-want +got)\n%s", diff)
			}
		}
	})
}
