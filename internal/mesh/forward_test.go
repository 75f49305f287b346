// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAcceptForward(t *testing.T) {
	t.Parallel()
	nodes := []Node{
		{Name: "a", Location: "1", WantsLead: true, Endpoint: at("198.51.100.1"), InternalIPs: prefixes("192.168.1.1/24", "fd01::1/64"), PodCIDRs: prefixes("10.2.1.0/24", "fd00:2:1::/64"), Key: key(1), ListenPort: 51820},
		{Name: "b", Location: "1", Endpoint: at("198.51.100.2"), InternalIPs: prefixes("192.168.1.2/24"), PodCIDRs: prefixes("10.2.2.0/24"), AllowedLocationIPs: prefixes("172.16.0.0/16"), Key: key(2), ListenPort: 51820},
		{Name: "c", Location: "2", Endpoint: at("198.51.100.3"), InternalIPs: prefixes("192.168.2.1/24"), PodCIDRs: prefixes("10.2.3.0/24"), AllowedLocationIPs: prefixes("172.17.0.0/16"), Key: key(3), ListenPort: 51820},
	}
	for name, c := range map[string]struct {
		rules, cni bool
		self       string
		want       []string
	}{
		"a leader, for its location":  {true, true, "a", []string{"10.2.1.0/24", "10.2.2.0/24", "172.16.0.0/16", "192.168.1.1/32", "192.168.1.2/32", "fd00:2:1::/64", "fd01::1/128"}},
		"a member, for its pods":      {true, true, "b", []string{"10.2.2.0/24"}},
		"not while others do the CNI": {true, false, "a", nil},
		"not without being asked":     {false, true, "a", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := testConfig()
			cfg.ForwardRules, cfg.ManageCNI = c.rules, c.cni
			cfg.WireGuardCIDRs = prefixes("10.4.0.0/16", "fd00:4::/64")
			topology, _ := computed(t, cfg, nodes, nil)
			s, _, err := topology.State(c.self, secret(1), oneLink("192.168.1.1/24", "192.168.1.2/24", "fd01::1/64"))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(prefixes(c.want...), s.AcceptForward, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}
