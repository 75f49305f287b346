// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"slices"
)

// holes are prefixes that must not be routed to other locations, nor as a part
// of broader ones: what carries the tunnel cannot go through it, and what is
// reached in this location must not go to another that announces more than it,
// or has the same private addresses. They are sorted as ComparePrefix does; those
// of IPv4 are numbers, see number.
type holes struct {
	v4 []uint64
	v6 []netip.Prefix
}

func (h *holes) sort() {
	slices.Sort(h.v4)
	slices.SortFunc(h.v6, ComparePrefix)
}

// add puts a hole behind the others; they are to be sorted afterwards.
func (h *holes) add(hole netip.Prefix) {
	if hole.Addr().Is4() {
		h.v4 = append(h.v4, number(hole))
	} else {
		h.v6 = append(h.v6, hole)
	}
}

// from drops the holes that come before dst.
func (h *holes) from(dst netip.Prefix) {
	if dst.Addr().Is6() {
		for len(h.v6) > 0 && ComparePrefix(h.v6[0], dst) < 0 {
			h.v6 = h.v6[1:]
		}
		return
	}
	for n := number(dst); len(h.v4) > 0 && h.v4[0] < n; {
		h.v4 = h.v4[1:]
	}
}

// hits reports whether dst contains a hole. Those before dst were dropped.
func (h *holes) hits(dst netip.Prefix) bool {
	if dst.Addr().Is4() {
		return len(h.v4) > 0 && h.v4[0] <= lastNumber(dst)
	}
	_, ok := h.within(dst)
	return ok
}

// has reports whether p is a hole.
func (h *holes) has(p netip.Prefix) bool {
	if p.Addr().Is4() {
		_, ok := slices.BinarySearch(h.v4, number(p))
		return ok
	}
	_, ok := slices.BinarySearchFunc(h.v6, p, ComparePrefix)
	return ok
}

// within returns the first hole that dst contains; ok is false without one.
// Those before dst were dropped. Those that contain dst are of no matter: the
// narrower prefix carries the packet.
func (h *holes) within(dst netip.Prefix) (hole netip.Prefix, ok bool) {
	// In this order whatever dst contains comes right behind it.
	switch {
	case dst.Addr().Is6() && len(h.v6) > 0:
		hole = h.v6[0]
	case dst.Addr().Is4() && len(h.v4) > 0:
		hole = prefixOf(h.v4[0])
	}
	return hole, hole.IsValid() && dst.Contains(hole.Addr())
}

// spare calls f with the parts of dst in which no hole is. It leaves out
// narrower prefixes that are covered otherwise.
func (h *holes) spare(dst netip.Prefix, covered func(netip.Prefix) bool, f func(netip.Prefix)) {
	h.from(dst)
	hole, ok := h.within(dst)
	if !ok {
		f(dst)
		return
	}
	if hole == dst {
		return
	}
	low, high := halves(dst)
	for _, half := range []netip.Prefix{low, high} {
		if !covered(half) {
			h.spare(half, covered, f)
		}
	}
}

// around calls f with the parts of p in which no hole is.
func around(h holes, p netip.Prefix, f func(netip.Prefix)) {
	h.spare(p, func(netip.Prefix) bool { return false }, f)
}

// halves cuts a prefix in two; p is not a single address.
func halves(p netip.Prefix) (low, high netip.Prefix) {
	bits := p.Bits()
	b := p.Addr().AsSlice()
	low = netip.PrefixFrom(p.Addr(), bits+1)
	b[bits/8] |= 0x80 >> (bits % 8)
	upper, _ := netip.AddrFromSlice(b)
	return low, netip.PrefixFrom(upper, bits+1)
}
