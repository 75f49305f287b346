// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"fmt"
	"net/netip"

	"github.com/kilomesh/kilo/internal/mesh"
)

// Input is what a World is made of. New keeps references into it.
type Input struct {
	Hosts []Host
	Sites []Site
	// Public derives public keys, which is dear; nil means SecretKey.Public.
	Public func(mesh.SecretKey) (mesh.PublicKey, error)
}

// Host is a machine with a kernel: a node or a VPN peer.
type Host struct {
	Name string
	// Location as the mesh sees it: hosts of one Location may talk in clear.
	Location string
	// Site is the name of the Site that the host is in.
	Site string
	// Gate names the host that carries this one's packets to other locations:
	// the leader, or the host itself.
	Gate string
	// State is what the agent wants of the kernel.
	State mesh.State
	// Links that are not the agent's, in the kernel's order.
	Links []Link
	// Routes that are not the agent's. The agent has none to the same destination (errForeign of internal/host).
	Routes []Route
	// PodCIDRs of the pods on the host.
	PodCIDRs []netip.Prefix
	// Reached are the allowed location IPs that others reach through the host.
	Reached []netip.Prefix
	// Lost are PodCIDRs and addresses of the host that in the mesh are another's.
	Lost []netip.Prefix
	// Node or Peer says what the mesh knows of the host; expectations come from it.
	Node *mesh.Node
	Peer *mesh.Peer
}

// Link is a network link that is not the agent's.
type Link struct {
	Name string
	// Segment names the layer-2 network of an underlay link.
	Segment string
	Addrs   []netip.Prefix
	// Kind is KindIPIP or KindIP6Tnl for another program's tunnel link, else empty.
	Kind mesh.LinkKind
	// Overlay makes it another pod network's tunnel: packets for the gateway go
	// to the host of that name, into its link of the same name.
	Overlay map[netip.Addr]string
}

// Route is a route of table main that is not the agent's.
type Route struct {
	Dst netip.Prefix
	// Via is a gateway, zero for a destination on the link itself.
	Via netip.Addr
	Dev string
}

// Site is a network whose hosts reach each other's addresses without the mesh.
type Site struct {
	Name string
	// Routers are the addresses of the gateways of its segments.
	Routers []netip.Addr
	// Networks are further prefixes; a machine at each address answers to the site's hosts.
	Networks []netip.Prefix
	// NAT are the public addresses that private sources get on the way out, one for each family.
	NAT []netip.Addr
	// Forward are ports of public addresses that lead to hosts of the site.
	Forward map[netip.AddrPort]netip.AddrPort
	// Strict networks drop what is not between addresses of their own hosts, even on one segment.
	Strict bool
}

// World is a mesh of simulated kernels on its underlay. It caches what it
// learns, so it is not for concurrent use. Its Traces share memory: a Trace is
// good until the next walk.
type World struct {
	hosts  []host
	sites  []site
	byName map[string]*host
	byKey  map[mesh.PublicKey]*host
	// public addresses of hosts, and forwarded ports.
	public  map[netip.Addr]*host
	forward map[netip.AddrPort]forwarded
	w       walker
}

type forwarded struct {
	site *site
	to   netip.AddrPort
}

type site struct {
	*Site
	id       int
	routers  map[netip.Addr]bool
	networks table
	owners   map[netip.Addr]*host
	segments map[segmentAddr]*host
}

type segmentAddr struct {
	segment string
	addr    netip.Addr
}

type linkKind uint8

const (
	linkUnderlay linkKind = iota
	linkBridge
	linkWireGuard
	linkTunnel4 // ipip
	linkTunnel6 // ip6tnl
	linkVXLAN
	linkOverlay
)

// link is any link of a host, compiled.
type link struct {
	name    string
	kind    linkKind
	up      bool
	segment string
	addrs   [2][]netip.Prefix
	overlay map[netip.Addr]string
	own     mesh.Link
}

// route is a route of either kind, compiled. link is -1 if there is none of its name.
type route struct {
	via, src netip.Addr
	link     int
	dev      string
}

// host is a Host, compiled. The bridge of its pods is its first link.
type host struct {
	*Host
	id         int
	site       *site
	key        mesh.PublicKey
	links      []link
	local      map[netip.Addr]int
	routes     []route
	tables     [4]table
	rules      [2][]rule
	allowed    table
	peers      []mesh.PublicKey
	neighs     map[netip.Addr]*mesh.Neigh
	pods       table
	masqFrom   table
	masqTo     table
	known      table
	tunnelFrom table
	sealed     table
	wireGuard  int
	tunnels    []tunnelState
	outers     map[netip.Addr]outerResult
}

type rule struct {
	mesh.Rule
	from, to       entry
	hasFrom, hasTo bool
}

// New compiles a World. It fails for input that cannot be meant: names that
// are missing or used twice.
func New(in Input) (*World, error) {
	w := &World{
		hosts: make([]host, len(in.Hosts)), sites: make([]site, len(in.Sites)),
		byName: make(map[string]*host, len(in.Hosts)), byKey: make(map[mesh.PublicKey]*host, len(in.Hosts)),
		public: map[netip.Addr]*host{}, forward: map[netip.AddrPort]forwarded{},
	}
	w.w.World = w
	sites := make(map[string]*site, len(in.Sites))
	for i := range in.Sites {
		s := &w.sites[i]
		*s = site{Site: &in.Sites[i], id: i, routers: map[netip.Addr]bool{}, networks: tableOf(in.Sites[i].Networks), owners: map[netip.Addr]*host{}, segments: map[segmentAddr]*host{}}
		for _, r := range s.Routers {
			s.routers[r] = true
		}
		for from, to := range s.Forward {
			w.forward[from] = forwarded{s, to}
		}
		sites[s.Name] = s
	}
	public := in.Public
	if public == nil {
		public = mesh.SecretKey.Public
	}
	for i := range in.Hosts {
		h := &w.hosts[i]
		*h = host{Host: &in.Hosts[i], id: i, site: sites[in.Hosts[i].Site], wireGuard: -1}
		if h.site == nil {
			return nil, fmt.Errorf("host %s: there is no site %q", h.Name, h.Site)
		}
		if w.byName[h.Name] != nil {
			return nil, fmt.Errorf("host %s: the name is used twice", h.Name)
		}
		w.byName[h.Name] = h
		if secret := h.State.Device.PrivateKey; !secret.IsZero() {
			key, err := public(secret)
			if err != nil {
				return nil, fmt.Errorf("host %s: %w", h.Name, err)
			}
			h.key = key
			w.byKey[key] = h
		}
		h.compile(len(in.Hosts))
		w.settle(h)
	}
	return w, nil
}

// settle tells the underlay of a host's addresses.
func (w *World) settle(h *host) {
	for i := range h.links {
		l := &h.links[i]
		if l.kind != linkUnderlay {
			continue
		}
		for _, ps := range l.addrs {
			for _, p := range ps {
				a := p.Addr()
				h.site.segments[segmentAddr{l.segment, a}] = h
				h.site.owners[a] = h
				if mesh.IsPublic(a) {
					w.public[a] = h
				}
			}
		}
	}
}
