// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Granularity says which nodes share a tunnel.
type Granularity string

// The granularities. "location": one leader carries the traffic of each
// location. "full": every node has a tunnel to every other. "cross": every node
// has a tunnel to every node of other locations, and plain routes inside its own.
const (
	GranularityLocation Granularity = "location"
	GranularityFull     Granularity = "full"
	GranularityCross    Granularity = "cross"
)

// Encapsulation says which packets inside a location go through the tunnel link.
type Encapsulation string

// The encapsulations. "crosssubnet": only those to nodes outside the own subnet.
const (
	EncapsulateNever       Encapsulation = "never"
	EncapsulateCrossSubnet Encapsulation = "crosssubnet"
	EncapsulateAlways      Encapsulation = "always"
)

// AddOn is the pod network that Kilo is added to.
type AddOn string

// The add-on modes. With "none" Kilo does everything itself. With the others
// the pod network's own tunnel carries packets inside a location.
const (
	AddOnNone    AddOn = ""
	AddOnFlannel AddOn = "flannel"
	AddOnCilium  AddOn = "cilium"
)

// The links of the networks that Kilo is added to.
const (
	FlannelDev4     = "flannel.1"
	FlannelDev6     = "flannel-v6.1"
	CiliumDev       = "cilium_host" // carries the host's addresses in Cilium's network
	CiliumTunnelDev = "cilium_tunl"
)

// ParseAddOn reads an AddOn; "none" is as good as "".
func ParseAddOn(s string) (AddOn, error) {
	if s == "" || s == "none" {
		return AddOnNone, nil
	}
	return parseEnum("add-on mode", s, "none", AddOnFlannel, AddOnCilium)
}

// ParseTunnel reads the kind of the tunnel link inside a location: "ipip", which
// stands for ip6tnl between IPv6 addresses, or "vxlan".
func ParseTunnel(s string) (LinkKind, error) {
	return parseEnum("tunnel", s, KindIPIP, KindVXLAN)
}

// ParseGranularity reads a Granularity.
func ParseGranularity(s string) (Granularity, error) {
	return parseEnum("granularity", s, GranularityLocation, GranularityFull, GranularityCross)
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
	// Tunnel is KindIPIP (also if empty) or KindVXLAN.
	Tunnel LinkKind
	AddOn  AddOn
	// WireGuardCIDRs are the ranges of WireGuard IPs, masked, at most one for each family.
	WireGuardCIDRs []netip.Prefix
	// ServiceCIDRs are destinations that are never masqueraded.
	ServiceCIDRs []netip.Prefix
	// ManageLocal includes the routes inside a location (--local).
	ManageLocal bool
	// ManageCNI says that Kilo is the pod network and so masquerades what leaves it (--cni).
	ManageCNI bool
	// ForwardRules accepts what is forwarded for pods in the chain FORWARD of iptables;
	// of effect with ManageCNI alone (--iptables-forward-rules).
	ForwardRules bool
	// StrictEncryption drops what goes to pods of other locations, or says that it
	// comes from them, over links that no route to them leads to.
	StrictEncryption bool
	// WireGuardDev names the WireGuard link, TunnelDev the ipip link and
	// VXLANDev the vxlan link; the ip6tnl link is TunnelDev with "-6" behind it.
	WireGuardDev, TunnelDev, VXLANDev string
	// MTU of the WireGuard link in bytes, 0 to follow the link of the default route.
	MTU int
}

// Validate refuses combinations that no packet would survive, with the reason.
func (c Config) Validate() error {
	switch {
	case c.Granularity == GranularityCross && c.Encapsulation != EncapsulateNever:
		return fmt.Errorf("granularity cross with encapsulation %s: nothing is encapsulated inside a location in cross; want encapsulation never", c.Encapsulation)
	case c.AddOn == AddOnFlannel && c.Encapsulation == EncapsulateNever:
		return errors.New("add-on mode flannel with encapsulation never: Flannel's gateways are addresses that only its own tunnel reaches; want encapsulation crosssubnet or always")
	case c.AddOn != AddOnNone && c.Tunnel == KindVXLAN:
		return fmt.Errorf("add-on mode %s with tunnel vxlan: the tunnel inside a location is %s's; want tunnel ipip", c.AddOn, c.AddOn)
	case c.AddOn != AddOnNone && c.ManageCNI:
		return fmt.Errorf("add-on mode %s while managing the CNI configuration: %s is the pod network; want --cni=false", c.AddOn, c.AddOn)
	}
	return nil
}
