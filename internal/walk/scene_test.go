// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kilomesh/kilo/internal/mesh"
)

// addOn gives the hosts the tunnels and routes of the pod network that Kilo is added to.
func (s *scene) addOn() {
	flannel := s.cfg.AddOn == mesh.AddOnFlannel
	gateways := map[netip.Addr]string{}
	bases := map[string][]netip.Addr{}
	for i := range s.nodes {
		n := &s.nodes[i]
		for _, cidr := range n.PodCIDRs {
			a := cidr.Addr()
			if !flannel {
				if a = addr4(10, 244, i, 7); cidr.Addr().Is6() {
					a = addr6(0xfd44, i, 0, 7)
				}
				n.CNICompatibilityIPs = append(n.CNICompatibilityIPs, a)
			}
			gateways[a] = n.Name
			bases[n.Name] = append(bases[n.Name], a)
		}
	}
	for _, n := range s.nodes {
		h := s.hosts[n.Name]
		for i, cidr := range n.PodCIDRs {
			l := Link{Name: "cilium_host", Addrs: []netip.Prefix{p(bases[n.Name][i], bases[n.Name][i].BitLen())}, Overlay: gateways}
			switch {
			case flannel && cidr.Addr().Is4():
				l.Name = "flannel.1"
			case flannel:
				l.Name = "flannel-v6.1"
			case i == 1: // one link for both families
				h.Links[len(h.Links)-1].Addrs = append(h.Links[len(h.Links)-1].Addrs, l.Addrs...)
			}
			if flannel || i == 0 {
				h.Links = append(h.Links, l)
			}
			for _, m := range s.nodes {
				if m.Name == n.Name {
					continue
				}
				base := bases[m.Name][i]
				h.Routes = append(h.Routes, Route{Dst: m.PodCIDRs[i], Via: base, Dev: l.Name})
				if !flannel {
					h.Routes = append(h.Routes, Route{Dst: p(base, base.BitLen()), Dev: l.Name})
				}
			}
		}
		if s.cilium {
			h.Links = append(h.Links, Link{Name: "cilium_tunl", Kind: mesh.KindIPIP})
		}
	}
}

// inside says who routes between the nodes of a location.
func (s *scene) inside() Inside {
	switch {
	case s.cfg.ManageLocal:
		return InsideMesh
	case s.cfg.AddOn != mesh.AddOnNone:
		return InsideAddOn
	default:
		return InsideNobody
	}
}

func (s *scene) facts(h *Host) mesh.Facts {
	f := mesh.Facts{DefaultMTU: 1500, CiliumTunnel: s.cilium}
	for _, l := range h.Links {
		for _, a := range l.Addrs {
			f.Addrs = append(f.Addrs, mesh.LinkAddr{Dev: l.Name, Prefix: a, MTU: 1500})
		}
	}
	return f
}

// computed is a scene's mesh.
type computed struct {
	*scene
	topology *mesh.Topology
	problems []mesh.Problem
	hosts    []Host
}

func (s *scene) compute() (*computed, error) {
	if err := s.cfg.Validate(); err != nil {
		return nil, fmt.Errorf("generator: %w", err)
	}
	c := &computed{scene: s}
	leaders := mesh.StaticLeaders(s.cfg.Granularity, s.nodes)
	for site, name := range s.leads {
		if slices.ContainsFunc(s.nodes, func(n mesh.Node) bool { return n.Name == name }) {
			leaders["location:"+site] = name
		}
	}
	c.topology, c.problems = mesh.Compute(s.cfg, s.nodes, s.peers, leaders)
	if err := c.states(nil); err != nil {
		return nil, err
	}
	w, err := c.world()
	if err != nil {
		return nil, err
	}
	return c, c.states(w.heard())
}

// states fills in the hosts, whose WireGuard devices heard from their peers as told.
func (c *computed) states(heard map[string]map[mesh.PublicKey]netip.Addr) error {
	s := c.scene
	c.hosts = c.hosts[:0]
	lost := lost(c.topology.Locations)
	for i := range c.topology.Locations {
		l := &c.topology.Locations[i]
		for _, n := range l.Nodes {
			h := *s.hosts[n.Name]
			facts := s.facts(&h)
			facts.PeerAddrs = heard[n.Name]
			state, problems, err := c.topology.State(n.Name, s.secrets[n.Name], facts)
			if err != nil {
				return err
			}
			c.problems = append(c.problems, problems...)
			h.State, h.Node, h.Location, h.Gate, h.Lost = state, n, l.Site(), l.Lead().Name, lost[n.Name]
			if n == l.Lead() {
				h.Reached = l.AllowedLocationIPs()
			}
			c.hosts = append(c.hosts, h)
		}
	}
	for i := range c.topology.Peers {
		q := &c.topology.Peers[i]
		h := *s.hosts["peer/"+q.Name]
		h.State = PeerState(c.topology, *q, s.secrets[h.Name], 51822)
		h.Peer, h.Location, h.Gate = q, h.Name, h.Name
		c.hosts = append(c.hosts, h)
	}
	return nil
}

// heard returns where each host's device sends to its peers after all that can
// reach it have spoken: where they come from, else their endpoints.
func (w *World) heard() map[string]map[mesh.PublicKey]netip.Addr {
	out := make(map[string]map[mesh.PublicKey]netip.Addr, len(w.hosts))
	for i := range w.hosts {
		h := &w.hosts[i]
		addrs := make(map[mesh.PublicKey]netip.Addr, len(h.peers))
		for _, peer := range h.State.Device.Peers {
			to := w.byKey[peer.Key]
			if to == nil {
				continue
			}
			w.w.reset(Packet{})
			if w.w.open(to, h, packet{}) == nil {
				addrs[peer.Key] = to.tunnels[h.id].observed
			} else if peer.Endpoint.IsValid() {
				addrs[peer.Key] = peer.Endpoint.Addr()
			}
		}
		out[h.Name] = addrs
	}
	return out
}

func (c *computed) world() (*World, error) {
	return New(Input{Hosts: c.hosts, Sites: c.sites, Public: publicOf})
}

// prove walks every pair that should talk. It returns how many there are, and
// the first failures.
func (c *computed) prove() (pairs int, failures []error, err error) {
	w, err := c.world()
	if err != nil {
		return 0, nil, err
	}
	w.Pairs(c.inside(), func(p Pair) bool {
		pairs++
		if _, err := w.Check(p); err != nil {
			failures = append(failures, fmt.Errorf("%v, for %v: %w", p.Packet, p.To, err))
		}
		return len(failures) < 3
	})
	return pairs, failures, nil
}

// String says what the scene is, for people.
func (s *scene) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "granularity %s encapsulation %s tunnel %s add-on %q local %t cni %t cilium_tunl %t strict %t\n",
		s.cfg.Granularity, s.cfg.Encapsulation, s.cfg.Tunnel, s.cfg.AddOn, s.cfg.ManageLocal, s.cfg.ManageCNI, s.cilium, s.cfg.StrictEncryption)
	fmt.Fprintf(&b, "WireGuard CIDRs %v leaders %v\n", s.cfg.WireGuardCIDRs, s.leads)
	for _, site := range s.sites {
		fmt.Fprintf(&b, "site %s strict %t forward %v\n", site.Name, site.Strict, site.Forward)
	}
	for _, n := range s.nodes {
		fmt.Fprintf(&b, "node %s location %s lead %t endpoint %s internal %v pods %v keepalive %d alips %v claims %v\n",
			n.Name, n.Location, n.WantsLead, n.Endpoint, n.InternalIPs, n.PodCIDRs, n.PersistentKeepalive, n.AllowedLocationIPs, n.WireGuardIPs)
	}
	for _, q := range s.peers {
		fmt.Fprintf(&b, "peer %s endpoint %s allowed %v keepalive %d\n", q.Name, q.Endpoint, q.AllowedIPs, q.PersistentKeepalive)
	}
	return b.String()
}

// stateOf returns the State of a host, for messages.
func (c *computed) stateOf(name string) string {
	i := slices.IndexFunc(c.hosts, func(h Host) bool { return h.Name == name })
	if i < 0 {
		return ""
	}
	return c.hosts[i].State.String()
}
