// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestParseEndpoint(t *testing.T) {
	for in, want := range map[string]Endpoint{
		"10.0.0.1:51820": {IP: addr("10.0.0.1"), Port: 51820}, "[ff10::10]:51820": {IP: addr("ff10::10"), Port: 51820},
		"a.example.com:1": {DNS: "a.example.com", Port: 1}, "[::ffff:1.2.3.4]:5": {IP: addr("1.2.3.4"), Port: 5},
	} {
		got, err := ParseEndpoint(in)
		if err != nil || got != want {
			t.Errorf("ParseEndpoint(%q) = %v, %v, want %v", in, got, err, want)
		}
		if again, err := ParseEndpoint(got.String()); err != nil || again != got {
			t.Errorf("ParseEndpoint(%q) = %v, %v, want it to read its own text", got.String(), again, err)
		}
	}
	for _, in := range []string{"", ":1", "10.0.0.0", "[::]", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:-1", "fd00::1:51820", "[10.0.0.1]:1", "[fd00::1:1", "[fe80::1%eth0]:1", "UPPER.case:1", "-a:1", "a..b:1", "10.0.0.256:1", "a b:1"} {
		got, err := ParseEndpoint(in)
		if err == nil || got.IsValid() {
			t.Errorf("ParseEndpoint(%q) = %v, want an error", in, got)
		} else if !strings.Contains(err.Error(), `"`+in+`"`) || !strings.Contains(err.Error(), "want") {
			t.Errorf("ParseEndpoint(%q): %v; want the value and what is accepted", in, err)
		}
	}
}

func FuzzParseEndpoint(f *testing.F) {
	f.Add("10.0.0.1:51820")
	f.Add("[fd00::1]:1")
	f.Fuzz(func(t *testing.T, s string) {
		e, err := ParseEndpoint(s)
		if err != nil {
			return
		}
		if again, err := ParseEndpoint(e.String()); err != nil || again != e {
			t.Errorf("ParseEndpoint(%q).String() = %q, read back as %v, %v", s, e, again, err)
		}
	})
}

func TestParseKeys(t *testing.T) {
	good := key(7).String()
	if k, err := ParsePublicKey(good); err != nil || k != key(7) {
		t.Errorf("ParsePublicKey(%q) = %v, %v", good, k, err)
	}
	for _, bad := range []string{"", "x", good[:43], PublicKey{}.String(), strings.Repeat("A", 43) + "=", good + good} {
		if _, err := ParsePublicKey(bad); err == nil {
			t.Errorf("ParsePublicKey(%q) succeeded", bad)
		}
		if _, err := ParseSecretKey(bad); err == nil || bad != "" && len(bad) > 1 && strings.Contains(err.Error(), bad) {
			t.Errorf("ParseSecretKey: %v; want an error without the input", err)
		}
	}
	// The test vector of RFC 7748, section 6.1, for Alice.
	alice, err := ParseSecretKey("dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := alice.Public(); err != nil || got.String() != "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=" {
		t.Errorf("Public() = %v, %v", got, err)
	}
}

func TestDetect(t *testing.T) {
	docker := LinkAddr{Dev: "docker0", Prefix: pfx("172.17.0.1/16"), MTU: 1500}
	public := LinkAddr{Dev: "eth0", Prefix: pfx("203.0.113.7/24"), MTU: 1500}
	private := LinkAddr{Dev: "eth1", Prefix: pfx("10.1.0.7/24"), MTU: 1500}
	private6 := LinkAddr{Dev: "eth1", Prefix: pfx("fd01::7/64"), MTU: 1500}
	tests := []struct {
		name     string
		declared Declared
		facts    Facts
		cfg      DetectConfig
		internal string
		endpoint string
		listen   uint16
	}{
		{"public and private", Declared{}, Facts{Addrs: []LinkAddr{docker, private, public}, DefaultDev: "eth0"}, DetectConfig{InternalCIDRs: prefixes("10.1.0.0/16")}, "10.1.0.7/24", "203.0.113.7:51820", 51820},
		{"only public, and docker", Declared{InternalIPs: []netip.Addr{addr("203.0.113.7")}}, Facts{Addrs: []LinkAddr{docker, public}, DefaultDev: "eth0"}, DetectConfig{}, "", "203.0.113.7:51820", 51820},
		{"status before links", Declared{InternalIPs: []netip.Addr{addr("10.1.0.7")}}, Facts{Addrs: []LinkAddr{docker, public, private}, DefaultDev: "eth0"}, DetectConfig{}, "10.1.0.7/24", "203.0.113.7:51820", 51820},
		{"status that no link has", Declared{InternalIPs: []netip.Addr{addr("10.9.0.7")}}, Facts{Addrs: []LinkAddr{public}}, DetectConfig{}, "10.9.0.7/32", "203.0.113.7:51820", 51820},
		{"external address by one-to-one NAT", Declared{InternalIPs: []netip.Addr{addr("10.1.0.7")}, ExternalIPs: []netip.Addr{addr("198.51.100.1")}}, Facts{Addrs: []LinkAddr{private}, DefaultDev: "eth1"}, DetectConfig{}, "10.1.0.7/24", "198.51.100.1:51820", 51820},
		{"behind NAT", Declared{}, Facts{Addrs: []LinkAddr{private}, DefaultDev: "eth1"}, DetectConfig{}, "10.1.0.7/24", "10.1.0.7:51820", 51820},
		{"private first", Declared{}, Facts{Addrs: []LinkAddr{public, private}, DefaultDev: "eth0"}, DetectConfig{PrioritisePrivate: true}, "10.1.0.7/24", "10.1.0.7:51820", 51820},
		{"dual-stack", Declared{}, Facts{Addrs: []LinkAddr{private6, private}, DefaultDev: "eth1"}, DetectConfig{}, "10.1.0.7/24,fd01::7/64", "10.1.0.7:51820", 51820},
		{"IPv6 only", Declared{}, Facts{Addrs: []LinkAddr{private6}, DefaultDev: "eth1"}, DetectConfig{}, "fd01::7/64", "[fd01::7]:51820", 51820},
		{"no internal IP wanted", Declared{NoInternalIP: true}, Facts{Addrs: []LinkAddr{private}, DefaultDev: "eth1"}, DetectConfig{}, "", "10.1.0.7:51820", 51820},
		{"forced", Declared{ForceInternalIPs: prefixes("10.3.0.1/16"), ForceEndpoint: Endpoint{DNS: "n.example", Port: 4500}}, Facts{Addrs: []LinkAddr{private, public}}, DetectConfig{}, "10.3.0.1/16", "n.example:4500", 4500},
		{"carrier-grade NAT is private", Declared{}, Facts{Addrs: []LinkAddr{{Dev: "eth0", Prefix: pfx("100.64.0.9/10")}}, DefaultDev: "eth0"}, DetectConfig{}, "100.64.0.9/10", "100.64.0.9:51820", 51820},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.cfg.Port = 51820
			n, problems := Detect(tt.declared, tt.facts, tt.cfg)
			if len(problems) > 0 {
				t.Errorf("problems %v", problems)
			}
			if got := joinPrefixes(n.InternalIPs); got != tt.internal {
				t.Errorf("internal IPs = %q, want %q", got, tt.internal)
			}
			if got := n.Endpoint.String(); got != tt.endpoint || n.ListenPort != tt.listen {
				t.Errorf("endpoint = %q, listen port %d, want %q, %d", got, n.ListenPort, tt.endpoint, tt.listen)
			}
		})
	}
	if n, problems := Detect(Declared{}, Facts{}, DetectConfig{Port: 1}); n.Endpoint.IsValid() || len(problems) != 1 {
		t.Errorf("without any address: %v, %v; want a problem", n.Endpoint, problems)
	}
}

func TestDetectForgetsWhatWasPublishedBefore(t *testing.T) {
	d := Declared{Node: Node{Name: "a", Endpoint: at("192.0.2.1"), InternalIPs: prefixes("10.9.9.9/24")}}
	n, _ := Detect(d, oneLink("10.1.0.7/24"), DetectConfig{Port: 4})
	if n.Endpoint.String() != "10.1.0.7:4" || !slices.Equal(n.InternalIPs, prefixes("10.1.0.7/24")) {
		t.Errorf("Detect = %v, %v; want the host's addresses alone", n.Endpoint, n.InternalIPs)
	}
}
