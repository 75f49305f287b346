// SPDX-License-Identifier: Apache-2.0

package kube

import "github.com/kilomesh/kilo/api/v1alpha1"

const prefix = v1alpha1.Group + "/"

// The annotations of a Node that users write.
const (
	// AnnotationForceEndpoint is "IPv4:port", "[IPv6]:port" or "name:port". It
	// overrides AnnotationEndpoint, and its port is the local listen port too.
	AnnotationForceEndpoint = prefix + "force-endpoint"
	// AnnotationForceInternalIP is a CIDR such as "10.1.0.2/24" or two, one of
	// each family, separated by a comma; a bare address counts as a whole
	// subnet of its own. "" and "-" say that the node has no internal IP.
	AnnotationForceInternalIP = prefix + "force-internal-ip"
	// AnnotationLeader makes the node a preferred leader of its location,
	// whatever its value, except "false" and "0".
	AnnotationLeader = prefix + "leader"
	// AnnotationLocation overrides the topology label, even when empty.
	AnnotationLocation = prefix + "location"
	// AnnotationPersistentKeepalive is in seconds, 0 to 65535.
	AnnotationPersistentKeepalive = prefix + "persistent-keepalive"
	// AnnotationAllowedLocationIPs are CIDRs or addresses, separated by commas.
	AnnotationAllowedLocationIPs = prefix + "allowed-location-ips"
)

// The annotations of a Node that Kilo writes.
const (
	// AnnotationKey is the public key in base64.
	AnnotationKey = prefix + "key"
	// AnnotationEndpoint has the form of AnnotationForceEndpoint.
	AnnotationEndpoint = prefix + "endpoint"
	// AnnotationInternalIP is a CIDR, the IPv4 one of a node with both families, "" without one.
	AnnotationInternalIP = prefix + "internal-ip"
	// AnnotationInternalIPv6 is the second CIDR of a node with both families.
	AnnotationInternalIPv6 = prefix + "internal-ipv6"
	// AnnotationWireGuardIP is the leader's address in the WireGuard CIDR with
	// the length of that CIDR, the IPv4 one if there are both families, "" on
	// other nodes.
	AnnotationWireGuardIP = prefix + "wireguard-ip"
	// AnnotationWireGuardIPv6 is the second address of a leader with both families.
	AnnotationWireGuardIPv6 = prefix + "wireguard-ipv6"
	// AnnotationLocationIP is the AnnotationWireGuardIP of the leader on the other
	// nodes of its location: their claim on it, should the leader be gone.
	AnnotationLocationIP = prefix + "location-wireguard-ip"
	// AnnotationLocationIPv6 is the second address of a location with both families.
	AnnotationLocationIPv6 = prefix + "location-wireguard-ipv6"
	// AnnotationCNICompatibilityIP is a CIDR of one address: the node's in the
	// network that Kilo is added to, the IPv4 one if there are both families.
	AnnotationCNICompatibilityIP = prefix + "cni-compatibility-ip"
	// AnnotationCNICompatibilityIPv6 is the second of a node with both families.
	AnnotationCNICompatibilityIPv6 = prefix + "cni-compatibility-ipv6"
	// AnnotationGranularity is "location", "full" or "cross".
	AnnotationGranularity = prefix + "granularity"
)

// The annotations that releases up to 0.7 wrote as well.
const (
	annotationLastSeen            = prefix + "last-seen"
	annotationDiscoveredEndpoints = prefix + "discovered-endpoints"
)

// publishedAnnotations are those that Publish is responsible for.
func publishedAnnotations() []string {
	return []string{
		AnnotationKey, AnnotationEndpoint, AnnotationInternalIP, AnnotationInternalIPv6,
		AnnotationWireGuardIP, AnnotationWireGuardIPv6,
		AnnotationLocationIP, AnnotationLocationIPv6,
		AnnotationCNICompatibilityIP, AnnotationCNICompatibilityIPv6, AnnotationGranularity,
		annotationLastSeen, annotationDiscoveredEndpoints,
	}
}
