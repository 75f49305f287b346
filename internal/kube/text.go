// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// maxQuoted bounds in bytes what a message quotes of a value, and the length
// of a single value: an endpoint, the longest, has a name of 253 and a port.
const maxQuoted = 260

// quote returns s in quotes, cut to maxQuoted.
func quote(s string) string {
	if len(s) > maxQuoted {
		return strconv.Quote(s[:maxQuoted]) + "..."
	}
	return strconv.Quote(s)
}

func notTooLong(s string) error {
	if len(s) > maxQuoted {
		return fmt.Errorf("%s: want at most %d characters, got %d", quote(s), maxQuoted, len(s))
	}
	return nil
}

// entries splits a list at its commas, and drops white space and empty entries.
func entries(list string) []string {
	var out []string
	for entry := range strings.SplitSeq(list, ",") {
		if entry = strings.TrimSpace(entry); entry != "" {
			out = append(out, entry)
		}
	}
	return out
}

// parsePrefix reads a CIDR and keeps its host bits. An IPv4-mapped IPv6 address
// is the IPv4 one.
func parsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if err == nil && p.Addr().Is4In6() {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	if err != nil || !p.IsValid() {
		return netip.Prefix{}, fmt.Errorf("CIDR %s: want address/length, such as 10.1.0.0/16 or fd00:1::/64", quote(s))
	}
	return p, nil
}

// parsePrefixOrAddr is parsePrefix that takes an address for a prefix of full length.
func parsePrefixOrAddr(s string) (netip.Prefix, error) {
	if ip, err := netip.ParseAddr(s); err == nil && ip.Zone() == "" {
		ip = ip.Unmap()
		return netip.PrefixFrom(ip, ip.BitLen()), nil
	}
	p, err := parsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("CIDR or address %s: want such as 10.1.0.0/16, fd00:1::/64, 10.1.0.2 or fd00:1::2", quote(s))
	}
	return p, nil
}

// appendNew appends v unless s contains it.
func appendNew[T comparable](s []T, v T) []T {
	if slices.Contains(s, v) {
		return s
	}
	return append(s, v)
}
