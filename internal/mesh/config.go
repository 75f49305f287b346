// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Granularity says which nodes share a tunnel.
type Granularity string

// The granularities. "location": one leader carries the traffic of each
// location. "full": every node has its own tunnels.
const (
	GranularityLocation Granularity = "location"
	GranularityFull     Granularity = "full"
)

// Encapsulation says which packets inside a location go through the tunnel link.
type Encapsulation string

// The encapsulations. "crosssubnet": only those to nodes outside the own subnet.
const (
	EncapsulateNever       Encapsulation = "never"
	EncapsulateCrossSubnet Encapsulation = "crosssubnet"
	EncapsulateAlways      Encapsulation = "always"
)

// ParseGranularity reads a Granularity.
func ParseGranularity(s string) (Granularity, error) {
	return parseEnum("granularity", s, GranularityLocation, GranularityFull)
}

// ParseEncapsulation reads an Encapsulation.
func ParseEncapsulation(s string) (Encapsulation, error) {
	return parseEnum("encapsulation", s, EncapsulateNever, EncapsulateCrossSubnet, EncapsulateAlways)
}

func parseEnum[T ~string](what, s string, accepted ...T) (T, error) {
	if slices.Contains(accepted, T(s)) {
		return T(s), nil
	}
	names := make([]string, len(accepted))
	for i, a := range accepted {
		names[i] = string(a)
	}
	return "", fmt.Errorf("%s %q: want one of %s", what, s, strings.Join(names, ", "))
}

// Config is what the flags say: the same on all nodes of a mesh.
type Config struct {
	Granularity   Granularity
	Encapsulation Encapsulation
	// WireGuardCIDRs are the ranges of WireGuard IPs, masked, at most one for each family.
	WireGuardCIDRs []netip.Prefix
	// ServiceCIDRs are destinations that are never masqueraded.
	ServiceCIDRs []netip.Prefix
	// ManageLocal includes the routes inside a location (--local).
	ManageLocal bool
	// ManageCNI says that Kilo is the pod network and so masquerades what leaves it (--cni).
	ManageCNI bool
	// WireGuardDev and TunnelDev name the links.
	WireGuardDev, TunnelDev string
	// MTU of the WireGuard link in bytes, 0 to follow the link of the default route.
	MTU int
}
