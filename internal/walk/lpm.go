// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"
)

// bits128 is an address as a number; IPv4 is in the upper 32 bits of hi.
type bits128 struct{ hi, lo uint64 }

func bitsOf(a netip.Addr) bits128 {
	if a.Is4() {
		b := a.As4()
		return bits128{hi: uint64(binary.BigEndian.Uint32(b[:])) << 32}
	}
	b := a.As16()
	return bits128{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func maskOf(bits int) bits128 {
	if bits <= 64 {
		return bits128{hi: ^uint64(0) << (64 - bits)}
	}
	return bits128{^uint64(0), ^uint64(0) << (128 - bits)}
}

// entry is a prefix in a table, with its value.
type entry struct {
	net, mask bits128
	bits      int16
	value     int32
}

func (e *entry) contains(a bits128) bool {
	return a.hi&e.mask.hi == e.net.hi && a.lo&e.mask.lo == e.net.lo
}

func entryOf(p netip.Prefix, value int) entry {
	return entry{net: bitsOf(p.Masked().Addr()), mask: maskOf(p.Bits()), bits: int16(p.Bits()), value: int32(value)} //nolint:gosec // at most 128, and an index
}

// table finds the value of the longest prefix that holds an address. For the
// few dozen prefixes of a small mesh, trying them one by one, the longest
// first, is faster than any map or trie.
type table struct{ v4, v6 []entry }

// add puts p in; of equal prefixes the first stays.
func (t *table) add(p netip.Prefix, value int) {
	if p.Addr().Is4() {
		t.v4 = append(t.v4, entryOf(p, value))
	} else {
		t.v6 = append(t.v6, entryOf(p, value))
	}
}

// sort must come between the last add and the first get.
func (t *table) sort() {
	longest := func(a, b entry) int { return cmp.Compare(b.bits, a.bits) }
	slices.SortStableFunc(t.v4, longest)
	slices.SortStableFunc(t.v6, longest)
}

// get returns -1 if no prefix holds a.
func (t *table) get(a netip.Addr) int {
	entries := t.v6
	if a.Is4() {
		entries = t.v4
	}
	b := bitsOf(a)
	for i := range entries {
		if entries[i].contains(b) {
			return int(entries[i].value)
		}
	}
	return -1
}

func tableOf(ps []netip.Prefix) table {
	var t table
	for i, p := range ps {
		t.add(p, i)
	}
	t.sort()
	return t
}

// has reports whether any prefix holds a.
func (t *table) has(a netip.Addr) bool { return t.get(a) >= 0 }

// empty reports whether there is no prefix of the family of a.
func (t *table) empty(a netip.Addr) bool {
	if a.Is4() {
		return len(t.v4) == 0
	}
	return len(t.v6) == 0
}

// commonBits counts the leading bits that a and b share.
func commonBits(a, b netip.Addr) int {
	for bits := a.BitLen(); bits > 0; bits-- {
		if netip.PrefixFrom(a, bits).Contains(b) {
			return bits
		}
	}
	return 0
}
