// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
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
	set := func(ps ...string) (out []netip.Prefix) {
		for _, p := range ps {
			out = append(out, pfx(p))
		}
		return out
	}
	wantA := func(w mesh.DevicePeer) mesh.Device {
		return mesh.Device{Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{a: w})}
	}
	haveA := func(h devicePeer) device { return holding(map[mesh.PublicKey]devicePeer{a: h}) }
	for _, test := range []struct {
		name string
		want mesh.Device
		have device
		last netip.AddrPort // desired of A
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
		{name: "roamed", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh}), last: e1},
		{name: "roamed before we started", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh})},
		{name: "roamed and then silent", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2, lastHandshake: old}), last: e1, plan: []string{"replace peer A endpoint 192.0.2.1:1"}},
		{name: "never heard of", want: wantA(mesh.DevicePeer{Endpoint: e1}), have: haveA(devicePeer{endpoint: e2}), plan: []string{"replace peer A endpoint 192.0.2.1:1"}},
		{name: "roamed and newly configured", want: wantA(mesh.DevicePeer{Endpoint: e3}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh}), last: e1, plan: []string{"replace peer A endpoint 192.0.2.3:3"}},
		{name: "newly configured where it already is", want: wantA(mesh.DevicePeer{Endpoint: e2}), have: haveA(devicePeer{endpoint: e2, lastHandshake: fresh}), last: e1},
		{name: "no endpoint wanted", want: wantA(mesh.DevicePeer{}), have: haveA(devicePeer{endpoint: e2, lastHandshake: old}), last: e1},
		{name: "IPv4 as IPv6", want: wantA(mesh.DevicePeer{Endpoint: netip.MustParseAddrPort("[::ffff:192.0.2.2]:2")}), have: haveA(devicePeer{endpoint: e2})},
		// Allowed IPs.
		{
			name: "prefix added",
			want: owning(mesh.Device{Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{a: {}})}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): a, pfx("fd00::/64"): a}),
			have: haveA(devicePeer{allowedIPs: set("10.0.0.0/24")}),
			plan: []string{"replace peer A allowed-ips +fd00::/64"},
		},
		{
			name: "prefix removed",
			want: owning(mesh.Device{Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{a: {}, b: {}})}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): a, pfx("10.0.1.0/24"): b}),
			have: holding(map[mesh.PublicKey]devicePeer{a: {allowedIPs: set("10.0.0.0/24", "10.9.0.0/24")}, b: {allowedIPs: set("10.0.1.0/24")}}),
			plan: []string{"then replace peer A allowed-ips 10.0.0.0/24"},
		},
		{
			name: "last prefix removed", want: wantA(mesh.DevicePeer{}), have: haveA(devicePeer{allowedIPs: set("10.9.0.0/24")}),
			plan: []string{"then replace peer A allowed-ips "},
		},
		{
			name: "prefix moved, old owner is not rewritten",
			want: owning(mesh.Device{Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{a: {}, b: {}})}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): a, pfx("10.0.1.0/24"): b}),
			have: holding(map[mesh.PublicKey]devicePeer{a: {allowedIPs: set("10.0.0.0/24", "10.0.1.0/24")}, b: {}}),
			plan: []string{"replace peer B allowed-ips +10.0.1.0/24"},
		},
		{
			name: "prefixes swapped",
			want: owning(mesh.Device{Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{a: {}, b: {}})}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): b, pfx("10.0.1.0/24"): a}),
			have: holding(map[mesh.PublicKey]devicePeer{a: {allowedIPs: set("10.0.0.0/24")}, b: {allowedIPs: set("10.0.1.0/24")}}),
			plan: []string{"replace peer A allowed-ips +10.0.1.0/24", "replace peer B allowed-ips +10.0.0.0/24"},
		},
		{
			name: "owner removed after its prefix moved",
			want: owning(mesh.Device{Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{c: {}})}, map[netip.Prefix]mesh.PublicKey{pfx("10.0.0.0/24"): c}),
			have: haveA(devicePeer{allowedIPs: set("10.0.0.0/24")}),
			plan: []string{"add peer C allowed-ips +10.0.0.0/24", "then delete peer A remove"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			// The fixed order is that of keys, which is not that of the letters.
			got := planText(diffDevice(test.want, test.have, desired{device: wantA(mesh.DevicePeer{Endpoint: test.last})}, now))
			slices.Sort(got)
			slices.Sort(test.plan)
			if diff := cmp.Diff(test.plan, got); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

// holding is a device with these peers.
func holding(byKey map[mesh.PublicKey]devicePeer) device {
	var d device
	for _, k := range sortedKeys(byKey, mesh.PublicKey.Compare) {
		p := byKey[k]
		p.key = k
		d.peers = append(d.peers, p)
	}
	return d
}

func TestDiffDeviceRefusesOwnKey(t *testing.T) {
	plan := diffDevice(mesh.Device{
		PrivateKey: secret(2), Peers: peersOf(map[mesh.PublicKey]mesh.DevicePeer{public(2): {Name: "self", IsNode: true}, public(3): {}}),
	}, device{privateKey: secret(2)}, desired{}, time.Time{})
	if err := errors.Join(plan.errs...); !errors.Is(err, errOwnKey) || len(plan.grow) != 1 || plan.grow[0].key != public(3) {
		t.Errorf("plan %v, error %v", planText(plan), err)
	}
}

// configure is what a device does with a configuration: kernel and userspace
// agree that a prefix has one owner, the last one it was given to.
func (d *device) configure(c peerChange) {
	at, ok := slices.BinarySearchFunc(d.peers, c.key, func(p devicePeer, k mesh.PublicKey) int { return p.key.Compare(k) })
	switch {
	case c.op == OpDelete:
		d.peers = slices.Delete(d.peers, at, at+1)
		return
	case !ok:
		d.peers = slices.Insert(d.peers, at, devicePeer{key: c.key})
	}
	p := &d.peers[at]
	if c.endpoint.IsValid() {
		p.endpoint = c.endpoint
	}
	if c.presharedKey != nil {
		p.presharedKey = *c.presharedKey
	}
	if c.keepalive != nil {
		p.keepalive = *c.keepalive
	}
	if c.replaceIPs {
		p.allowedIPs = nil
	}
	for _, prefix := range c.allowedIPs {
		for i := range d.peers {
			d.peers[i].allowedIPs = slices.DeleteFunc(d.peers[i].allowedIPs, func(q netip.Prefix) bool { return q == prefix })
		}
		p.allowedIPs = append(p.allowedIPs, prefix)
	}
	mesh.SortPrefixes(p.allowedIPs)
}

// owned reports whether some peer has the prefix.
func (d *device) owned(p netip.Prefix) bool {
	return slices.ContainsFunc(d.peers, func(peer devicePeer) bool { return slices.Contains(peer.allowedIPs, p) })
}

func TestDiffDeviceConvergesAndLosesNoPrefix(t *testing.T) {
	keys := []mesh.PublicKey{public(2), public(3), public(4), public(5)}
	devices := rapid.Custom(func(t *rapid.T) mesh.Device {
		peers := map[mesh.PublicKey]mesh.DevicePeer{}
		for i, k := range keys {
			if rapid.Bool().Draw(t, "peer") {
				peers[k] = mesh.DevicePeer{
					PersistentKeepalive: rapid.Uint16Range(0, 2).Draw(t, "keepalive"),
					Endpoint:            netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), rapid.Uint16Range(1, 3).Draw(t, "port")),
				}
			}
		}
		d := mesh.Device{Peers: peersOf(peers)}
		for i := range 6 {
			if len(d.Peers) > 0 && rapid.Bool().Draw(t, "prefix") {
				owner := rapid.IntRange(0, len(d.Peers)-1).Draw(t, "owner")
				give(d, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i)}), 16), d.Peers[owner].Key)
			}
		}
		return d
	})
	rapid.Check(t, func(t *rapid.T) {
		var have device
		var last desired
		for range 3 {
			want := devices.Draw(t, "desired")
			kept := map[netip.Prefix]bool{}
			for p := range allowedIPsOf(want) {
				kept[p] = have.owned(p)
			}
			plan := diffDevice(want, have, last, time.Time{})
			for _, c := range slices.Concat(plan.grow, plan.shrink) {
				have.configure(c)
				for p := range kept {
					if kept[p] && !have.owned(p) {
						t.Fatalf("%s had an owner and is to have one, but has none after %s", p, c.text())
					}
				}
			}
			last = desired{device: want}
			if again := diffDevice(want, have, last, time.Time{}); len(again.grow)+len(again.shrink) > 0 {
				t.Fatalf("not converged: %v", planText(again))
			}
			if diff := cmp.Diff(deviceText(deviceOf(want)), deviceText(have)); diff != "" {
				t.Fatalf("(-want +got)\n%s", diff)
			}
		}
	})
}
