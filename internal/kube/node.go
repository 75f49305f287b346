// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kilomesh/kilo/internal/mesh"
)

// ParseNode reads a Node object: as the others see it, what users and
// Kubernetes alone say of it, and a Problem for each value that cannot be read.
// The node goes on without such a value, or with the one it overrides.
// topologyLabel names the label that holds the location of a node without the
// annotation. ParseNode is pure and keeps nothing of node.
func ParseNode(node *corev1.Node, topologyLabel string) (mesh.Node, mesh.Declared, []mesh.Problem) {
	p := &nodeParser{node: node}
	n := mesh.Node{
		Name:                node.Name,
		Location:            p.location(topologyLabel),
		WantsLead:           p.wantsLead(),
		PodCIDRs:            p.podCIDRs(),
		PersistentKeepalive: p.persistentKeepalive(),
		AllowedLocationIPs:  p.allowedLocationIPs(),
		WireGuardIPs:        p.addrs(AnnotationWireGuardIP, AnnotationWireGuardIPv6),
		LocationIPs:         p.addrs(AnnotationLocationIP, AnnotationLocationIPv6),
		CNICompatibilityIPs: p.addrs(AnnotationCNICompatibilityIP, AnnotationCNICompatibilityIPv6),
	}
	d := mesh.Declared{
		Node:          n,
		ForceEndpoint: p.endpoint(AnnotationForceEndpoint),
		InternalIPs:   p.statusAddresses(corev1.NodeInternalIP),
		ExternalIPs:   p.statusAddresses(corev1.NodeExternalIP),
	}
	d.ForceInternalIPs, d.NoInternalIP = p.forceInternalIPs()

	n.Key = p.key()
	v, _ := p.annotation(AnnotationGranularity)
	n.Granularity, _ = mesh.ParseGranularity(v) // that of a later release is none that we know
	n.Endpoint = d.ForceEndpoint
	if !n.Endpoint.IsValid() {
		n.Endpoint = p.endpoint(AnnotationEndpoint)
	}
	n.InternalIPs = d.ForceInternalIPs
	if len(n.InternalIPs) == 0 && !d.NoInternalIP {
		n.InternalIPs = p.published(AnnotationInternalIP, AnnotationInternalIPv6)
	}
	return n, d, p.problems
}

// nodeParser collects the Problems of one Node.
type nodeParser struct {
	node     *corev1.Node
	problems []mesh.Problem
}

// refuse records err, if there is one, and reports whether there is.
func (p *nodeParser) refuse(field string, err error) bool {
	if err != nil {
		p.problems = append(p.problems, mesh.Problem{Object: "node/" + p.node.Name, Field: field, Err: err})
	}
	return err != nil
}

// annotation returns the trimmed value; ok is false without the annotation.
func (p *nodeParser) annotation(key string) (value string, ok bool) {
	value, ok = p.node.Annotations[key]
	return strings.TrimSpace(value), ok
}

func (p *nodeParser) location(topologyLabel string) string {
	if l, ok := p.node.Annotations[AnnotationLocation]; ok {
		return l
	}
	return p.node.Labels[topologyLabel]
}

func (p *nodeParser) wantsLead() bool {
	v, ok := p.annotation(AnnotationLeader)
	return ok && v != "0" && !strings.EqualFold(v, "false")
}

func (p *nodeParser) persistentKeepalive() uint16 {
	v, ok := p.annotation(AnnotationPersistentKeepalive)
	if !ok {
		return 0
	}
	seconds, err := strconv.ParseUint(v, 10, 16)
	if err != nil {
		p.refuse(AnnotationPersistentKeepalive, fmt.Errorf("keepalive %s: want whole seconds, 0 to 65535", quote(v)))
		return 0
	}
	return uint16(seconds)
}

func (p *nodeParser) allowedLocationIPs() []netip.Prefix {
	v, _ := p.annotation(AnnotationAllowedLocationIPs)
	var ips []netip.Prefix
	for _, entry := range entries(v) {
		ip, err := parsePrefixOrAddr(entry)
		if !p.refuse(AnnotationAllowedLocationIPs, err) {
			ips = appendNew(ips, ip.Masked())
		}
	}
	return ips
}

func (p *nodeParser) podCIDRs() []netip.Prefix {
	field, values := "spec.podCIDRs", p.node.Spec.PodCIDRs
	if len(values) == 0 && p.node.Spec.PodCIDR != "" {
		field, values = "spec.podCIDR", []string{p.node.Spec.PodCIDR}
	}
	var cidrs []netip.Prefix
	for _, v := range values {
		cidr, err := parsePrefix(v)
		if err == nil {
			err = otherFamily(cidrs, cidr)
		}
		if !p.refuse(field, err) {
			cidrs = append(cidrs, cidr.Masked())
		}
	}
	return cidrs
}

// endpoint reads an annotation that holds an endpoint. Kilo's own may be empty.
func (p *nodeParser) endpoint(key string) mesh.Endpoint {
	v, ok := p.annotation(key)
	if !ok || v == "" && key == AnnotationEndpoint {
		return mesh.Endpoint{}
	}
	if p.refuse(key, notTooLong(v)) {
		return mesh.Endpoint{}
	}
	e, err := mesh.ParseEndpoint(v)
	p.refuse(key, err)
	return e
}

func (p *nodeParser) key() mesh.PublicKey {
	v, _ := p.annotation(AnnotationKey)
	if v == "" || p.refuse(AnnotationKey, notTooLong(v)) {
		return mesh.PublicKey{}
	}
	k, err := mesh.ParsePublicKey(v)
	p.refuse(AnnotationKey, err)
	return k
}

// forceInternalIPs returns none and false if the annotation says nothing that can be read.
func (p *nodeParser) forceInternalIPs() (ips []netip.Prefix, none bool) {
	v, ok := p.annotation(AnnotationForceInternalIP)
	switch {
	case !ok:
		return nil, false
	case v == "" || v == "-":
		return nil, true
	}
	list := entries(v)
	if len(list) == 0 {
		p.refuse(AnnotationForceInternalIP, fmt.Errorf("internal IP %s: want an address in CIDR notation, one for each family, or \"-\" for none", quote(v)))
	}
	for _, entry := range list {
		ip, err := parsePrefixOrAddr(entry)
		if err == nil {
			err = otherFamily(ips, ip)
		}
		if !p.refuse(AnnotationForceInternalIP, err) {
			ips = append(ips, ip)
		}
	}
	return ips, false
}

// addrs is published without the prefix lengths.
func (p *nodeParser) addrs(key, key6 string) []netip.Addr {
	var ips []netip.Addr
	for _, ip := range p.published(key, key6) {
		ips = append(ips, ip.Addr())
	}
	return ips
}

// published reads the pair of annotations in which Kilo publishes addresses:
// key holds the only one or the IPv4 one, key6 the IPv6 one beside it.
func (p *nodeParser) published(key, key6 string) []netip.Prefix {
	var ips []netip.Prefix
	for _, k := range []string{key, key6} {
		v, _ := p.annotation(k)
		if v == "" {
			continue
		}
		ip, err := parsePrefix(v)
		if err == nil && k == key6 && !ip.Addr().Is6() {
			err = fmt.Errorf("CIDR %s: want an IPv6 one", quote(v))
		}
		if err == nil {
			err = otherFamily(ips, ip)
		}
		if !p.refuse(k, err) {
			ips = append(ips, ip)
		}
	}
	return ips
}

// statusAddresses leaves out what is no IP address: names are allowed there.
func (p *nodeParser) statusAddresses(kind corev1.NodeAddressType) []netip.Addr {
	var ips []netip.Addr
	for _, a := range p.node.Status.Addresses {
		if a.Type != kind {
			continue
		}
		if ip, err := netip.ParseAddr(a.Address); err == nil && ip.Zone() == "" {
			ips = appendNew(ips, ip.Unmap())
		}
	}
	return ips
}

// otherFamily refuses ip if list has one of its family.
func otherFamily(list []netip.Prefix, ip netip.Prefix) error {
	for _, p := range list {
		if p.Addr().Is4() == ip.Addr().Is4() {
			return fmt.Errorf("%s: want at most one of each address family, and %s is there already", ip, p)
		}
	}
	return nil
}
