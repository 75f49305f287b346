// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kilomesh/kilo/lab"
	"github.com/kilomesh/kilo/lab/labtest"
)

// tableBound is how long a mesh may take to the full table, as the demo promises.
const tableBound = 60 * time.Second

func TestDemo(t *testing.T) {
	for _, stack := range []lab.Stack{lab.IPv4, lab.IPv6, lab.Dual} {
		t.Run("stack="+string(stack), func(t *testing.T) {
			l := labtest.Start(t, lab.Demo(stack))
			m := waitMatrix(t, l)
			want := 14 * 7
			if stack == lab.Dual {
				want *= 2
			}
			if len(m.Cells) != want {
				t.Errorf("the table has %d cells, want %d", len(m.Cells), want)
			}
			checkLinks(t, l, checkLeaders(t, l))
		})
	}
}

// checkLeaders: each public node of "a" leads itself, b1 is annotated, and of "c",
// whose nodes are equal, one leads: which came first. It returns the names of the leaders.
func checkLeaders(t *testing.T, l *lab.Lab) []string {
	t.Helper()
	leaders, err := l.Leaders(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got, names []string
	ips := map[string]string{}
	for _, leader := range leaders {
		got = append(got, leader.Location+"/"+leader.Node)
		names = append(names, leader.Node)
		for _, ip := range leader.WireGuardIPs {
			if other, ok := ips[ip]; ok {
				t.Errorf("%s and %s have the WireGuard IP %s", leader.Node, other, ip)
			}
			ips[ip] = leader.Node
		}
	}
	slices.Sort(got)
	const first, second = "a/a1 a/a2 b/b1 c/c1", "a/a1 a/a2 b/b1 c/c2"
	if s := strings.Join(got, " "); s != first && s != second {
		t.Errorf("leaders are %s, want %s or %s", s, first, second)
	}
	return names
}

// checkLinks: every leader has a link with a handshake to every other, nobody else has any.
func checkLinks(t *testing.T, l *lab.Lab, leaders []string) {
	t.Helper()
	links, err := l.Links(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, k := range links {
		got = append(got, k.From+"-"+k.To)
		if k.Handshake < 0 {
			t.Errorf("link %s → %s has no handshake", k.From, k.To)
		}
	}
	var want []string
	for _, from := range leaders {
		for _, to := range leaders {
			if from != to {
				want = append(want, from+"-"+to)
			}
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("links are %v, want %v", got, want)
	}
}

func waitMatrix(t *testing.T, l *lab.Lab) lab.Matrix {
	t.Helper()
	m, err := l.WaitMatrix(t.Context(), tableBound)
	if err != nil {
		var b strings.Builder
		_ = m.Write(&b) // into memory
		t.Fatalf("%v\n%s", err, b.String())
	}
	return m
}

// waitFor fails the test unless check returns nil within bound.
func waitFor(t *testing.T, what string, bound time.Duration, check func(context.Context) error) {
	t.Helper()
	if err := lab.WaitFor(t.Context(), what, bound, check); err != nil {
		t.Fatal(err)
	}
}

// hasRoutes returns an error unless the host has routes of kg's to all pods of
// other, or to none of them.
func hasRoutes(h, other *lab.Host, want bool) error {
	routes, err := h.KiloRoutes()
	if err != nil {
		return err
	}
	for _, c := range other.PodCIDRs() {
		if slices.Contains(routes, c) != want {
			return fmt.Errorf("routes of %s to %v of %s: %v, want %v", h.Name(), c, other.Name(), !want, want)
		}
	}
	return nil
}

// others returns the hosts of l but one.
func others(l *lab.Lab, but *lab.Host) []*lab.Host {
	return slices.DeleteFunc(l.Hosts(), func(h *lab.Host) bool { return h == but })
}
