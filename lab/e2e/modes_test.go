// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/kilomesh/kilo/lab"
	"github.com/kilomesh/kilo/lab/labtest"
)

// TestModes: everybody reaches everybody in each way to build a mesh, in both
// families.
func TestModes(t *testing.T) {
	for _, args := range [][]string{
		{"--mesh-granularity=full"},
		{"--mesh-granularity=cross", "--encapsulate=never"},
		{"--encapsulate=always", "--tunnel=vxlan"},
		{"--mesh-granularity=location", "--encapsulate=never"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			spec := lab.Demo(lab.Dual)
			spec.KgArgs = args
			for i := range spec.Hosts {
				// Where every node has tunnels, two behind different NATs would have
				// to punch holes, which the agent does not do yet.
				if h := &spec.Hosts[i]; h.Cloud == "b" {
					h.Public = true
				}
			}
			waitMatrix(t, labtest.Start(t, spec))
		})
	}
}

// TestKernelLinks: kg makes the kernel's own WireGuard and tunnel links, which
// is how it runs in most clusters.
func TestKernelLinks(t *testing.T) {
	labtest.RequireKernelLinks(t)
	spec := lab.Demo(lab.Dual)
	spec.KernelWireGuard = true
	spec.KgArgs = []string{"--encapsulate=always"}
	l := labtest.Start(t, spec)
	waitMatrix(t, l)
	checkLinks(t, l, checkLeaders(t, l))
	b2 := l.Host("b2")
	err := b2.Do(func() error {
		for name, kind := range map[string]string{"kilo0": "wireguard", "tunl0": "ipip", "tunl0-6": "ip6tnl"} {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if link.Type() != kind {
				t.Errorf("%s is a link of type %s, want %s", name, link.Type(), kind)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
