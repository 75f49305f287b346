// SPDX-License-Identifier: Apache-2.0

package mesh

import "net/netip"

// IsPublic reports whether ip can be reached through the internet. It is not
// when it belongs to RFC 1918, RFC 4193 (unique local), RFC 6598 (carrier-grade
// NAT), or to loopback, link-local, multicast, "this network" (RFC 791) or the
// reserved class E (RFC 1112). The documentation prefixes (RFC 5737, RFC 3849)
// count as public, for they stand for public addresses.
func IsPublic(ip netip.Addr) bool { return isUsable(ip) && !isPrivate(ip) }

// isUsable reports whether a host can talk to other hosts from ip.
func isUsable(ip netip.Addr) bool {
	if !ip.IsGlobalUnicast() { // neither unspecified, loopback, multicast, link-local nor the IPv4 broadcast
		return false
	}
	if !ip.Is4() {
		return true
	}
	b := ip.As4()
	return b[0] != 0 && b[0] < 240
}

// isPrivate reports whether ip is from a range for networks of one's own.
func isPrivate(ip netip.Addr) bool {
	if ip.IsPrivate() { // RFC 1918, RFC 4193
		return true
	}
	if !ip.Is4() {
		return false
	}
	b := ip.As4()
	return b[0] == 100 && b[1]&0xc0 == 64 // RFC 6598, 100.64.0.0/10
}
