// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// startUnderlay builds the networks of spec without a cluster on them.
func startUnderlay(t *testing.T, spec Spec) *Lab {
	t.Helper()
	if err := CheckMachine(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("with CI=true this test must run: %v", err)
		}
		t.Skipf("SKIPPED, NOT TESTED: %v", err)
	}
	if err := spec.Validate(); err != nil {
		t.Fatal(err)
	}
	p, err := newPlan(spec)
	if err != nil {
		t.Fatal(err)
	}
	l := &Lab{spec: spec, plan: p, start: time.Now()}
	if err := l.claim(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := l.buildInternet(); err != nil {
		t.Fatal(err)
	}
	for _, c := range spec.Clouds {
		if c.Network {
			if err := l.buildCloud(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, h := range spec.Hosts {
		if _, err := l.newHost(h); err != nil {
			t.Fatal(err)
		}
	}
	return l
}

// TestNAT looks at what the internet sees of a private host's WireGuard port.
func TestNAT(t *testing.T) {
	clouds := []CloudSpec{
		{Name: "routed", Network: true, NAT: NATNone},
		{Name: "restricted", Network: true, NAT: NATPortRestricted},
		{Name: "open", Network: true, NAT: NATPortRestricted, OpenInput: true},
		{Name: "symmetric", Network: true, NAT: NATSymmetric},
		{Name: "cone", Network: true, NAT: NATFullCone},
	}
	spec := Spec{Stack: Dual, Clouds: append(clouds, CloudSpec{Name: "public"})}
	for _, h := range []string{"p1", "p2", "p3"} {
		spec.Hosts = append(spec.Hosts, HostSpec{Name: h, Cloud: "public", Public: true})
	}
	for _, c := range clouds {
		spec.Hosts = append(spec.Hosts, HostSpec{Name: "i-" + c.Name, Cloud: c.Name, Private: true})
	}
	l := startUnderlay(t, spec)
	for family, loopback := range []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()} {
		for _, c := range clouds {
			t.Run(fmt.Sprintf("%s/%d", c.Name, []int{4, 6}[family]), func(t *testing.T) {
				inner, outer := l.Host("i-"+c.Name), l.plan.Clouds[c.Name].Uplink[family].Addr()
				if c.NAT == NATNone {
					outer = inner.Addrs()[family]
				}
				in := listenUDP(t, inner, loopback)
				p1, p2, p3 := listenUDP(t, l.Host("p1"), loopback), listenUDP(t, l.Host("p2"), loopback), listenUDP(t, l.Host("p3"), loopback)
				mapped := netip.AddrPortFrom(outer, wireGuardPort)

				// p3 comes first, unasked.
				p3.send(t, mapped)
				unasked := in.receives()
				if want := c.NAT == NATNone || c.NAT == NATFullCone; unasked != want {
					t.Errorf("an unsolicited packet comes in: %v, want %v", unasked, want)
				}
				seen := func(p *udpSocket, host string) netip.AddrPort {
					in.send(t, netip.AddrPortFrom(l.Host(host).Addrs()[family], wireGuardPort))
					from, err := p.receive()
					if err != nil {
						t.Fatalf("%s got nothing from %s: %v", host, inner.Name(), err)
					}
					return from
				}
				at1, at2, at3 := seen(p1, "p1"), seen(p2, "p2"), seen(p3, "p3")
				if at1.Addr() != outer {
					t.Errorf("the packet came from %v, want %v", at1.Addr(), outer)
				}
				if same := at1 == at2; same != (c.NAT != NATSymmetric) {
					t.Errorf("mapped to %v for one destination and to %v for another", at1, at2)
				}
				// Behind an open box the one who came unasked sees another port.
				if wasSpoilt := at3 != at1; c.NAT != NATSymmetric && wasSpoilt != c.OpenInput {
					t.Errorf("p3, which came unasked, sees %v, others see %v", at3, at1)
				}
				p1.send(t, at1)
				if !in.receives() {
					t.Error("the answer did not come in")
				}
			})
		}
	}
}

func TestMTU(t *testing.T) {
	l := startUnderlay(t, Spec{
		Stack: IPv4, MTU: 1400,
		Clouds: []CloudSpec{{Name: "x", Network: true, NAT: NATPortRestricted, MTU: 9000}},
		Hosts:  []HostSpec{{Name: "x1", Cloud: "x", Private: true, Public: true}},
	})
	for link, want := range map[string]int{publicLink: 1400, privateLink: 9000} {
		err := l.Host("x1").Do(func() error {
			k, err := netlink.LinkByName(link)
			if err == nil && k.Attrs().MTU != want {
				err = fmt.Errorf("MTU %d, want %d", k.Attrs().MTU, want)
			}
			return err
		})
		if err != nil {
			t.Errorf("link %s: %v", link, err)
		}
	}
}

// TestHostsHaveFilesOfTheirOwn: what one host writes, neither another nor the machine sees.
func TestHostsHaveFilesOfTheirOwn(t *testing.T) {
	l := startUnderlay(t, Spec{
		Stack: IPv4, Clouds: []CloudSpec{{Name: "x"}},
		Hosts: []HostSpec{{Name: "x1", Cloud: "x", Public: true}, {Name: "x2", Cloud: "x", Public: true}},
	})
	const name = "kilolab-test"
	for _, dir := range []string{"/run", "/run/wireguard", "/var/run/wireguard", "/etc", "/etc/cni/net.d", "/var/lib/kilo", "/var/lib/cni"} {
		path := filepath.Join(dir, name)
		if err := l.Host("x1").Do(func() error { return os.WriteFile(path, nil, 0o644) }); err != nil {
			t.Error(err)
		}
		_ = l.Host("x2").Do(func() error {
			if _, err := os.Stat(path); err == nil {
				t.Errorf("another host sees %s", path)
			}
			return nil
		})
		if _, err := os.Stat(path); err == nil {
			t.Errorf("the machine sees %s", path)
		}
	}
	if _, err := os.Stat(filepath.Join(l.Host("x1").Dir(), "wireguard", name)); err != nil {
		t.Errorf("the host's /run/wireguard is not in its directory: %v", err)
	}
}

// udpSocket is a host's WireGuard port.
type udpSocket struct{ net.PacketConn }

func listenUDP(t *testing.T, h *Host, family netip.Addr) *udpSocket {
	t.Helper()
	network := "udp4"
	if family.Is6() {
		network = "udp6"
	}
	var conn net.PacketConn
	err := inNetns(h.Netns(), func() (err error) {
		var config net.ListenConfig
		conn, err = config.ListenPacket(context.Background(), network, fmt.Sprintf(":%d", wireGuardPort))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &udpSocket{conn}
}

func (s *udpSocket) send(t *testing.T, to netip.AddrPort) {
	t.Helper()
	if _, err := s.WriteTo([]byte("hello"), net.UDPAddrFromAddrPort(to)); err != nil {
		t.Fatal(err)
	}
}

func (s *udpSocket) receive() (netip.AddrPort, error) {
	_ = s.SetReadDeadline(time.Now().Add(300 * time.Millisecond)) // reading shows if it has passed
	_, from, err := s.ReadFrom(make([]byte, 100))
	if err != nil {
		return netip.AddrPort{}, err
	}
	ap := from.(*net.UDPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

func (s *udpSocket) receives() bool {
	_, err := s.receive()
	return err == nil
}
