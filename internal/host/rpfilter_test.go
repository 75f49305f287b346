// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"os"
	"strings"
	"testing"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

func setSysctl(t *testing.T, key, value string) {
	t.Helper()
	must(t, os.WriteFile("/proc/sys/net/"+key, []byte(value), 0))
}

func TestReversePathFilterOfOurLinksIsNotStrict(t *testing.T) {
	for name, c := range map[string]struct{ all, own, want string }{
		"off":                        {"0", "0", "0"},
		"strict for all":             {"1", "0", "2"},
		"strict for the link":        {"0", "1", "2"},
		"loose for all":              {"2", "0", "0"},
		"loose for all but the link": {"2", "1", "1"}, // the greater counts
		"loose for the link":         {"1", "2", "2"},
	} {
		t.Run(name, func(t *testing.T) {
			nettest.New(t)
			nettest.Dummy(t, "eth0", "192.168.1.1/24")
			h, s := newHost(t), vxlanState(1)
			mustApply(t, h, s)
			setSysctl(t, "ipv4/conf/all/rp_filter", c.all)
			setSysctl(t, "ipv4/conf/kilo-vxlan/rp_filter", c.own)
			setSysctl(t, "ipv4/conf/eth0/rp_filter", "1")
			mustApply(t, h, s)
			if got := sysctlOf(t, "ipv4/conf/kilo-vxlan/rp_filter"); got != c.want {
				t.Errorf("rp_filter is %s, want %s", got, c.want)
			}
			if got := sysctlOf(t, "ipv4/conf/eth0/rp_filter"); got != "1" {
				t.Errorf("rp_filter of eth0 is %s; it is not ours", got)
			}
			mustBeQuiet(t, h, s)
			mustBeQuiet(t, newHost(t), s)
		})
	}
}

// What one node encapsulates and the other does not comes in through the tunnel
// link although the way back is another.
func TestPacketsComeThroughTheTunnelThoughAnswersDoNot(t *testing.T) {
	one, two := nettest.Make(t), nettest.Make(t)
	nettest.Veth(t, one, "eth0", "192.168.1.1/24", two, "eth0", "192.168.1.2/24")
	one.Do(t, func() {
		nettest.Dummy(t, "pods", "10.2.9.1/24")
		mustApply(t, newHost(t), vxlanState(1))
	})
	two.Do(t, func() {
		setSysctl(t, "ipv4/conf/all/rp_filter", "1")
		setSysctl(t, "ipv4/conf/default/rp_filter", "1")
		nettest.NoErr(t, addRoutes("192.168.1.1", "10.2.9.0/24"))
		mustApply(t, newHost(t), vxlanState(2))
	})
	if got := source(t, one, two, "10.2.9.1", "10.2.2.0"); got != "10.2.9.1" {
		t.Errorf("came from %s", got)
	}
}

func TestReversePathFilterIsMendedAtOnce(t *testing.T) {
	ns := nettest.New(t)
	nettest.Dummy(t, "eth0", "192.168.1.1/24")
	h, s := newHost(t), vxlanState(1)
	mustApply(t, h, s)
	keep(t, ns, h, s)
	for _, dev := range []string{"kilo-vxlan", "all"} {
		setSysctl(t, "ipv4/conf/kilo-vxlan/rp_filter", "0")
		setSysctl(t, "ipv4/conf/"+dev+"/rp_filter", "1")
		nettest.Await(t, "rp_filter of kilo-vxlan, strict by "+dev, func() bool {
			return sysctlOf(t, "ipv4/conf/kilo-vxlan/rp_filter") == "2"
		})
	}
}

func TestSysctlThatDoesNotTakeIsAnError(t *testing.T) {
	nettest.New(t)
	p := &pass{h: newHost(t), ctx: t.Context(), want: mesh.State{}}
	p.sysctl("net/ipv4/ip_forward", "01") // what the kernel keeps is "1"
	if len(p.errs) != 1 || !strings.Contains(p.errs[0].Error(), `sysctl net.ipv4.ip_forward=01: reads "1" after it was set`) {
		t.Errorf("errors %v", p.errs)
	}
}
