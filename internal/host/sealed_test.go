// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// segmentSize connects by TCP, and returns the size in bytes of the segments that the client sends.
func segmentSize(t *testing.T, from, to *nettest.NS, addr string) (size uint32) {
	t.Helper()
	var server net.Listener
	to.Do(t, func() { server = nettest.Must(net.Listen("tcp", net.JoinHostPort(addr, "7")))(t) })
	defer server.Close()
	from.Do(t, func() {
		var c net.Conn
		nettest.Await(t, "connection to "+addr, func() (ok bool) {
			var err error
			c, err = net.DialTimeout("tcp", server.Addr().String(), time.Second)
			return err == nil
		})
		defer c.Close()
		raw := nettest.Must(c.(*net.TCPConn).SyscallConn())(t)
		must(t, raw.Control(func(fd uintptr) {
			size = nettest.Must(unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO))(t).Snd_mss
		}))
	})
	return size
}

// Hosts in clouds drop the ICMP messages by which TCP would find out.
func TestSegmentsFitOurLinks(t *testing.T) {
	pod, node, remote := nettest.Make(t), nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, pod, "eth0", "10.2.1.2/24", node, "pods", "10.2.1.1/24")
	nettest.Veth(t, node, "tun0", "10.2.2.1/24", remote, "eth0", "10.2.2.2/24")
	routes := func(via4, via6 string, dsts ...string) {
		for _, dst := range dsts {
			gateway := via4
			if pfx(dst).Addr().Is6() {
				gateway = via6
			}
			nettest.NoErr(t, addRoutes(gateway, dst))
		}
	}
	pod.Do(t, func() {
		nettest.Up(t, "eth0", "fd00:2:1::2/64")
		routes("10.2.1.1", "fd00:2:1::1", "10.2.2.0/24", "fd00:2:2::/64")
	})
	remote.Do(t, func() {
		nettest.Up(t, "eth0", "fd00:2:2::2/64")
		routes("10.2.2.1", "fd00:2:2::1", "10.2.1.0/24", "fd00:2:1::/64")
	})
	node.Do(t, func() {
		nettest.Up(t, "pods", "fd00:2:1::1/64")
		nettest.Up(t, "tun0", "fd00:2:2::1/64")
		must(t, netlink.LinkSetMTU(nettest.Must(netlink.LinkByName("tun0"))(t), 1300))
		s := firewallState(mesh.Firewall{ClampDevs: []string{"tun0"}})
		s.Forward4, s.Forward6 = true, true
		mustApply(t, newHost(t), s)
	})
	for _, c := range []struct {
		from, to *nettest.NS
		addr     string
		headers  uint32
	}{
		{pod, remote, "10.2.2.2", 40},
		{remote, pod, "10.2.1.2", 40},
		{pod, remote, "fd00:2:2::2", 60},
		{remote, pod, "fd00:2:1::2", 60},
	} {
		const timestamps = 12 // an option of each segment (RFC 7323)
		if got, want := segmentSize(t, c.from, c.to, c.addr), 1300-c.headers-timestamps; got != want {
			t.Errorf("segments to %s of %d bytes, want %d", c.addr, got, want)
		}
	}
}

// passes reports whether a datagram from one namespace arrives in the other.
func passes(t *testing.T, from, to *nettest.NS, src, dst string) (ok bool) {
	t.Helper()
	var server net.PacketConn
	to.Do(t, func() { server = nettest.Must(net.ListenPacket("udp", net.JoinHostPort(dst, "7")))(t) })
	defer server.Close()
	from.Do(t, func() {
		c := nettest.Must(net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(ip(src), 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(ip(dst), 7))))(t)
		defer c.Close()
		for range 10 { // neighbour discovery loses one, perhaps
			if _, err := c.Write([]byte("x")); err != nil && !errors.Is(err, unix.EPERM) {
				t.Fatal(err)
			}
			must(t, server.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
			if _, _, err := server.ReadFrom(make([]byte, 1)); err == nil {
				ok = true
				return
			}
		}
	})
	return ok
}

func TestSealedPacketsGoByTheirLinksOnly(t *testing.T) {
	for _, dev := range []string{"tun0", "eth0"} {
		node, other := nettest.Make(t), nettest.Make(t)
		nettest.Veth(t, node, dev, "10.2.1.1/24", other, "eth0", "10.2.2.2/24")
		node.Do(t, func() {
			nettest.Up(t, dev, "fd00:2:1::1/64")
			must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(pfx("10.2.2.0/24")), LinkIndex: nettest.Must(netlink.LinkByName(dev))(t).Attrs().Index}))
			must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(pfx("fd00:2:2::/64")), LinkIndex: nettest.Must(netlink.LinkByName(dev))(t).Attrs().Index}))
			mustApply(t, newHost(t), firewallState(mesh.Firewall{Sealed: []netip.Prefix{pfx("10.2.2.0/24"), pfx("fd00:2:2::/64")}, SealedDevs: []string{"tun0"}}))
		})
		other.Do(t, func() {
			nettest.Up(t, "eth0", "fd00:2:2::2/64")
			must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(pfx("10.2.1.0/24")), LinkIndex: nettest.Must(netlink.LinkByName("eth0"))(t).Attrs().Index}))
			must(t, netlink.RouteAdd(&netlink.Route{Dst: ipNet(pfx("fd00:2:1::/64")), LinkIndex: nettest.Must(netlink.LinkByName("eth0"))(t).Attrs().Index}))
		})
		for _, c := range []struct{ here, there string }{{"10.2.1.1", "10.2.2.2"}, {"fd00:2:1::1", "fd00:2:2::2"}} {
			if got := passes(t, node, other, c.here, c.there); got != (dev == "tun0") {
				t.Errorf("%s to %s by %s passes: %t", c.here, c.there, dev, got)
			}
			if got := passes(t, other, node, c.there, c.here); got != (dev == "tun0") {
				t.Errorf("%s from %s by %s passes: %t", c.here, c.there, dev, got)
			}
		}
	}
}
