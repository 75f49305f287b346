// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"net/netip"
	"slices"
)

// DetectConfig is what the flags say about the own node's addresses.
type DetectConfig struct {
	// Port is the UDP port of WireGuard, 1 to 65535.
	Port uint16
	// InternalCIDRs limit which addresses of the host may be an internal IP; none is no limit.
	InternalCIDRs []netip.Prefix
	// PrioritisePrivate advertises the internal IP as endpoint, even if there is a public address.
	PrioritisePrivate bool
}

// Detect makes the own Node of what is declared and what the host says.
// Annotations that force a value come first, then the addresses in the Node's
// status, then those of the host's links. What Kilo published before is no
// input, so nothing outlives its cause. The key is left to the caller.
func Detect(d Declared, f Facts, cfg DetectConfig) (Node, []Problem) {
	n := d.Node
	n.InternalIPs = internalIPs(d, f, cfg)
	n.CNICompatibilityIPs = f.CiliumIPs
	n.ListenPort = cfg.Port
	if d.ForceEndpoint.IsValid() {
		n.Endpoint = d.ForceEndpoint
		n.ListenPort = d.ForceEndpoint.Port
		return n, nil
	}
	n.Endpoint = Endpoint{}
	if ip := endpointIP(d, f, cfg, n.InternalIPs); ip.IsValid() {
		n.Endpoint = Endpoint{IP: ip, Port: cfg.Port}
		return n, nil
	}
	return n, []Problem{{"node/" + n.Name, "endpoint", errors.New("no address found that others could reach; want one in status.addresses, on a link, or in the annotation kilo.squat.ai/force-endpoint")}}
}

// internalIPs returns the node's address in its location for each family.
// Addresses on the host's links are candidates only if the Node's status has
// no internal address at all: else a bridge like docker0 would be taken.
func internalIPs(d Declared, f Facts, cfg DetectConfig) []netip.Prefix {
	if d.NoInternalIP {
		return nil
	}
	if len(d.ForceInternalIPs) > 0 {
		return d.ForceInternalIPs
	}
	var candidates []netip.Prefix
	for _, ip := range d.InternalIPs {
		if a, ok := f.LinkOf(ip); ok {
			candidates = append(candidates, a.Prefix)
		} else {
			candidates = append(candidates, single(ip))
		}
	}
	if len(candidates) == 0 {
		candidates = hostPrefixes(f)
	}
	candidates = slices.DeleteFunc(candidates, func(p netip.Prefix) bool {
		return !isUsable(p.Addr()) || !isPrivate(p.Addr()) || !allowed(p.Addr(), cfg.InternalCIDRs)
	})
	var out []netip.Prefix
	for _, zero := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		if p, ok := ofFamily(candidates, zero); ok {
			out = append(out, p)
		}
	}
	return out
}

// endpointIP returns the address to advertise, zero if there is none. IPv4 is
// preferred: everybody can reach it who can reach anything.
func endpointIP(d Declared, f Facts, cfg DetectConfig, internal []netip.Prefix) netip.Addr {
	if cfg.PrioritisePrivate && len(internal) > 0 {
		return internal[0].Addr()
	}
	candidates := slices.Concat(d.ExternalIPs, d.InternalIPs)
	for _, p := range hostPrefixes(f) {
		candidates = append(candidates, p.Addr())
	}
	candidates = slices.DeleteFunc(candidates, func(ip netip.Addr) bool { return !isUsable(ip) })
	for _, want := range []func(netip.Addr) bool{
		func(ip netip.Addr) bool { return IsPublic(ip) && ip.Is4() },
		IsPublic,
	} {
		if i := slices.IndexFunc(candidates, want); i >= 0 {
			return candidates[i]
		}
	}
	if len(internal) > 0 {
		return internal[0].Addr()
	}
	if len(candidates) > 0 {
		return candidates[0]
	}
	return netip.Addr{}
}

// hostPrefixes lists the host's addresses, those on the link of the default route first.
func hostPrefixes(f Facts) []netip.Prefix {
	var first, rest []netip.Prefix
	for _, a := range f.Addrs {
		if a.Dev == f.DefaultDev {
			first = append(first, a.Prefix)
		} else {
			rest = append(rest, a.Prefix)
		}
	}
	return append(first, rest...)
}

func allowed(ip netip.Addr, cidrs []netip.Prefix) bool {
	return len(cidrs) == 0 || slices.ContainsFunc(cidrs, func(c netip.Prefix) bool { return c.Contains(ip) })
}
