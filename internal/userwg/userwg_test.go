// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userwg

import (
	"context"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl"

	"github.com/kilomesh/kilo/internal/nettest"
)

func TestMain(m *testing.M) {
	nettest.Main(m, map[string]nettest.Program{
		"userwg": func(args []string) error {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
			defer stop()
			return Run(ctx, Config{Interface: args[0], MTU: 1380})
		},
	})
}

const socket = socketDir + "/kilo0.sock"

func start(t *testing.T) *nettest.Process {
	t.Helper()
	p := nettest.Start(t, "userwg", "kilo0")
	nettest.Await(t, "control socket", answers)
	return p
}

// answers reports whether the control socket is served.
func answers() bool {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return false
	}
	return c.Close() == nil
}

func TestRunServesADeviceAndLeavesNothing(t *testing.T) {
	nettest.New(t)
	before := nettest.World(t)
	p := start(t)
	l := nettest.Must(netlink.LinkByName("kilo0"))(t)
	if l.Attrs().Alias != Alias || l.Attrs().MTU != 1380 || l.Attrs().Flags&net.FlagUp != 0 {
		t.Errorf("link %+v", l.Attrs())
	}
	wg := nettest.Must(wgctrl.New())(t)
	defer wg.Close()
	d := nettest.Must(wg.Device("kilo0"))(t)
	if len(d.Peers) != 0 {
		t.Errorf("peers %v", d.Peers)
	}
	if mode := nettest.Must(os.Stat(socket))(t).Mode().Perm(); mode != 0o600 {
		t.Errorf("mode of the socket %o", mode)
	}
	p.Signal(t, syscall.SIGTERM)
	nettest.NoErr(t, p.Wait())
	if after := nettest.World(t); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("socket: %v", err)
	}
}

func TestRunReplacesASocketThatNobodyServes(t *testing.T) {
	nettest.New(t)
	p := start(t)
	p.Signal(t, syscall.SIGKILL)
	_ = p.Wait()
	if _, err := os.Stat(socket); err != nil {
		t.Fatalf("the test is in vain: %v", err)
	}
	start(t)
}

func TestRunRefusesALinkThatIsServed(t *testing.T) {
	nettest.New(t)
	start(t)
	second := nettest.Start(t, "userwg", "kilo0")
	if err := second.Wait(); err == nil || !strings.Contains(second.Output(), "create TUN link kilo0: another process serves it") {
		t.Errorf("error %v, output %s", err, second.Output())
	}
	if !answers() {
		t.Error("the first one does not answer any more")
	}
}

func TestRunEndsWithTheDevice(t *testing.T) {
	nettest.New(t)
	p := start(t)
	nettest.NoErr(t, netlink.LinkDel(nettest.Must(netlink.LinkByName("kilo0"))(t)))
	if err := p.Wait(); err == nil || !strings.Contains(p.Output(), "link kilo0: the device stopped") {
		t.Errorf("error %v, output %s", err, p.Output())
	}
}

func TestRunRefusesALinkOfAnotherType(t *testing.T) {
	nettest.New(t)
	nettest.Dummy(t, "kilo0")
	p := nettest.Start(t, "userwg", "kilo0")
	if err := p.Wait(); err == nil || !strings.Contains(p.Output(), "there is a link of that name that is no TUN") {
		t.Errorf("error %v, output %s", err, p.Output())
	}
}
