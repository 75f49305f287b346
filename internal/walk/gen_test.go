// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/kilomesh/kilo/internal/mesh"
)

// source is where the generator gets its choices: a seeded *rand.Rand, or rapid.
type source interface{ IntN(n int) int }

// scene is a random cluster with the network that it is on.
type scene struct {
	cfg     mesh.Config
	nodes   []mesh.Node
	peers   []mesh.Peer
	sites   []Site
	hosts   map[string]*Host // links and routes by name, before the State is known
	secrets map[string]mesh.SecretKey
	dual    bool
	cilium  bool // has its own tunnel link
	// leads names, by site, a node that leads if it can, whatever the static judge says.
	leads map[string]string
	// nets are the numbers of the sites' private networks, which sites may share.
	nets []int
}

const maxNodes, maxPeers = 8, 2

// keys are derived once: it is dearer than the rest of a small world.
var (
	secrets    [maxNodes + maxPeers]mesh.SecretKey
	publicKeys = map[mesh.SecretKey]mesh.PublicKey{}
)

func init() { //nolint:gochecknoinits // a table of test keys
	for i := range secrets {
		secrets[i] = mesh.NewSecretKey([mesh.KeySize]byte{1: byte(i + 1), 31: 64})
		key, err := secrets[i].Public()
		if err != nil {
			panic(err)
		}
		publicKeys[secrets[i]] = key
	}
}

func publicOf(s mesh.SecretKey) (mesh.PublicKey, error) {
	if k, ok := publicKeys[s]; ok {
		return k, nil
	}
	return s.Public()
}

func pick[T any](r source, of ...T) T { return of[r.IntN(len(of))] }

func chance(r source, percent int) bool { return r.IntN(100) < percent }

func addr4(a, b, c, d int) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(a), byte(b), byte(c), byte(d)})
}

// addr6 returns a:b:c::d.
func addr6(a, b, c, d int) netip.Addr {
	return netip.AddrFrom16([16]byte{byte(a >> 8), byte(a), byte(b >> 8), byte(b), byte(c >> 8), byte(c), 15: byte(d)})
}

// families keeps those that the cluster has.
type families struct{ v4, v6 bool }

func (f families) of(four, six netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	if f.v4 {
		out = append(out, four)
	}
	if f.v6 {
		out = append(out, six)
	}
	return out
}

func p(a netip.Addr, bits int) netip.Prefix { return netip.PrefixFrom(a, bits) }

// generate makes a scene of random choices.
func generate(r source) *scene {
	s := &scene{hosts: map[string]*Host{}, secrets: map[string]mesh.SecretKey{}, leads: map[string]string{}}
	fam := pick(r, families{v4: true}, families{v6: true}, families{v4: true, v6: true})
	s.dual = fam.v4 && fam.v6
	s.config(r, fam)
	nsites := 1 + r.IntN(4)
	for i := range nsites {
		s.addSite(r, i)
	}
	for i := range 1 + r.IntN(maxNodes) {
		s.addNode(r, fam, i, r.IntN(nsites))
	}
	for _, n := range s.nodes {
		if len(n.InternalIPs) > 0 && chance(r, 25) {
			s.leads[n.Location] = n.Name
		}
	}
	for i := range r.IntN(maxPeers + 1) {
		s.addPeer(r, fam, i)
	}
	s.hazards(r, fam)
	s.keepOwnNetworks()
	if s.cfg.AddOn != mesh.AddOnNone {
		s.addOn()
	}
	return s
}

// keepOwnNetworks drops allowed location IPs that cover a network which nodes
// of other locations are in: nobody means to reach the own network through others.
func (s *scene) keepOwnNetworks() {
	for at, site := range s.sites {
		if at >= len(s.nets) {
			break // the home of a peer
		}
		own := netip.PrefixFrom(addr4(10, 100+s.nets[at], 0, 0), 16)
		apart := slices.ContainsFunc(s.nodes, func(n mesh.Node) bool { return n.Location == site.Name && len(n.InternalIPs) == 0 })
		shared := len(slices.DeleteFunc(slices.Clone(s.nets), func(n int) bool { return n != s.nets[at] })) > 1
		if s.cfg.Granularity == mesh.GranularityLocation && !apart && !shared {
			continue
		}
		for i := range s.nodes {
			n := &s.nodes[i]
			n.AllowedLocationIPs = slices.DeleteFunc(slices.Clone(n.AllowedLocationIPs), func(a netip.Prefix) bool { return own.Contains(a.Addr()) })
		}
	}
}

func (s *scene) config(r source, fam families) {
	c := &s.cfg
	c.Granularity = pick(r, mesh.GranularityLocation, mesh.GranularityLocation, mesh.GranularityFull, mesh.GranularityCross)
	c.Encapsulation = pick(r, mesh.EncapsulateNever, mesh.EncapsulateCrossSubnet, mesh.EncapsulateAlways)
	c.Tunnel = pick(r, mesh.KindIPIP, mesh.KindVXLAN)
	c.AddOn = pick(r, mesh.AddOnNone, mesh.AddOnNone, mesh.AddOnNone, mesh.AddOnFlannel, mesh.AddOnCilium)
	c.ManageLocal, c.ManageCNI = true, chance(r, 70)
	c.WireGuardDev, c.TunnelDev, c.VXLANDev = "kilo0", "tunl0", "kilo-vxlan"
	c.WireGuardCIDRs = fam.of(p(addr4(10, 4, 0, 0), 16), p(addr6(0xfd00, 4, 0, 0), 64))
	if chance(r, 5) { // enough for three locations
		c.WireGuardCIDRs = fam.of(p(addr4(10, 4, 0, 0), 30), p(addr6(0xfd00, 4, 0, 0), 126))
	}
	if chance(r, 50) {
		c.ServiceCIDRs = fam.of(p(addr4(10, 43, 0, 0), 16), p(addr6(0xfd43, 0, 0, 0), 112))
	}
	if c.Granularity == mesh.GranularityCross {
		c.Encapsulation = mesh.EncapsulateNever
	}
	if c.AddOn != mesh.AddOnNone && c.Encapsulation == mesh.EncapsulateNever {
		c.AddOn = mesh.AddOnNone // refused with Flannel; with Cilium the gateway is on no segment
	}
	if c.AddOn != mesh.AddOnNone {
		c.Tunnel, c.ManageCNI = mesh.KindIPIP, false
		c.ManageLocal = chance(r, 50)
	} else if chance(r, 10) {
		c.ManageLocal = false
	}
	c.StrictEncryption = chance(r, 50)
	s.cilium = c.AddOn == mesh.AddOnCilium && chance(r, 50)
}

func (s *scene) addSite(r source, i int) {
	net := i
	if i > 0 && chance(r, 12) {
		net = s.nets[r.IntN(i)]
	}
	s.nets = append(s.nets, net)
	site := Site{
		Name:     fmt.Sprintf("site%d", i),
		NAT:      []netip.Addr{addr4(203, 0, 113, 200+i), addr6(0x2001, 0xdb8, 0xff, i+1)},
		Forward:  map[netip.AddrPort]netip.AddrPort{},
		Networks: []netip.Prefix{p(addr4(192, 168, i, 0), 24), p(addr4(10, 100+net, 200, 0), 24), p(addr6(0xfd99, i, 0, 0), 64)},
		Strict:   s.cfg.Encapsulation == mesh.EncapsulateAlways && chance(r, 50),
	}
	for subnet := range 2 {
		site.Routers = append(site.Routers, addr4(10, 100+net, subnet, 254), addr6(0xfd80+net, subnet, 0, 0xfe))
	}
	site.Routers = append(site.Routers, addr4(198, 51, 100, 16*i+14), addr6(0x2001, 0xdb8, i+1, 0xfe))
	s.sites = append(s.sites, site)
}
