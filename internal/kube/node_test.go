// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/kilomesh/kilo/internal/mesh"
)

const (
	topologyLabel = "topology.kubernetes.io/region"
	keyA          = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE="
	keyB          = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI="
)

// compare knows the comparable types of netip, and nil slices as empty ones.
func compare() cmp.Options {
	return cmp.Options{
		cmpopts.EquateEmpty(),
		cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
		cmp.Comparer(func(a, b mesh.SecretKey) bool { return a == b }),
		cmp.Comparer(func(a, b error) bool { return a.Error() == b.Error() }),
	}
}

type annotations = map[string]string

func testNode(a annotations) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: a}}
}

func mustEndpoint(t testing.TB, s string) mesh.Endpoint {
	t.Helper()
	e, err := mesh.ParseEndpoint(s)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// testKey is keyA.
func testKey(t testing.TB) mesh.PublicKey {
	t.Helper()
	k, err := mesh.ParsePublicKey(keyA)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func prefixes(ss ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range ss {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func addrs(ss ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range ss {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

// nodeCase is what ParseNode makes of a Node; nil checks nothing of it.
type nodeCase struct {
	name        string
	annotations annotations
	labels      map[string]string
	podCIDR     string
	podCIDRs    []string
	want        mesh.Node
	// problems are pairs: the field, and a part of the message.
	problems []string
	declared func(t *testing.T, d mesh.Declared)
}

func runNodeCases(t *testing.T, cases []nodeCase) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			node := testNode(c.annotations)
			node.Labels, node.Spec.PodCIDR, node.Spec.PodCIDRs = c.labels, c.podCIDR, c.podCIDRs
			before := node.DeepCopy()
			got, declared, problems := ParseNode(node, topologyLabel)
			c.want.Name = "n"
			if diff := cmp.Diff(c.want, got, compare()); diff != "" {
				t.Errorf("node (-want +got):\n%s", diff)
			}
			checkProblems(t, "node/n", c.problems, problems)
			if c.declared != nil {
				c.declared(t, declared)
			}
			if diff := cmp.Diff(before, node); diff != "" {
				t.Errorf("ParseNode changed the Node:\n%s", diff)
			}
		})
	}
}

func checkProblems(t *testing.T, object string, want []string, got []mesh.Problem) {
	t.Helper()
	if len(got) != len(want)/2 {
		t.Errorf("got %d problems %v, want %d", len(got), got, len(want)/2)
		return
	}
	for i, p := range got {
		if p.Object != object || p.Field != want[2*i] || !strings.Contains(p.Err.Error(), want[2*i+1]) {
			t.Errorf("problem %q: want one of %s in %s that says %q", p, object, want[2*i], want[2*i+1])
		}
		if !strings.Contains(p.Err.Error(), "want ") {
			t.Errorf("problem %q does not say what would be accepted", p)
		}
	}
}

// TestParseNode has the cases that the existing Kilo is tested with.
func TestParseNode(t *testing.T) {
	e4, e6 := mustEndpoint(t, "10.0.0.1:51820"), mustEndpoint(t, "[ff10::10]:51820")
	runNodeCases(t, []nodeCase{
		{name: "empty"},
		{
			name:        "endpoint without port and bad IP",
			annotations: annotations{AnnotationEndpoint: "10.0.0.1", AnnotationInternalIP: "foo"},
			problems:    []string{AnnotationEndpoint, `"10.0.0.1": no port`, AnnotationInternalIP, `"foo"`},
		},
		{
			name:        "valid IPv4",
			annotations: annotations{AnnotationEndpoint: "10.0.0.1:51820", AnnotationInternalIP: "10.0.0.1/32"},
			want:        mesh.Node{Endpoint: e4, InternalIPs: prefixes("10.0.0.1/32")},
		},
		{
			name:        "valid IPv6",
			annotations: annotations{AnnotationEndpoint: "[ff10::10]:51820", AnnotationInternalIP: "ff60::10/64"},
			want:        mesh.Node{Endpoint: e6, InternalIPs: prefixes("ff60::10/64")},
		},
		{name: "bad pod CIDR", podCIDR: "foo", problems: []string{"spec.podCIDR", `"foo"`}},
		{name: "pod CIDR loses host bits", podCIDR: "10.2.0.1/24", want: mesh.Node{PodCIDRs: prefixes("10.2.0.0/24")}},
		{name: "valid pod CIDR", podCIDR: "10.2.1.0/24", want: mesh.Node{PodCIDRs: prefixes("10.2.1.0/24")}},
		{name: "region label", labels: map[string]string{topologyLabel: "a"}, want: mesh.Node{Location: "a"}},
		{
			name:        "location overrides label",
			labels:      map[string]string{topologyLabel: "a"},
			annotations: annotations{AnnotationLocation: "b"},
			want:        mesh.Node{Location: "b"},
		},
		{
			name:        "bad force-endpoint falls back",
			annotations: annotations{AnnotationEndpoint: "10.0.0.1:51820", AnnotationForceEndpoint: "-10.0.0.2:51821"},
			want:        mesh.Node{Endpoint: e4},
			problems:    []string{AnnotationForceEndpoint, `"-10.0.0.2:51821"`},
		},
		{
			name:        "good force-endpoint overrides",
			annotations: annotations{AnnotationEndpoint: "10.0.0.2:51821", AnnotationForceEndpoint: "10.0.0.1:51820"},
			want:        mesh.Node{Endpoint: e4},
			declared: func(t *testing.T, d mesh.Declared) {
				if d.ForceEndpoint != e4 {
					t.Errorf("declared endpoint %v, want %v", d.ForceEndpoint, e4)
				}
			},
		},
		{
			name:        "persistent keepalive",
			annotations: annotations{AnnotationPersistentKeepalive: "25"},
			want:        mesh.Node{PersistentKeepalive: 25},
		},
		{
			name:        "bad force-internal-ip falls back",
			annotations: annotations{AnnotationInternalIP: "10.1.0.1/24", AnnotationForceInternalIP: "-10.1.0.2/24"},
			want:        mesh.Node{InternalIPs: prefixes("10.1.0.1/24")},
			problems:    []string{AnnotationForceInternalIP, `"-10.1.0.2/24"`},
		},
		{
			name:        "good force-internal-ip overrides",
			annotations: annotations{AnnotationInternalIP: "10.1.0.1/24", AnnotationForceInternalIP: "10.1.0.2/24"},
			want:        mesh.Node{InternalIPs: prefixes("10.1.0.2/24")},
			declared: func(t *testing.T, d mesh.Declared) {
				if diff := cmp.Diff(prefixes("10.1.0.2/24"), d.ForceInternalIPs, compare()); diff != "" {
					t.Errorf("declared (-want +got):\n%s", diff)
				}
			},
		},
		{name: "times of earlier releases are not read", annotations: annotations{annotationLastSeen: "foo"}},
		{
			name: "complete",
			annotations: annotations{
				AnnotationEndpoint: "10.0.0.2:51821", AnnotationForceEndpoint: "10.0.0.1:51820", AnnotationForceInternalIP: "10.1.0.2/32",
				AnnotationInternalIP: "10.1.0.1/32", AnnotationKey: keyA, annotationLastSeen: "1000000000", AnnotationLeader: "",
				AnnotationLocation: "b", AnnotationPersistentKeepalive: "25", AnnotationWireGuardIP: "10.4.0.1/16",
			},
			labels:  map[string]string{topologyLabel: "a"},
			podCIDR: "10.2.1.0/24",
			want: mesh.Node{
				Endpoint: e4, InternalIPs: prefixes("10.1.0.2/32"), Key: testKey(t), WantsLead: true, Location: "b",
				PersistentKeepalive: 25, PodCIDRs: prefixes("10.2.1.0/24"), WireGuardIPs: addrs("10.4.0.1"),
			},
		},
		{
			name: "complete IPv6",
			annotations: annotations{
				AnnotationEndpoint: "10.0.0.2:51821", AnnotationForceEndpoint: "[ff10::10]:51820", AnnotationForceInternalIP: "ff60::10/64",
				AnnotationInternalIP: "10.1.0.1/32", AnnotationKey: keyA, AnnotationLeader: "", AnnotationLocation: "b",
				AnnotationWireGuardIP: "10.4.0.1/16",
			},
			podCIDR: "10.2.1.0/24",
			want: mesh.Node{
				Endpoint: e6, InternalIPs: prefixes("ff60::10/64"), Key: testKey(t), WantsLead: true, Location: "b",
				PodCIDRs: prefixes("10.2.1.0/24"), WireGuardIPs: addrs("10.4.0.1"),
			},
		},
		{name: "empty internal-ip", annotations: annotations{AnnotationInternalIP: ""}},
		{
			name:        "empty force-internal-ip means none",
			annotations: annotations{AnnotationInternalIP: "10.1.0.1/24", AnnotationForceInternalIP: ""},
			declared:    noInternalIP,
		},
	})
}

func noInternalIP(t *testing.T, d mesh.Declared) {
	t.Helper()
	if !d.NoInternalIP {
		t.Error("NoInternalIP is false")
	}
}

// TestParseNodeLessons has the inputs that the existing Kilo read wrongly or in silence.
func TestParseNodeLessons(t *testing.T) {
	runNodeCases(t, []nodeCase{
		{name: "L8 leader false does not lead", annotations: annotations{AnnotationLeader: "false"}},
		{name: "L8 leader False does not lead", annotations: annotations{AnnotationLeader: " False "}},
		{name: "L8 leader 0 does not lead", annotations: annotations{AnnotationLeader: "0"}},
		{name: "leader true leads", annotations: annotations{AnnotationLeader: "true"}, want: mesh.Node{WantsLead: true}},
		{
			name:        "empty location overrides label",
			labels:      map[string]string{topologyLabel: "a"},
			annotations: annotations{AnnotationLocation: ""},
		},
		{
			name: "L9 allowed-location-ips takes spaces and addresses, masks, and drops bad entries alone",
			annotations: annotations{
				AnnotationAllowedLocationIPs: "10.1.0.0/16, 10.2.0.7/16 ,10.3.0.1,nonsense, fd00::1,10.1.9.9/16,::ffff:10.9.0.0/112,10.0.0.0/33,",
			},
			want: mesh.Node{AllowedLocationIPs: prefixes("10.1.0.0/16", "10.2.0.0/16", "10.3.0.1/32", "fd00::1/128", "10.9.0.0/16")},
			problems: []string{
				AnnotationAllowedLocationIPs, `"nonsense"`,
				AnnotationAllowedLocationIPs, `"10.0.0.0/33"`,
			},
		},
		{name: "empty allowed-location-ips are none", annotations: annotations{AnnotationAllowedLocationIPs: " "}},
		{
			name:        "L10 bare force-internal-ip is a subnet of its own",
			annotations: annotations{AnnotationForceInternalIP: "10.0.0.5"},
			want:        mesh.Node{InternalIPs: prefixes("10.0.0.5/32")},
		},
		{
			name:        "force-internal-ip of both families",
			annotations: annotations{AnnotationForceInternalIP: "10.0.0.5/24, fd00::5"},
			want:        mesh.Node{InternalIPs: prefixes("10.0.0.5/24", "fd00::5/128")},
		},
		{
			name:        "second force-internal-ip of a family is refused alone",
			annotations: annotations{AnnotationForceInternalIP: "10.0.0.5/24,10.0.0.6/24"},
			want:        mesh.Node{InternalIPs: prefixes("10.0.0.5/24")},
			problems:    []string{AnnotationForceInternalIP, "10.0.0.6/24"},
		},
		{
			name:        "force-internal-ip - means none",
			annotations: annotations{AnnotationForceInternalIP: "-", AnnotationInternalIP: "10.0.0.5/24"},
			declared:    noInternalIP,
		},
		{
			name:        "force-internal-ip with a comma alone falls back",
			annotations: annotations{AnnotationForceInternalIP: ",", AnnotationInternalIP: "10.0.0.5/24"},
			want:        mesh.Node{InternalIPs: prefixes("10.0.0.5/24")},
			problems:    []string{AnnotationForceInternalIP, `","`},
		},
		{
			name:        "force-internal-ip has no zone",
			annotations: annotations{AnnotationForceInternalIP: "fe80::1%eth0"},
			problems:    []string{AnnotationForceInternalIP, `"fe80::1%eth0"`},
		},
		{
			name:        "L11 negative keepalive",
			annotations: annotations{AnnotationPersistentKeepalive: "-5"},
			problems:    []string{AnnotationPersistentKeepalive, `"-5"`},
		},
		{
			name:        "keepalive beyond the kernel's limit",
			annotations: annotations{AnnotationPersistentKeepalive: "65536"},
			problems:    []string{AnnotationPersistentKeepalive, `"65536"`},
		},
		{
			name:        "keepalive with a unit",
			annotations: annotations{AnnotationPersistentKeepalive: "25s"},
			problems:    []string{AnnotationPersistentKeepalive, `"25s"`},
		},
		{name: "L78 both pod CIDRs", podCIDR: "10.2.1.0/24", podCIDRs: []string{"10.2.1.0/24", "fd00:2::1/64"}, want: mesh.Node{PodCIDRs: prefixes("10.2.1.0/24", "fd00:2::/64")}},
		{
			name:     "second pod CIDR of a family",
			podCIDRs: []string{"10.2.1.0/24", "10.2.2.0/24"},
			want:     mesh.Node{PodCIDRs: prefixes("10.2.1.0/24")},
			problems: []string{"spec.podCIDRs", "10.2.2.0/24"},
		},
		{
			name:        "published addresses of both families",
			annotations: annotations{AnnotationInternalIP: "10.0.0.5/24", AnnotationInternalIPv6: "fd00::5/64", AnnotationWireGuardIP: "10.4.0.1/16", AnnotationWireGuardIPv6: "fd04::1/64"},
			want:        mesh.Node{InternalIPs: prefixes("10.0.0.5/24", "fd00::5/64"), WireGuardIPs: addrs("10.4.0.1", "fd04::1")},
		},
		{
			name:        "published address in the annotation of the other family",
			annotations: annotations{AnnotationInternalIPv6: "10.0.0.5/24"},
			problems:    []string{AnnotationInternalIPv6, `"10.0.0.5/24"`},
		},
		{
			name:        "two published addresses of one family",
			annotations: annotations{AnnotationWireGuardIP: "fd04::1/64", AnnotationWireGuardIPv6: "fd04::2/64"},
			want:        mesh.Node{WireGuardIPs: addrs("fd04::1")},
			problems:    []string{AnnotationWireGuardIPv6, "fd04::2/64"},
		},
		{
			name:        "IPv4-mapped addresses are IPv4",
			annotations: annotations{AnnotationInternalIP: "::ffff:10.0.0.5/120", AnnotationEndpoint: "[::ffff:10.0.0.1]:51820"},
			want:        mesh.Node{InternalIPs: prefixes("10.0.0.5/24"), Endpoint: mustEndpoint(t, "10.0.0.1:51820")},
		},
		{
			name:        "IPv4-mapped prefix shorter than the mapping",
			annotations: annotations{AnnotationInternalIP: "::ffff:10.0.0.5/90"},
			problems:    []string{AnnotationInternalIP, `"::ffff:10.0.0.5/90"`},
		},
		{name: "bad key is none", annotations: annotations{AnnotationKey: "foo"}, problems: []string{AnnotationKey, `"foo"`}},
		{
			name:        "zero key is none",
			annotations: annotations{AnnotationKey: "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="},
			problems:    []string{AnnotationKey, "zero"},
		},
		{
			name:        "withdrawn values are none",
			annotations: annotations{AnnotationKey: "", AnnotationEndpoint: "", AnnotationWireGuardIP: "", AnnotationInternalIP: ""},
		},
		{
			name:        "endless values are cut in messages",
			annotations: annotations{AnnotationKey: strings.Repeat("k", 1<<18), AnnotationEndpoint: strings.Repeat("e", 1<<18)},
			problems:    []string{AnnotationKey, `k"...`, AnnotationEndpoint, `e"...`},
		},
		{
			name:        "endpoint with a name",
			annotations: annotations{AnnotationForceEndpoint: "vpn.example.com:51821"},
			want:        mesh.Node{Endpoint: mesh.Endpoint{DNS: "vpn.example.com", Port: 51821}},
		},
	})
}

// TestParseNodeDeclared: what Kilo publishes itself is no declaration.
func TestParseNodeDeclared(t *testing.T) {
	node := testNode(annotations{
		AnnotationKey: keyA, AnnotationEndpoint: "192.0.2.1:51820", AnnotationInternalIP: "10.0.0.5/24",
		AnnotationWireGuardIP: "10.4.0.1/16", AnnotationLeader: "yes", AnnotationPersistentKeepalive: "5",
	})
	node.Status.Addresses = []corev1.NodeAddress{
		{Type: corev1.NodeHostName, Address: "10.9.9.9"},
		{Type: corev1.NodeInternalIP, Address: "10.0.0.5"},
		{Type: corev1.NodeExternalIP, Address: "a.example.com"},
		{Type: corev1.NodeInternalIP, Address: "fd00::5"},
		{Type: corev1.NodeInternalIP, Address: "::ffff:10.0.0.5"},
		{Type: corev1.NodeInternalIP, Address: "fe80::5%eth0"},
		{Type: corev1.NodeExternalIP, Address: "192.0.2.1"},
		{Type: corev1.NodeExternalDNS, Address: "192.0.2.2"},
	}
	_, got, problems := ParseNode(node, topologyLabel)
	want := mesh.Declared{
		Node:        mesh.Node{Name: "n", WantsLead: true, PersistentKeepalive: 5, WireGuardIPs: addrs("10.4.0.1")},
		InternalIPs: addrs("10.0.0.5", "fd00::5"),
		ExternalIPs: addrs("192.0.2.1"),
	}
	if diff := cmp.Diff(want, got, compare()); diff != "" {
		t.Errorf("declared (-want +got):\n%s", diff)
	}
	if len(problems) > 0 {
		t.Errorf("problems: %v", problems)
	}
}

// Clocks of other hosts decide nothing: a heartbeat from the future does not keep
// a node in the mesh, and one from the past does not cut it off (L12).
func TestOtherHostsClocksChangeNothing(t *testing.T) {
	want, _, _ := ParseNode(testNode(annotations{AnnotationKey: keyA}), topologyLabel)
	for _, seen := range []string{"0", "1", "99999999999999", "-5", "never"} {
		got, _, problems := ParseNode(testNode(annotations{AnnotationKey: keyA, annotationLastSeen: seen}), topologyLabel)
		if !reflect.DeepEqual(got, want) || len(problems) > 0 {
			t.Errorf("last seen %s: %+v, problems %v; want %+v", seen, got, problems, want)
		}
	}
}
