// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestPlanOfDemo(t *testing.T) {
	p, err := newPlan(Demo(Dual))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, got, want string }{
		{"internet", fmt.Sprint(p.Internet), "[203.0.113.1/24 2001:db8::1/64]"},
		{"control plane", fmt.Sprint(p.Control), "[203.0.113.2/24 2001:db8::2/64]"},
		{"router of b", fmt.Sprint(p.Clouds["b"]), "{[10.100.0.1/24 fd80::1/64] [203.0.113.3/24 2001:db8::3/64]}"},
		{"router of c", fmt.Sprint(p.Clouds["c"]), "{[10.101.0.1/24 fd81::1/64] [203.0.113.4/24 2001:db8::4/64]}"},
		{"a1", fmt.Sprint(p.Hosts["a1"]), "{[203.0.113.5/24 2001:db8::5/64] [] [10.42.1.0/24 fd42:0:0:1::/64]}"},
		{"b1", fmt.Sprint(p.Hosts["b1"]), "{[203.0.113.7/24 2001:db8::7/64] [10.100.0.11/24 fd80::b/64] [10.42.3.0/24 fd42:0:0:3::/64]}"},
		{"c2", fmt.Sprint(p.Hosts["c2"]), "{[] [10.101.0.12/24 fd81::c/64] [10.42.7.0/24 fd42:0:0:7::/64]}"},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: got %s, want %s", tt.name, tt.got, tt.want)
		}
	}
}

func TestPlanHasOnlyTheFamiliesOfTheStack(t *testing.T) {
	for _, stack := range []Stack{IPv4, IPv6} {
		p, err := newPlan(Demo(stack))
		if err != nil {
			t.Fatal(err)
		}
		for name, h := range p.Hosts {
			for _, ps := range [][]netip.Prefix{h.Public, h.Private, h.PodCIDRs} {
				for _, q := range ps {
					if q.Addr().Is4() != (stack == IPv4) {
						t.Errorf("stack %s: %s has %v", stack, name, q)
					}
				}
			}
		}
	}
}

func TestPlanGivesNoAddressTwice(t *testing.T) {
	s := Spec{Stack: Dual, Clouds: []CloudSpec{{Name: "x", Network: true, NAT: NATNone}, {Name: "y", Network: true, NAT: NATSymmetric}}}
	for i := range 12 {
		s.Hosts = append(s.Hosts, HostSpec{Name: fmt.Sprintf("x%d", i), Cloud: "x", Private: true},
			HostSpec{Name: fmt.Sprintf("y%d", i), Cloud: "y", Private: true, Public: true})
	}
	p, err := newPlan(s)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[netip.Addr]string{}
	for name, h := range p.Hosts {
		for _, ps := range [][]netip.Prefix{h.Public, h.Private, h.PodCIDRs} {
			for _, q := range ps {
				if other, ok := seen[q.Addr()]; ok {
					t.Errorf("%s and %s have %v", name, other, q)
				}
				seen[q.Addr()] = name
			}
		}
	}
}

func TestPlanSaysWhatIsFull(t *testing.T) {
	p, err := newPlan(Spec{Stack: IPv4, Clouds: []CloudSpec{{Name: "x", Network: true, NAT: NATNone}, {Name: "y"}}})
	if err != nil {
		t.Fatal(err)
	}
	add := func(h HostSpec) (err error) {
		for i := 0; err == nil && i < 300; i++ {
			h.Name = fmt.Sprintf("h%d", i)
			err = p.add(h)
		}
		return err
	}
	if err := add(HostSpec{Cloud: "x", Private: true}); err == nil || !strings.Contains(err.Error(), "198.51.100.0/28") {
		t.Errorf("routed network of 13 hosts: %v, want an error that names it", err)
	}
	if err := add(HostSpec{Cloud: "y", Public: true}); err == nil || !strings.Contains(err.Error(), "left") {
		t.Errorf("300 public hosts: %v, want an error", err)
	}
}

func TestAddrAt(t *testing.T) {
	for _, tt := range []struct {
		network string
		n       int
		want    string
	}{
		{"10.42.0.0/16", 256, "10.42.1.0"},
		{"10.42.0.0/16", 511, "10.42.1.255"},
		{"10.0.0.255/8", 1, "10.0.1.0"},
		{"fd00:4::/64", 1, "fd00:4::1"},
		{"fd43::/112", 65536, "fd43::1:0"},
	} {
		if got := addrAt(netip.MustParsePrefix(tt.network), tt.n); got.String() != tt.want {
			t.Errorf("addrAt(%s, %d) = %v, want %s", tt.network, tt.n, got, tt.want)
		}
	}
}
