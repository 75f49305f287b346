// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
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
	peers      map[mesh.PublicKey]devicePeer
}

// devicePeer is one peer of a device.
type devicePeer struct {
	endpoint      netip.AddrPort
	presharedKey  mesh.SecretKey
	keepalive     uint16
	lastHandshake time.Time
	allowedIPs    map[netip.Prefix]bool
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
	// endpoints are the desired ones, to be remembered for the next diff.
	endpoints map[mesh.PublicKey]netip.AddrPort
	errs      []error
}

// diffDevice compares a desired device with what the kernel holds at the time
// now. last are the endpoints that this process desired before.
//
// WireGuard follows a peer that roams. So the endpoint of a peer is set when
// the peer is new or has none, when its desired endpoint differs from the one
// in last, and when it is another and the peer silent for rejectAfter; never
// otherwise.
func diffDevice(want mesh.Device, have device, last map[mesh.PublicKey]netip.AddrPort, now time.Time) devicePlan {
	plan := devicePlan{endpoints: map[mesh.PublicKey]netip.AddrPort{}}
	if want.PrivateKey != have.privateKey {
		plan.privateKey = &want.PrivateKey
	}
	if want.ListenPort != 0 && want.ListenPort != have.listenPort {
		plan.listenPort = &want.ListenPort
	}
	owners, errs := ownersOf(want)
	plan.errs = errs
	self, _ := want.PrivateKey.Public()
	for _, key := range slices.SortedFunc(maps.Keys(want.Peers), mesh.PublicKey.Compare) {
		w := want.Peers[key]
		if key == self {
			// WireGuard drops it without a word, and we would add it again and again.
			plan.errs = append(plan.errs, fmt.Errorf("wg set peer %s (%s): %w", key, w.Name, errOwnKey))
			continue
		}
		if w.Endpoint.IsValid() {
			plan.endpoints[key] = unmap(w.Endpoint)
		}
		prefixes := make([]netip.Prefix, 0, len(w.AllowedIPs))
		for _, p := range w.AllowedIPs {
			if owners[p] == key {
				prefixes = append(prefixes, p)
			}
		}
		slices.SortFunc(prefixes, netip.Prefix.Compare)
		h, ok := have.peers[key]
		if c, changed := growPeer(key, w, prefixes, h, ok, last, now); changed {
			plan.grow = append(plan.grow, c)
		}
		if lost := stray(h.allowedIPs, owners); lost {
			plan.shrink = append(plan.shrink, peerChange{key: key, name: w.Name, op: OpReplace, allowedIPs: prefixes, replaceIPs: true})
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(have.peers), mesh.PublicKey.Compare) {
		if _, ok := want.Peers[key]; !ok || key == self {
			plan.shrink = append(plan.shrink, peerChange{key: key, op: OpDelete})
		}
	}
	return plan
}

var (
	errOwnKey    = errors.New("the peer has this node's own key")
	errTwoOwners = errors.New("another peer is to have the same prefix")
)

// ownersOf is the cryptokey routing table: of peers that are to have the same
// prefix the first by key gets it.
func ownersOf(d mesh.Device) (map[netip.Prefix]mesh.PublicKey, []error) {
	var errs []error
	owners := make(map[netip.Prefix]mesh.PublicKey, 3*len(d.Peers))
	for _, key := range slices.SortedFunc(maps.Keys(d.Peers), mesh.PublicKey.Compare) {
		for _, p := range d.Peers[key].AllowedIPs {
			if owner, ok := owners[p]; ok && owner != key {
				errs = append(errs, fmt.Errorf("wg set peer %s allowed-ips %s: %w: %s", key, p, errTwoOwners, owner))
				continue
			}
			owners[p] = key
		}
	}
	return owners, errs
}

// growPeer compares one peer, but for prefixes that it must lose.
func growPeer(key mesh.PublicKey, w mesh.DevicePeer, prefixes []netip.Prefix, h devicePeer, exists bool, last map[mesh.PublicKey]netip.AddrPort, now time.Time) (c peerChange, changed bool) {
	c = peerChange{key: key, name: w.Name, op: OpReplace}
	if !exists {
		c.op = OpAdd
	}
	if setEndpoint(key, unmap(w.Endpoint), h, last, now) {
		c.endpoint = unmap(w.Endpoint)
	}
	if w.PresharedKey != h.presharedKey {
		c.presharedKey = &w.PresharedKey
	}
	if w.PersistentKeepalive != h.keepalive {
		c.keepalive = &w.PersistentKeepalive
	}
	for _, p := range prefixes {
		if !h.allowedIPs[p] {
			c.allowedIPs = append(c.allowedIPs, p)
		}
	}
	changed = !exists || c.endpoint.IsValid() || c.presharedKey != nil || c.keepalive != nil || len(c.allowedIPs) > 0
	return c, changed
}

func setEndpoint(key mesh.PublicKey, want netip.AddrPort, h devicePeer, last map[mesh.PublicKey]netip.AddrPort, now time.Time) bool {
	if !want.IsValid() || want == h.endpoint {
		return false
	}
	before, known := last[key]
	return !h.endpoint.IsValid() || known && before != want || now.Sub(h.lastHandshake) > rejectAfter
}

// stray reports whether a peer has a prefix that nobody is to have. One that
// another peer is to have has moved there by now.
func stray(have map[netip.Prefix]bool, want map[netip.Prefix]mesh.PublicKey) bool {
	for p := range have {
		if _, ok := want[p]; !ok {
			return true
		}
	}
	return false
}

func unmap(ap netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
