// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/kilomesh/kilo/api/v1alpha1"
	"github.com/kilomesh/kilo/internal/mesh"
)

// testPeer returns a good Peer with the changes that change makes.
func testPeer(change func(s *v1alpha1.PeerSpec)) *v1alpha1.Peer {
	p := &v1alpha1.Peer{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec:       v1alpha1.PeerSpec{AllowedIPs: []string{"10.5.0.1/32"}, PublicKey: keyA},
	}
	if change != nil {
		change(&p.Spec)
	}
	return p
}

func endpointOf(dns, ip string, port uint32) *v1alpha1.PeerEndpoint {
	return &v1alpha1.PeerEndpoint{DNSOrIP: v1alpha1.DNSOrIP{DNS: dns, IP: ip}, Port: port}
}

// TestParsePeer has the cases that the existing Kilo is tested with, and those
// that it accepted and should not have.
func TestParsePeer(t *testing.T) {
	psk, err := mesh.ParseSecretKey(keyB)
	if err != nil {
		t.Fatal(err)
	}
	good := mesh.Peer{Name: "p", Key: testKey(t), AllowedIPs: prefixes("10.5.0.1/32")}
	for _, c := range []struct {
		name   string
		change func(s *v1alpha1.PeerSpec)
		want   func(p *mesh.Peer)
		// faults are pairs: the field, and a part of the message.
		faults []string
	}{
		{name: "good"},
		{
			name:   "empty",
			change: func(s *v1alpha1.PeerSpec) { *s = v1alpha1.PeerSpec{} },
			faults: []string{"spec.allowedIPs", "at least one", "spec.publicKey", `""`},
		},
		{
			name:   "invalid allowed IPs name their place",
			change: func(s *v1alpha1.PeerSpec) { s.AllowedIPs = []string{"10.5.0.1", "foo", "10.5.0.2/24"} },
			faults: []string{"spec.allowedIPs[0]", `"10.5.0.1"`, "spec.allowedIPs[1]", `"foo"`},
		},
		{
			name:   "L6 L37 allowed IPs lose host bits and duplicates",
			change: func(s *v1alpha1.PeerSpec) { s.AllowedIPs = []string{"10.5.0.1/24", "10.5.0.2/24", "fd05::1/64"} },
			want:   func(p *mesh.Peer) { p.AllowedIPs = prefixes("10.5.0.0/24", "fd05::/64") },
		},
		{
			name:   "IPv4-mapped allowed IP is IPv4",
			change: func(s *v1alpha1.PeerSpec) { s.AllowedIPs = []string{"::ffff:10.5.0.1/120"} },
			want:   func(p *mesh.Peer) { p.AllowedIPs = prefixes("10.5.0.0/24") },
		},
		{
			name:   "bad endpoint IP",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("", "foo", 51820) },
			faults: []string{"spec.endpoint.dnsOrIP.ip", `"foo"`},
		},
		{
			name:   "endpoint IP with zone",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("", "fe80::1%eth0", 51820) },
			faults: []string{"spec.endpoint.dnsOrIP.ip", `"fe80::1%eth0"`},
		},
		{
			name:   "L18 endpoint with a port only",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("", "", 51820) },
			faults: []string{"spec.endpoint.dnsOrIP", "dns name or an ip"},
		},
		{
			name:   "endpoint IPv4",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("", "10.0.0.1", 51820) },
			want:   func(p *mesh.Peer) { p.Endpoint = mustEndpoint(t, "10.0.0.1:51820") },
		},
		{
			name:   "endpoint IPv6",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("", "ff60::2", 51820) },
			want:   func(p *mesh.Peer) { p.Endpoint = mustEndpoint(t, "[ff60::2]:51820") },
		},
		{
			name:   "endpoint DNS",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("example.com", "", 51820) },
			want:   func(p *mesh.Peer) { p.Endpoint = mustEndpoint(t, "example.com:51820") },
		},
		{
			name:   "endpoint IPv4 in the place of a name",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("10.0.0.1", "", 51820) },
			want:   func(p *mesh.Peer) { p.Endpoint = mustEndpoint(t, "10.0.0.1:51820") },
		},
		{
			name:   "endpoint with a bad name",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("Example_com", "", 51820) },
			faults: []string{"spec.endpoint.dnsOrIP.dns", `"Example_com"`},
		},
		{
			name:   "L24 endpoint with name and address",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("example.com", "10.0.0.1", 51820) },
			faults: []string{"spec.endpoint.dnsOrIP", "one of the two"},
		},
		{
			name:   "endpoint without a port",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("example.com", "", 0) },
			faults: []string{"spec.endpoint.port", "0: "},
		},
		{
			name:   "endpoint port beyond 65535",
			change: func(s *v1alpha1.PeerSpec) { s.Endpoint = endpointOf("example.com", "", 65536) },
			faults: []string{"spec.endpoint.port", "65536: "},
		},
		{
			name:   "L23 zero key",
			change: func(s *v1alpha1.PeerSpec) { s.PublicKey = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=" },
			faults: []string{"spec.publicKey", "zero"},
		},
		{
			name:   "key of the wrong length",
			change: func(s *v1alpha1.PeerSpec) { s.PublicKey = "AQEB" },
			faults: []string{"spec.publicKey", `"AQEB"`},
		},
		{
			name:   "L23 negative keepalive is printed as a number",
			change: func(s *v1alpha1.PeerSpec) { s.PersistentKeepalive = -1 },
			faults: []string{"spec.persistentKeepalive", "-1: "},
		},
		{
			name:   "L23 keepalive beyond the kernel's limit",
			change: func(s *v1alpha1.PeerSpec) { s.PersistentKeepalive = 100000 },
			faults: []string{"spec.persistentKeepalive", "100000: "},
		},
		{
			name:   "R12 keepalive is in seconds",
			change: func(s *v1alpha1.PeerSpec) { s.PersistentKeepalive = 10 },
			want:   func(p *mesh.Peer) { p.PersistentKeepalive = 10 },
		},
		{
			name:   "preshared key",
			change: func(s *v1alpha1.PeerSpec) { s.PresharedKey = keyB },
			want:   func(p *mesh.Peer) { p.PresharedKey = psk },
		},
		{
			name:   "L23 bad preshared key leaves the peer out, and is not shown",
			change: func(s *v1alpha1.PeerSpec) { s.PresharedKey = "hunter2" },
			faults: []string{"spec.presharedKey", "(hidden)"},
		},
		{
			name: "all faults at once",
			change: func(s *v1alpha1.PeerSpec) {
				*s = v1alpha1.PeerSpec{Endpoint: endpointOf("", "", 0), PersistentKeepalive: 1 << 20, PresharedKey: "hunter2"}
			},
			faults: []string{
				"spec.allowedIPs", "", "spec.endpoint.port", "", "spec.endpoint.dnsOrIP", "",
				"spec.persistentKeepalive", "", "spec.presharedKey", "", "spec.publicKey", "",
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParsePeer(testPeer(c.change))
			if c.faults != nil {
				if err == nil {
					t.Fatal("accepted")
				}
				if strings.Contains(err.Error(), "hunter2") {
					t.Errorf("error shows the preshared key: %v", err)
				}
				checkProblems(t, "peer/p", c.faults, problemsOf(err))
				if diff := cmp.Diff(mesh.Peer{}, got, compare()); diff != "" {
					t.Errorf("a peer beside the error (-want +got):\n%s", diff)
				}
				return
			}
			want := good
			if c.want != nil {
				c.want(&want)
			}
			if diff := cmp.Diff(want, got, compare()); diff != "" || err != nil {
				t.Errorf("error %v, peer (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestParsePeerErrorNamesFields(t *testing.T) {
	_, err := ParsePeer(testPeer(func(s *v1alpha1.PeerSpec) { s.AllowedIPs = []string{"foo"} }))
	var fault mesh.Problem
	if !errors.As(err, &fault) || fault.Object != "peer/p" || fault.Field != "spec.allowedIPs[0]" {
		t.Errorf("error %v holds no Problem of spec.allowedIPs[0]", err)
	}
}

// TestPeerThatFitsNoGoType: the schema lets numbers through that the type cannot hold.
func TestPeerThatFitsNoGoType(t *testing.T) {
	for name, port := range map[string]any{"negative": int64(-1), "large": int64(1) << 40, "float": 1e30} {
		t.Run(name, func(t *testing.T) {
			p := newCachedPeer(unstructuredPeer("p", map[string]any{
				"allowedIPs": []any{"10.5.0.1/32"}, "publicKey": keyA,
				"endpoint": map[string]any{"dnsOrIP": map[string]any{"ip": "10.0.0.1"}, "port": port},
			}))
			checkProblems(t, "peer/p", []string{"spec", "port"}, p.problems)
		})
	}
}

func unstructuredPeer(name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.GroupVersion().String(), "kind": v1alpha1.PeerKind,
		"metadata": map[string]any{"name": name, "uid": "u-" + name, "resourceVersion": "1"},
		"spec":     spec,
	}}
}

// FuzzParsePeer: whatever the text, a Peer is as promised or not at all.
func FuzzParsePeer(f *testing.F) {
	f.Add("10.5.0.1/24", "fd05::/64", "example.com", "", uint32(51820), 25, keyB, keyA)
	f.Add("::ffff:1.2.3.4/96", "0.0.0.0/0", "", "::ffff:1.2.3.4", uint32(65536), -1, "", keyB)
	f.Fuzz(func(t *testing.T, ip1, ip2, dns, ip string, port uint32, keepalive int, psk, key string) {
		p, err := ParsePeer(testPeer(func(s *v1alpha1.PeerSpec) {
			*s = v1alpha1.PeerSpec{
				AllowedIPs: []string{ip1, ip2}, Endpoint: endpointOf(dns, ip, port),
				PersistentKeepalive: keepalive, PresharedKey: psk, PublicKey: key,
			}
		}))
		if err != nil {
			// A secret that is too short to tell apart from the rest of the text proves nothing.
			if len(psk) > 20 && psk != key && strings.Contains(err.Error(), psk) && !strings.Contains(ip1+ip2+dns+ip+key, psk) {
				t.Errorf("error shows the preshared key: %v", err)
			}
			return
		}
		if p.Key.IsZero() || len(p.AllowedIPs) == 0 || !p.Endpoint.IsValid() || p.PresharedKey.IsZero() != (psk == "") || int(p.PersistentKeepalive) != keepalive {
			t.Errorf("accepted %+v", p)
		}
		for _, a := range p.AllowedIPs {
			if a != a.Masked() || a.Addr().Is4In6() {
				t.Errorf("allowed IP %s", a)
			}
		}
	})
}
