// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Many elements are sorted several times faster as numbers, of which the upper
// bits are what they are sorted by and the lower ones their places.
const (
	placeBits = 23 // no mesh has eight million of anything
	placeMask = 1<<placeBits - 1
)

// arrange moves each element to its place in the order that numbers say, which it uses up.
func arrange[T any](s []T, order []uint64) {
	const done = placeMask
	for i := range order {
		// The element goes to its place, and the one that was there to its own, until a circle closes.
		for at := i; order[at]&placeMask != done; {
			from := int(order[at] & placeMask)
			order[at] |= done
			if from == i {
				break
			}
			s[at], s[from] = s[from], s[at]
			at = from
		}
	}
}

// number is a masked IPv4 prefix as a number of 38 bits that sorts like ComparePrefix does.
func number(p netip.Prefix) uint64 {
	b := p.Addr().As4()
	return uint64(binary.BigEndian.Uint32(b[:]))<<6 | uint64(p.Bits()) //nolint:gosec // 0 to 32
}

// lastNumber is the greatest number of a prefix within p.
func lastNumber(p netip.Prefix) uint64 {
	return number(p)>>6<<6 | (1<<(32-p.Bits())-1)<<6 | (1<<6 - 1)
}

// prefixOf is the reverse of number.
func prefixOf(n uint64) netip.Prefix {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], uint32(n>>6)) //nolint:gosec // the upper bits are zero
	return netip.PrefixFrom(netip.AddrFrom4(b), int(n&0x3f))
}

// SortPrefixes sorts masked prefixes by family, address and length.
func SortPrefixes(ps []netip.Prefix) {
	const few = 12
	switch {
	case slices.IsSortedFunc(ps, ComparePrefix):
		return // without a write: they may be shared
	case len(ps) <= few:
		slices.SortFunc(ps, ComparePrefix)
		return
	}
	numbers := make([]uint64, 0, len(ps))
	rest := ps[:0]
	for _, p := range ps {
		if p.Addr().Is4() {
			numbers = append(numbers, number(p))
		} else {
			rest = append(rest, p)
		}
	}
	slices.Sort(numbers)
	copy(ps[len(numbers):], rest)
	for i, n := range numbers {
		ps[i] = prefixOf(n)
	}
	slices.SortFunc(ps[len(numbers):], ComparePrefix)
}

// sortRoutes sorts routes as Route.Compare does, of which no two have the same
// table and destination.
func sortRoutes(routes []Route) {
	if sortedRoutes(routes) {
		return
	}
	v4 := 0
	for i := range routes {
		if routes[i].Dst.Addr().Is4() {
			routes[i], routes[v4] = routes[v4], routes[i]
			v4++
		}
	}
	slices.SortFunc(routes[v4:], Route.Compare)
	routes = routes[:v4]
	order := make([]uint64, v4)
	for i, r := range routes {
		n := number(r.Dst)
		switch r.Table { // in their order
		case TableTunnel:
			n |= 1 << 38
		case TableAddOn:
			n |= 2 << 38
		case TableSealed:
			n |= 3 << 38
		}
		order[i] = n<<placeBits | uint64(i) //nolint:gosec // not negative
	}
	slices.Sort(order)
	arrange(routes, order)
}

// sortedRoutes does not copy them, as slices.IsSortedFunc would.
func sortedRoutes(routes []Route) bool {
	for i := 1; i < len(routes); i++ {
		if routes[i-1].CompareTarget(&routes[i]) > 0 {
			return false
		}
	}
	return true
}

// mergeRoutes puts sorted routes among others.
func mergeRoutes(into, routes []Route) []Route {
	i, j := len(into)-1, len(routes)-1
	into = append(into, routes...)
	for k := len(into) - 1; j >= 0; k-- {
		if i >= 0 && into[i].CompareTarget(&routes[j]) > 0 {
			into[k] = into[i]
			i--
		} else {
			into[k] = routes[j]
			j--
		}
	}
	return into
}

// sortPeers sorts peers by their keys.
func sortPeers(peers []DevicePeer) {
	arrange(peers, orderKeys(len(peers), func(i int) *PublicKey { return &peers[i].Key }))
}

// orderKeys returns the order of n keys: the places of the keys, each under the
// first bits of its key. Equal keys stay in their order.
func orderKeys(n int, key func(int) *PublicKey) []uint64 {
	order := make([]uint64, n)
	for i := range order {
		order[i] = firstBits(key(i)) | uint64(i) //nolint:gosec // not negative
	}
	slices.Sort(order)
	for i := 1; i < n; i++ {
		for j := i; j > 0 && sameBits(order[j], order[j-1]) && key(placeOf(order[j])).Compare(*key(placeOf(order[j-1]))) < 0; j-- {
			order[j], order[j-1] = order[j-1], order[j]
		}
	}
	return order
}

func firstBits(k *PublicKey) uint64 { return binary.BigEndian.Uint64(k[:8]) &^ placeMask }
func sameBits(a, b uint64) bool     { return a^b <= placeMask }
func placeOf(ordered uint64) int    { return int(ordered & placeMask) }

// keyring finds nodes by their keys.
type keyring struct {
	nodes []*Node
	order []uint64 // see orderKeys
}

func newKeyring(nodes []*Node) keyring {
	return keyring{nodes, orderKeys(len(nodes), func(i int) *PublicKey { return &nodes[i].Key })}
}

// shared reports whether several nodes have one key.
func (r keyring) shared() bool {
	for i := 1; i < len(r.order); i++ {
		if r.nodes[placeOf(r.order[i])].Key == r.nodes[placeOf(r.order[i-1])].Key {
			return true
		}
	}
	return false
}

// find returns the first of the nodes that has the key, nil without one.
func (r keyring) find(key PublicKey) *Node {
	bits := firstBits(&key)
	for i, _ := slices.BinarySearch(r.order, bits); i < len(r.order) && sameBits(r.order[i], bits); i++ {
		if n := r.nodes[placeOf(r.order[i])]; n.Key == key {
			return n
		}
	}
	return nil
}
