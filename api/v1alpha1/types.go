// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Peer is a WireGuard participant that is not a Node: a laptop, a router,
// another cluster.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,path=peers,singular=peer,shortName=kp
// +kubebuilder:printcolumn:name="Public-Key",type=string,JSONPath=`.spec.publicKey`
// +kubebuilder:printcolumn:name="Endpoint-IP",type=string,JSONPath=`.spec.endpoint.dnsOrIP.ip`
// +kubebuilder:printcolumn:name="Endpoint-DNS",type=string,JSONPath=`.spec.endpoint.dnsOrIP.dns`
// +kubebuilder:printcolumn:name="Port",type=integer,JSONPath=`.spec.endpoint.port`
// +kubebuilder:printcolumn:name="Allowed-IPs",type=string,JSONPath=`.spec.allowedIPs`
// +kubebuilder:printcolumn:name="Keepalive",type=integer,JSONPath=`.spec.persistentKeepalive`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Peer struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is how the nodes reach the peer, and what they let through.
	Spec PeerSpec `json:"spec"`
}

// PeerSpec is how the nodes reach a peer, and what they let through.
type PeerSpec struct {
	// AllowedIPs are the CIDRs that lie behind the peer: packets to them are
	// sent to it, and packets from them are accepted from it. A CIDR belongs to
	// one peer only.
	AllowedIPs []string `json:"allowedIPs"`
	// Endpoint is where the nodes find the peer. Without one they wait for the
	// peer to find them.
	// +optional
	Endpoint *PeerEndpoint `json:"endpoint,omitempty"`
	// PersistentKeepalive is the interval in seconds, 0 to 65535, in which
	// empty packets keep a NAT mapping open. 0 turns it off.
	// +optional
	PersistentKeepalive int `json:"persistentKeepalive,omitempty"`
	// PresharedKey is an additional symmetric key, the base64 form of 32 bytes.
	// +optional
	PresharedKey string `json:"presharedKey,omitempty"`
	// PublicKey is the WireGuard public key, the base64 form of 32 bytes.
	PublicKey string `json:"publicKey"`
}

// PeerEndpoint is where the nodes find a peer.
type PeerEndpoint struct {
	// DNSOrIP is the host: a DNS name or an IP address.
	DNSOrIP DNSOrIP `json:"dnsOrIP"`
	// Port is a UDP port, 1 to 65535.
	Port uint32 `json:"port"`
}

// DNSOrIP is a DNS name or an IP address, one of the two.
type DNSOrIP struct {
	// DNS is an RFC 1123 subdomain, in lower case.
	// +optional
	DNS string `json:"dns,omitempty"`
	// IP is an IPv4 or IPv6 address.
	// +optional
	IP string `json:"ip,omitempty"`
}

// PeerList is a list of Peers.
//
// +kubebuilder:object:root=true
type PeerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	// Items are the Peers of the list.
	Items []Peer `json:"items"`
}
