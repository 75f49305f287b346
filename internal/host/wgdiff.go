// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kilomesh/kilo/internal/mesh"
)

// rejectAfter is how long a WireGuard session lasts without a new handshake:
// Reject-After-Time of the WireGuard whitepaper, section 6.1. A peer that is
// silent for longer is not where its endpoint says, or says nothing.
const rejectAfter = 180 * time.Second

// device is what a WireGuard device holds.
type device struct {
	privateKey mesh.SecretKey
	listenPort uint16
	peers      []devicePeer // by key
}

// devicePeer is one peer of a device.
type devicePeer struct {
	key           mesh.PublicKey
	endpoint      netip.AddrPort
	presharedKey  mesh.SecretKey
	keepalive     uint16
	lastHandshake time.Time
	allowedIPs    []netip.Prefix // sorted as mesh.SortPrefixes does
}

// peerChange changes one peer of a device. Nil pointers leave the value alone.
type peerChange struct {
	key          mesh.PublicKey
	name         string
	op           Op
	endpoint     netip.AddrPort // zero leaves it alone
	presharedKey *mesh.SecretKey
	keepalive    *uint16
	// allowedIPs are added, or with replaceIPs put in place of all that the peer has.
	allowedIPs []netip.Prefix
	replaceIPs bool
}

// devicePlan is what brings one device to another. First everything in grow is
// done, in order: a prefix that it gives to one peer leaves its old owner in
// the same moment. Then, once no route needs them, shrink takes prefixes and
// peers away.
type devicePlan struct {
	privateKey *mesh.SecretKey
	listenPort *uint16
	grow       []peerChange
	shrink     []peerChange
	errs       []error
}

// desired are the endpoints that this process last desired. Those of failed
// changes are the ones before, zero without one.
type desired struct {
	device mesh.Device
	failed map[mesh.PublicKey]netip.AddrPort
}

// endpoint returns the peer's, zero without one.
func (d desired) endpoint(key mesh.PublicKey) netip.AddrPort {
	if before, ok := d.failed[key]; ok {
		return before
	}
	if p := d.device.Peer(key); p != nil {
		return unmap(p.Endpoint)
	}
	return netip.AddrPort{}
}

// diffDevice compares a desired device with what the kernel holds at the time
// now. last is what this process desired before.
//
// WireGuard follows a peer that roams. So the endpoint of a peer is set when
// the peer is new or has none, when its desired endpoint differs from the one
// in last, and when it is another and the peer silent for rejectAfter; never
// otherwise.
func diffDevice(want mesh.Device, have device, last desired, now time.Time) devicePlan {
	var plan devicePlan
	if want.PrivateKey != have.privateKey {
		plan.privateKey = &want.PrivateKey
	}
	if want.ListenPort != 0 && want.ListenPort != have.listenPort {
		plan.listenPort = &want.ListenPort
	}
	self, _ := want.PrivateKey.Public()
	wanted := sync.OnceValue(func() map[netip.Prefix]bool { return allowedIPsOf(want) })
	rest := have.peers
	for i := range want.Peers {
		w := &want.Peers[i]
		if w.Key == self {
			// WireGuard drops it without a word, and we would add it again and again.
			plan.errs = append(plan.errs, fmt.Errorf("wg set peer %s (%s): %w", w.Key, w.Object(), errOwnKey))
			continue
		}
		for len(rest) > 0 && rest[0].key.Compare(w.Key) < 0 {
			plan.shrink = append(plan.shrink, peerChange{key: rest[0].key, op: OpDelete})
			rest = rest[1:]
		}
		var h *devicePeer
		if len(rest) > 0 && rest[0].key == w.Key {
			h, rest = &rest[0], rest[1:]
		}
		if c, changed := growPeer(w, h, last, now); changed {
			plan.grow = append(plan.grow, c)
		}
		if h != nil && h.stray(w, wanted) {
			plan.shrink = append(plan.shrink, peerChange{key: w.Key, name: w.Object(), op: OpReplace, allowedIPs: w.AllowedIPs, replaceIPs: true})
		}
	}
	for _, h := range rest {
		plan.shrink = append(plan.shrink, peerChange{key: h.key, op: OpDelete})
	}
	return plan
}

var errOwnKey = errors.New("the peer has this node's own key")

// growPeer compares one peer, but for prefixes that it must lose. The device
// does not have it if h is nil.
func growPeer(w *mesh.DevicePeer, h *devicePeer, last desired, now time.Time) (c peerChange, changed bool) {
	c = peerChange{key: w.Key, op: OpReplace}
	if h == nil {
		c.op, h = OpAdd, &devicePeer{}
	}
	if setEndpoint(w.Key, unmap(w.Endpoint), h, last, now) {
		c.endpoint = unmap(w.Endpoint)
	}
	if w.PresharedKey != h.presharedKey {
		c.presharedKey = &w.PresharedKey
	}
	if w.PersistentKeepalive != h.keepalive {
		c.keepalive = &w.PersistentKeepalive
	}
	for _, p := range w.AllowedIPs {
		if !h.has(p) {
			c.allowedIPs = append(c.allowedIPs, p)
		}
	}
	if c.op == OpReplace && !c.endpoint.IsValid() && c.presharedKey == nil && c.keepalive == nil && len(c.allowedIPs) == 0 {
		return c, false
	}
	c.name = w.Object()
	return c, true
}

func setEndpoint(key mesh.PublicKey, want netip.AddrPort, h *devicePeer, last desired, now time.Time) bool {
	if !want.IsValid() || want == h.endpoint {
		return false
	}
	if !h.endpoint.IsValid() || now.Sub(h.lastHandshake) > rejectAfter {
		return true
	}
	before := last.endpoint(key)
	return before.IsValid() && before != want
}

// has reports whether the peer has the prefix.
func (h *devicePeer) has(p netip.Prefix) bool {
	if len(h.allowedIPs) < 8 { // most peers have three, and to compare for order costs more
		return slices.Contains(h.allowedIPs, p)
	}
	_, ok := slices.BinarySearchFunc(h.allowedIPs, p, mesh.ComparePrefix)
	return ok
}

// stray reports whether the peer has a prefix that nobody is to have. One that
// another peer is to have has moved there by now.
func (h *devicePeer) stray(w *mesh.DevicePeer, wanted func() map[netip.Prefix]bool) bool {
	kept := 0
	for _, p := range w.AllowedIPs {
		if h.has(p) {
			kept++
		}
	}
	return kept < len(h.allowedIPs) && slices.ContainsFunc(h.allowedIPs, func(p netip.Prefix) bool { return !wanted()[p] })
}

// allowedIPsOf is what any peer of the device is to have.
func allowedIPsOf(d mesh.Device) map[netip.Prefix]bool {
	all := make(map[netip.Prefix]bool, 3*len(d.Peers))
	for _, p := range d.Peers {
		for _, ip := range p.AllowedIPs {
			all[ip] = true
		}
	}
	return all
}

func unmap(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
