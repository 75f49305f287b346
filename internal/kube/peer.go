// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/kilomesh/kilo/api/v1alpha1"
	"github.com/kilomesh/kilo/internal/mesh"
)

// ParsePeer reads a Peer object. It is strict: a Peer with any fault is none.
// The error joins all faults, each a mesh.Problem, and never contains the
// preshared key. AllowedIPs lose their host bits and their duplicates, in the
// order of the object. Whoever accepts Peers from users and whoever uses them
// calls this, so that both agree.
func ParsePeer(peer *v1alpha1.Peer) (mesh.Peer, error) {
	var faults []error
	refuse := func(field string, err error) bool {
		if err != nil {
			faults = append(faults, mesh.Problem{Object: peerObject(peer.Name), Field: "spec." + field, Err: err})
		}
		return err != nil
	}
	spec := &peer.Spec
	p := mesh.Peer{Name: peer.Name}

	if len(spec.AllowedIPs) == 0 {
		refuse("allowedIPs", errors.New("empty: want at least one CIDR"))
	}
	for i, s := range spec.AllowedIPs {
		ip, err := parsePrefix(s)
		if !refuse(fmt.Sprintf("allowedIPs[%d]", i), err) {
			p.AllowedIPs = appendNew(p.AllowedIPs, ip.Masked())
		}
	}
	if spec.Endpoint != nil {
		p.Endpoint = parsePeerEndpoint(spec.Endpoint, refuse)
	}
	if k := spec.PersistentKeepalive; k < 0 || k > math.MaxUint16 {
		refuse("persistentKeepalive", fmt.Errorf("%d: want seconds, 0 to %d", k, math.MaxUint16))
	} else {
		p.PersistentKeepalive = uint16(k)
	}
	var err error
	if spec.PresharedKey != "" {
		p.PresharedKey, err = mesh.ParseSecretKey(spec.PresharedKey)
		refuse("presharedKey", err)
	}
	if !refuse("publicKey", notTooLong(spec.PublicKey)) {
		p.Key, err = mesh.ParsePublicKey(spec.PublicKey)
		refuse("publicKey", err)
	}

	if len(faults) > 0 {
		return mesh.Peer{}, errors.Join(faults...)
	}
	return p, nil
}

func parsePeerEndpoint(e *v1alpha1.PeerEndpoint, refuse func(field string, err error) bool) mesh.Endpoint {
	var out mesh.Endpoint
	if e.Port < 1 || e.Port > math.MaxUint16 {
		refuse("endpoint.port", fmt.Errorf("%d: want a UDP port, 1 to %d", e.Port, math.MaxUint16))
	} else {
		out.Port = uint16(e.Port)
	}
	host := e.DNSOrIP
	switch {
	case host.DNS == "" && host.IP == "":
		refuse("endpoint.dnsOrIP", errors.New("empty: want a dns name or an ip"))
	case host.DNS != "" && host.IP != "":
		refuse("endpoint.dnsOrIP", fmt.Errorf("dns %s and ip %s: want one of the two", quote(host.DNS), quote(host.IP)))
	case host.IP != "":
		ip, err := netip.ParseAddr(host.IP)
		if err != nil || ip.Zone() != "" {
			refuse("endpoint.dnsOrIP.ip", fmt.Errorf("%s: want an IPv4 or IPv6 address", quote(host.IP)))
		}
		out.IP = ip.Unmap()
	default:
		// An IPv4 address passes for an RFC 1123 subdomain, resolves to itself,
		// and so has always worked in this field.
		if ip, err := netip.ParseAddr(host.DNS); err == nil && ip.Is4() {
			out.IP = ip
			break
		}
		if !mesh.IsDNSName(host.DNS) {
			refuse("endpoint.dnsOrIP.dns", fmt.Errorf("%s: want an RFC 1123 subdomain in lower case, such as vpn.example.com", quote(host.DNS)))
		}
		out.DNS = host.DNS
	}
	return out
}

// peerObject is how Problems call a Peer.
func peerObject(name string) string { return "peer/" + name }

// problemsOf takes apart what ParsePeer joined.
func problemsOf(err error) []mesh.Problem {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return nil
	}
	var problems []mesh.Problem
	for _, fault := range joined.Unwrap() {
		if p := (mesh.Problem{}); errors.As(fault, &p) {
			problems = append(problems, p)
		}
	}
	return problems
}
