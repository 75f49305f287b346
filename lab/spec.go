// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"
)

// Stack says which address families a lab has.
type Stack string

// The stacks.
const (
	IPv4 Stack = "4"
	IPv6 Stack = "6"
	Dual Stack = "dual"
)

// ParseStack reads "4", "6" or "dual".
func ParseStack(s string) (Stack, error) {
	if st := Stack(s); st == IPv4 || st == IPv6 || st == Dual {
		return st, nil
	}
	return "", fmt.Errorf("stack %q: want 4, 6 or dual", s)
}

// Has4 reports whether the stack has IPv4.
func (s Stack) Has4() bool { return s != IPv6 }

// Has6 reports whether the stack has IPv6.
func (s Stack) Has6() bool { return s != IPv4 }

// NAT is what the router of a cloud does with packets to the internet.
type NAT string

// The kinds of NAT.
const (
	// NATNone: the cloud's addresses are public ones, which the internet routes to its router.
	NATNone NAT = "none"
	// NATPortRestricted maps an inner port to one outer port; replies only from where packets went.
	NATPortRestricted NAT = "port-restricted"
	// NATSymmetric maps each flow to another outer port.
	NATSymmetric NAT = "symmetric"
	// NATFullCone sends all UDP that comes to the WireGuard port to one inner host, the cloud's first.
	NATFullCone NAT = "full-cone"
)

// CloudSpec is a place with hosts. Its name is also the region of its nodes.
type CloudSpec struct {
	Name string `json:"name"`
	// Network gives the cloud a network of its own, behind a router. Without
	// it the cloud's hosts have only public addresses.
	Network bool `json:"network,omitempty"`
	// NAT of the router, needed with Network.
	NAT NAT `json:"nat,omitempty"`
	// OpenInput makes the router accept unsolicited packets to itself instead of
	// dropping them. They leave conntrack entries that spoil hole punching.
	OpenInput bool `json:"openInput,omitempty"`
	// MTU of the cloud's network in bytes, 0 for 1500.
	MTU int `json:"mtu,omitempty"`
}

// HostSpec is a machine, and a Node of the cluster.
type HostSpec struct {
	// Name is the Node's too: a DNS label of at most 12 characters.
	Name  string `json:"name"`
	Cloud string `json:"cloud"`
	// Public hosts have an address on the internet. Private ones have one in
	// their cloud's network. At least one is needed. The default route of a host
	// with both leads to the internet.
	Public  bool `json:"public,omitempty"`
	Private bool `json:"private,omitempty"`
	// Annotations and Labels of the Node, beside its region.
	Annotations map[string]string `json:"annotations,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	// KgArgs are added to kg's command line, after the lab's.
	KgArgs []string `json:"kgArgs,omitempty"`
	// Pods is how many pods the host starts with; 0 is one, -1 none.
	Pods int `json:"pods,omitempty"`
}

// Spec describes a lab.
type Spec struct {
	Stack  Stack       `json:"stack"`
	Clouds []CloudSpec `json:"clouds"`
	Hosts  []HostSpec  `json:"hosts"`
	// MTU of the internet in bytes, 0 for 1500.
	MTU int `json:"mtu,omitempty"`
	// Resync is kg's --resync-period, 0 for 30 seconds.
	Resync time.Duration `json:"resync,omitempty"`
	// KgArgs are added to the command line of every kg.
	KgArgs []string `json:"kgArgs,omitempty"`
	// KernelWireGuard leaves it to kg to make WireGuard links, which are the
	// kernel's then. Else each host has one in user space before kg starts.
	KernelWireGuard bool `json:"kernelWireGuard,omitempty"`
}

// The annotations of users that specs are made of.
const (
	AnnotationLeader    = "kilo.squat.ai/leader"
	AnnotationKeepalive = "kilo.squat.ai/persistent-keepalive"
)

// Demo is the mesh of three clouds: "a" public with two nodes, "b" a private
// network of three nodes with a public leader, "c" two nodes behind NAT.
func Demo(stack Stack) Spec {
	keepalive := map[string]string{AnnotationKeepalive: "5"}
	return Spec{
		Stack: stack,
		Clouds: []CloudSpec{
			{Name: "a"},
			{Name: "b", Network: true, NAT: NATPortRestricted},
			{Name: "c", Network: true, NAT: NATPortRestricted},
		},
		Hosts: []HostSpec{
			{Name: "a1", Cloud: "a", Public: true},
			{Name: "a2", Cloud: "a", Public: true},
			{Name: "b1", Cloud: "b", Public: true, Private: true, Annotations: map[string]string{AnnotationLeader: ""}},
			{Name: "b2", Cloud: "b", Private: true},
			{Name: "b3", Cloud: "b", Private: true},
			{Name: "c1", Cloud: "c", Private: true, Annotations: keepalive},
			{Name: "c2", Cloud: "c", Private: true, Annotations: maps.Clone(keepalive)},
		},
	}
}

var nameRE = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,10}[a-z0-9])?$`)

// Validate reports everything that is wrong with s.
func (s Spec) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if _, err := ParseStack(string(s.Stack)); err != nil {
		errs = append(errs, err)
	}
	clouds := map[string]CloudSpec{}
	// The machines that the lab itself has; a cloud's router is called after it.
	names := map[string]bool{internetName: true, ControlPlaneName: true}
	for _, c := range s.Clouds {
		if !nameRE.MatchString(c.Name) {
			bad("cloud %q: want a name of 1 to 12 lower-case letters, digits and dashes", c.Name)
		}
		if _, ok := clouds[c.Name]; ok {
			bad("cloud %q: is there twice", c.Name)
		}
		clouds[c.Name] = c
		kinds := []NAT{NATNone, NATPortRestricted, NATSymmetric, NATFullCone}
		if c.Network && !slices.Contains(kinds, c.NAT) {
			bad("cloud %q: nat %q: want one of %v", c.Name, c.NAT, kinds)
		}
		if !c.Network && c.NAT != "" {
			bad("cloud %q: nat %q without a network", c.Name, c.NAT)
		}
		names[routerName(c.Name)] = true
	}
	for _, h := range s.Hosts {
		if err := h.validate(clouds, names); err != nil {
			errs = append(errs, fmt.Errorf("host %q: %w", h.Name, err))
		}
		names[h.Name] = true
	}
	return errors.Join(errs...)
}

func (h HostSpec) validate(clouds map[string]CloudSpec, taken map[string]bool) error {
	cloud, ok := clouds[h.Cloud]
	switch {
	case !nameRE.MatchString(h.Name):
		return errors.New("want a name of 1 to 12 lower-case letters, digits and dashes")
	case taken[h.Name]:
		return errors.New("the name is taken")
	case !ok:
		return fmt.Errorf("there is no cloud %q", h.Cloud)
	case !h.Public && !h.Private:
		return errors.New("want a public or a private address, or both")
	case h.Private && !cloud.Network:
		return fmt.Errorf("private, but cloud %q has no network", h.Cloud)
	}
	return nil
}

func (s Spec) cloud(name string) CloudSpec {
	i := slices.IndexFunc(s.Clouds, func(c CloudSpec) bool { return c.Name == name })
	return s.Clouds[i]
}

// ControlPlaneName is the machine of etcd and kube-apiserver.
const ControlPlaneName = "control"

const internetName = "internet"

func routerName(cloud string) string { return cloud + "-router" }
