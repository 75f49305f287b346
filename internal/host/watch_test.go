// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// keeper applies a State whenever the watched kernel has changed.
type keeper struct {
	mu      sync.Mutex
	changes []string
	passes  int
	errs    []error
}

// keep watches the current namespace until the test ends.
func keep(t *testing.T, ns *nettest.NS, h *Host, s mesh.State) *keeper {
	t.Helper()
	k := &keeper{}
	poked, started, watched := make(chan struct{}, 1), make(chan struct{}), make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		all.Wait()
		if err := <-watched; err != nil {
			t.Errorf("Watch: %v", err)
		}
	})
	ns.Go(t, &all, func() {
		watched <- h.Watch(ctx, func() { close(started) }, func() {
			select {
			case poked <- struct{}{}:
			default:
			}
		})
	})
	<-started
	ns.Go(t, &all, func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-poked:
			}
			k.mu.Lock()
			changes, err := h.Apply(ctx, s)
			k.passes++
			k.changes = append(k.changes, texts(changes)...)
			if err != nil && ctx.Err() == nil {
				k.errs = append(k.errs, err)
			}
			k.mu.Unlock()
		}
	})
	return k
}

// await waits until the namespace is as wanted, and returns the changes that made it so.
func (k *keeper) await(t *testing.T, want, what string) (changes []string) {
	t.Helper()
	nettest.Await(t, what, func() bool {
		k.mu.Lock() // no pass is under way
		defer k.mu.Unlock()
		if nettest.World(t) != want {
			return false
		}
		changes, k.changes = k.changes, nil
		return true
	})
	return changes
}

func TestWhatOthersDoToOurStateIsUndone(t *testing.T) {
	eachDevice(t, testWhatOthersDoToOurStateIsUndone)
}

func testWhatOthersDoToOurStateIsUndone(t *testing.T, makeDevice func(*testing.T)) {
	ns := nettest.New(t)
	uplink(t)
	makeDevice(t)
	s := join(fullState(), vxlanState(1))
	h := newHost(t)
	mustApply(t, h, s)
	want := nettest.World(t)
	k := keep(t, ns, h, s)
	routes := nettest.Must(netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: RouteProtocol}, netlink.RT_FILTER_PROTOCOL))(t)
	route := routes[slices.IndexFunc(routes, func(r netlink.Route) bool { return r.Dst.String() == "10.2.1.0/24" })]
	for _, c := range []struct {
		name string
		do   func() error
		// undone begin the changes that are made, and no other is.
		undone []string
	}{
		{"a route is deleted", func() error { return netlink.RouteDel(&route) }, []string{"ip route add 10.2.1.0/24"}},
		{"a route is replaced", func() error {
			other := route
			other.Gw = ip("10.4.0.9").AsSlice()
			return netlink.RouteReplace(&other)
		}, []string{"ip route replace 10.2.1.0/24"}},
		{"a rule is deleted", func() error {
			rules, err := netlink.RuleList(netlink.FAMILY_V6)
			if err != nil {
				return err
			}
			i := slices.IndexFunc(rules, func(r netlink.Rule) bool { return r.Protocol == RouteProtocol && r.Src != nil })
			return netlink.RuleDel(&rules[i])
		}, []string{"ip rule add pref 1107 from fd00:2:2::/64"}},
		{"the table is deleted", func() error {
			c, err := nftables.New()
			if err != nil {
				return err
			}
			c.DelTable(kiloTable())
			return c.Flush()
		}, []string{"nft add table inet kilo"}},
		{"a set is flushed", func() error {
			c, err := nftables.New()
			if err != nil {
				return err
			}
			c.FlushSet(nftSet(fwSet{name: "known4"}))
			return c.Flush()
		}, []string{"nft replace set inet kilo known4"}},
		{"an address is deleted", func() error {
			return netlink.AddrDel(linkByName(t, "kilo0"), &netlink.Addr{IPNet: ipNet(pfx("fd10:4::1/64"))})
		}, []string{"ip addr add fd10:4::1/64", "ip route add fd00:2:1::/64"}},
		{"an address is added", func() error {
			return netlink.AddrAdd(linkByName(t, "kilo0"), &netlink.Addr{IPNet: ipNet(pfx("10.99.0.1/32"))})
		}, []string{"ip addr del 10.99.0.1/32"}},
		{"an MTU is changed", func() error { return netlink.LinkSetMTU(linkByName(t, "kilo0"), 1300) }, []string{"ip link set kilo0 mtu"}},
		{"the tunnel link is deleted", func() error { return netlink.LinkDel(linkByName(t, "kilo-vxlan")) }, []string{
			"ip link add kilo-vxlan", "ip addr add 10.2.1.0/32", "ip addr add fd00:1::/128", "ip link set kilo-vxlan up", "neigh", "ip route add 10.2.2.0/24", "ip route add fd00:2::/64",
			"add neigh", "replace neigh",
		}},
	} {
		must(t, c.do())
		for _, change := range k.await(t, want, "end of: "+c.name) {
			if !slices.ContainsFunc(c.undone, func(start string) bool { return strings.HasPrefix(change, start) }) {
				t.Errorf("%s: %s", c.name, change)
			}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.errs) > 0 {
		t.Errorf("errors %v", k.errs)
	}
}

// What pods and other programs do all the time costs no pass, nor does what Apply writes.
func TestWhatIsNotOursCausesNoPass(t *testing.T) {
	ns := nettest.New(t)
	uplink(t)
	startWireGuard(t)
	s := fullState()
	h := newHost(t)
	mustApply(t, h, s)
	want := nettest.World(t)
	k := keep(t, ns, h, s)
	eth := nettest.Must(netlink.LinkByName("eth0"))(t)
	foreign := &netlink.Route{Dst: ipNet(pfx("10.99.0.0/24")), LinkIndex: eth.Attrs().Index, Protocol: 42}
	for range 100 {
		must(t, netlink.RouteAdd(foreign))
		must(t, netlink.RouteDel(foreign))
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "pod0"
	pod := &netlink.Veth{LinkAttrs: attrs, PeerName: "pod1"}
	must(t, netlink.LinkAdd(pod))
	must(t, netlink.LinkSetUp(pod))
	must(t, netlink.LinkDel(pod))
	renewed := &netlink.Addr{IPNet: ipNet(pfx("192.168.1.1/24")), ValidLft: 1000, PreferedLft: 1000}
	must(t, netlink.AddrReplace(eth, renewed))
	rules := nettest.Must(netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: RouteProtocol}, netlink.RT_FILTER_PROTOCOL))(t)
	must(t, netlink.RouteDel(&rules[0])) // the only thing that counts
	k.await(t, want, "the route")
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.passes != 1 || len(k.errs) > 0 {
		t.Errorf("%d passes, errors %v; want 1 and none", k.passes, k.errs)
	}
}

// Facts have changed, and only the owner of the loop can tell what follows.
func TestNewAddressesAndDefaultRoutesAreTold(t *testing.T) {
	ns := nettest.New(t)
	uplink(t)
	startWireGuard(t)
	s := fullState()
	h := newHost(t)
	mustApply(t, h, s)
	k := keep(t, ns, h, s)
	eth := nettest.Must(netlink.LinkByName("eth0"))(t)
	passes := func() int {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.passes
	}
	for name, do := range map[string]func() error{
		"address": func() error { return netlink.AddrAdd(eth, &netlink.Addr{IPNet: ipNet(pfx("198.51.100.7/24"))}) },
		"default route": func() error {
			return netlink.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: ip("192.168.1.254").AsSlice()})
		},
		"MTU":        func() error { return netlink.LinkSetMTU(eth, 1400) },
		"forwarding": func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) },
	} {
		before := passes()
		must(t, do())
		nettest.Await(t, "a pass after a change of "+name, func() bool { return passes() > before })
	}
}
