// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net/netip"
)

// The ranges of a lab. What is public is from the documentation prefixes.
var (
	internet4 = netip.MustParsePrefix("203.0.113.0/24")
	internet6 = netip.MustParsePrefix("2001:db8::/64")
	// Of these every cloud gets its own network.
	routed4  = netip.MustParsePrefix("198.51.100.0/24") // as /28
	routed6  = netip.MustParsePrefix("2001:db8:100::/48")
	private4 = netip.MustParsePrefix("10.100.0.0/16") // as 10.(100+n).0.0/24
	pods4    = netip.MustParsePrefix("10.42.0.0/16")
	pods6    = netip.MustParsePrefix("fd42::/48")
	services = []netip.Prefix{netip.MustParsePrefix("10.43.0.0/16"), netip.MustParsePrefix("fd43::/112")}
	// The WireGuard ranges, kg's --subnet.
	wireguard = []netip.Prefix{netip.MustParsePrefix("10.4.0.0/16"), netip.MustParsePrefix("fd00:4::/64")}
)

// hostPlan is where a host is on the network. Its slices have one entry for
// each family of the stack, IPv4 first.
type hostPlan struct {
	Public   []netip.Prefix `json:"public,omitempty"`
	Private  []netip.Prefix `json:"private,omitempty"`
	PodCIDRs []netip.Prefix `json:"podCIDRs"`
}

// cloudPlan is the network of a cloud.
type cloudPlan struct {
	// Gateway is the router's address inside, with the network's length.
	Gateway []netip.Prefix `json:"gateway"`
	// Uplink is the router's address on the internet.
	Uplink []netip.Prefix `json:"uplink"`
}

// plan gives out the addresses of a lab, in the order in which hosts come. An
// address is never given out twice, not even when its host has left.
type plan struct {
	Stack    Stack                `json:"stack"`
	Internet []netip.Prefix       `json:"internet"` // the internet router's own
	Control  []netip.Prefix       `json:"control"`
	Clouds   map[string]cloudPlan `json:"clouds"`
	Hosts    map[string]hostPlan  `json:"hosts"`
	// Next free numbers: on the internet, in each cloud, of pod CIDRs.
	NextPublic  int            `json:"nextPublic"`
	NextPrivate map[string]int `json:"nextPrivate"`
	NextPod     int            `json:"nextPod"`
}

func newPlan(s Spec) (*plan, error) {
	p := &plan{
		Stack:       s.Stack,
		Clouds:      map[string]cloudPlan{},
		Hosts:       map[string]hostPlan{},
		NextPublic:  1,
		NextPrivate: map[string]int{},
		NextPod:     1,
	}
	var err error
	if p.Internet, err = p.public(); err != nil {
		return nil, err
	}
	if p.Control, err = p.public(); err != nil {
		return nil, err
	}
	n := 0
	for _, c := range s.Clouds {
		if !c.Network {
			continue
		}
		if p.Clouds[c.Name], err = p.cloud(c, n); err != nil {
			return nil, fmt.Errorf("cloud %q: %w", c.Name, err)
		}
		p.NextPrivate[c.Name] = 11
		if c.NAT == NATNone {
			p.NextPrivate[c.Name] = 2 // of 14
		}
		n++
	}
	for _, h := range s.Hosts {
		if err := p.add(h); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// cloud plans the n-th network.
func (p *plan) cloud(c CloudSpec, n int) (cloudPlan, error) {
	uplink, err := p.public()
	if err != nil {
		return cloudPlan{}, err
	}
	var net4, net6 netip.Prefix
	if c.NAT == NATNone {
		if n >= 16 {
			return cloudPlan{}, fmt.Errorf("network %d does not fit into %v", n, routed4)
		}
		net4 = netip.PrefixFrom(addrAt(routed4, n*16), 28)
		b := routed6.Addr().As16()
		b[7] = byte(n)
		net6 = netip.PrefixFrom(netip.AddrFrom16(b), 64)
	} else {
		if n >= 100 {
			return cloudPlan{}, errors.New("more than 100 networks")
		}
		b := private4.Addr().As4()
		b[1] += byte(n)
		net4 = netip.PrefixFrom(netip.AddrFrom4(b), 24)
		net6 = netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0x80 + byte(n)}), 64)
	}
	return cloudPlan{Uplink: uplink, Gateway: p.both(net4, net6, 1)}, nil
}

// add gives h its addresses.
func (p *plan) add(h HostSpec) error {
	var hp hostPlan
	var err error
	if h.Public {
		if hp.Public, err = p.public(); err != nil {
			return fmt.Errorf("host %q: %w", h.Name, err)
		}
	}
	if h.Private {
		n := p.NextPrivate[h.Cloud]
		network := p.Clouds[h.Cloud].Gateway
		for _, g := range network {
			if g.Addr().Is4() && n >= 1<<(32-g.Bits())-1 {
				return fmt.Errorf("host %q: network %v of cloud %q is full", h.Name, g.Masked(), h.Cloud)
			}
			hp.Private = append(hp.Private, netip.PrefixFrom(addrAt(g.Masked(), n), g.Bits()))
		}
		p.NextPrivate[h.Cloud] = n + 1
	}
	if p.NextPod > 255 {
		return fmt.Errorf("host %q: no pod CIDR is left in %v", h.Name, pods4)
	}
	if p.Stack.Has4() {
		hp.PodCIDRs = append(hp.PodCIDRs, netip.PrefixFrom(addrAt(pods4, p.NextPod*256), 24))
	}
	if p.Stack.Has6() {
		b := pods6.Addr().As16()
		b[7] = byte(p.NextPod)
		hp.PodCIDRs = append(hp.PodCIDRs, netip.PrefixFrom(netip.AddrFrom16(b), 64))
	}
	p.NextPod++
	p.Hosts[h.Name] = hp
	return nil
}

// public gives out the next addresses of the internet.
func (p *plan) public() ([]netip.Prefix, error) {
	if p.NextPublic > 254 {
		return nil, fmt.Errorf("no address is left on the internet %v", internet4)
	}
	p.NextPublic++
	return p.both(internet4, internet6, p.NextPublic-1), nil
}

// both returns the n-th address of the networks of the stack's families.
func (p *plan) both(net4, net6 netip.Prefix, n int) []netip.Prefix {
	var out []netip.Prefix
	if p.Stack.Has4() {
		out = append(out, netip.PrefixFrom(addrAt(net4, n), net4.Bits()))
	}
	if p.Stack.Has6() {
		out = append(out, netip.PrefixFrom(addrAt(net6, n), net6.Bits()))
	}
	return out
}

// families keeps the IPv4 or IPv6 entry of ps, or both, as s has them.
func (s Stack) families(ps []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, q := range ps {
		if q.Addr().Is4() && s.Has4() || q.Addr().Is6() && s.Has6() {
			out = append(out, q)
		}
	}
	return out
}

// addrAt returns the n-th address of network.
func addrAt(network netip.Prefix, n int) netip.Addr {
	b := network.Addr().AsSlice()
	for i := len(b) - 1; n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

func addrs(ps []netip.Prefix) []netip.Addr {
	out := make([]netip.Addr, len(ps))
	for i, p := range ps {
		out[i] = p.Addr()
	}
	return out
}
