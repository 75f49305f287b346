// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"net/netip"
	"testing"
)

func pfx(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr  { return netip.MustParseAddr(s) }
func key(b byte) PublicKey      { return PublicKey{0: b, 31: 1} }
func secret(b byte) SecretKey   { return NewSecretKey([KeySize]byte{0: b, 31: 64}) }
func at(ip string) Endpoint     { return Endpoint{IP: addr(ip), Port: 51820} }
func prefixes(s ...string) (out []netip.Prefix) {
	for _, p := range s {
		out = append(out, pfx(p))
	}
	return out
}

// testConfig is a default configuration.
func testConfig() Config {
	return Config{
		Granularity: GranularityLocation, Encapsulation: EncapsulateAlways, WireGuardCIDRs: prefixes("10.4.0.0/16"),
		ManageLocal: true, ManageCNI: true, WireGuardDev: "kilo0", TunnelDev: "tunl0",
	}
}

// fourNodes and twoPeers are the fixture that the existing Kilo is tested with:
// a and b have the same internal IP on purpose, d has none.
func fourNodes() []Node {
	return []Node{
		{Name: "a", Location: "1", Endpoint: at("10.1.0.1"), InternalIPs: prefixes("192.168.0.1/32"), PodCIDRs: prefixes("10.2.1.0/24"), Key: key(1), PersistentKeepalive: 25, ListenPort: 51820},
		{Name: "b", Location: "2", Endpoint: at("10.1.0.2"), InternalIPs: prefixes("192.168.0.1/32"), PodCIDRs: prefixes("10.2.2.0/24"), Key: key(2), AllowedLocationIPs: prefixes("192.168.178.3/32"), ListenPort: 51820},
		{Name: "c", Location: "2", Endpoint: at("10.1.0.3"), InternalIPs: prefixes("192.168.0.2/32"), PodCIDRs: prefixes("10.2.3.0/24"), Key: key(3), ListenPort: 51820},
		{Name: "d", Location: "1", Endpoint: at("10.1.0.4"), PodCIDRs: prefixes("10.2.4.0/24"), Key: key(4), ListenPort: 51820},
	}
}

func twoPeers() []Peer {
	return []Peer{
		{Name: "a", Key: key(11), AllowedIPs: prefixes("10.5.0.1/32", "10.5.0.2/32")},
		{Name: "b", Key: key(12), AllowedIPs: prefixes("10.5.0.3/32"), Endpoint: at("192.168.0.1")},
	}
}

func computed(t *testing.T, cfg Config, nodes []Node, peers []Peer) (*Topology, []Problem) {
	t.Helper()
	return Compute(cfg, nodes, peers, StaticLeaders(cfg.Granularity, nodes))
}

func stateOf(t *testing.T, topology *Topology, name string, facts Facts) State {
	t.Helper()
	s, problems, err := topology.State(name, secret(1), facts)
	if err != nil {
		t.Fatal(err)
	}
	if len(problems) > 0 {
		t.Fatalf("State(%s): problems %v", name, problems)
	}
	return s
}

// oneLink are the facts of a host with one link.
func oneLink(addrs ...string) Facts {
	f := Facts{DefaultDev: "eth0", DefaultMTU: 1500}
	for _, a := range addrs {
		f.Addrs = append(f.Addrs, LinkAddr{Dev: "eth0", Prefix: pfx(a), MTU: 1500})
	}
	return f
}
