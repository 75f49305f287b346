// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// iptablesOn runs both families' program of a kind, nft or legacy, in the current namespace.
func iptablesOn(t *testing.T, kind string) (v4, v6 func(stdin, suffix string, args ...string) string) {
	t.Helper()
	nettest.SkipInVM(t)
	program := func(name string) func(stdin, suffix string, args ...string) string {
		name += "-" + kind
		if _, err := exec.LookPath(name); err != nil {
			nettest.Skip(t, "there is no program "+name)
		}
		return func(stdin, suffix string, args ...string) string {
			t.Helper()
			return nettest.Must(runProgram(t.Context(), stdin, name+suffix, args...))(t)
		}
	}
	return program("iptables"), program("ip6tables")
}

func accepting(ps ...string) mesh.State {
	var s mesh.State
	for _, p := range ps {
		s.AcceptForward = append(s.AcceptForward, pfx(p))
	}
	return sorted(s)
}

// forwardListing is what iptables -S FORWARD says of our rules.
func forwardListing(ps ...string) (lines []string) {
	for _, p := range ps {
		lines = append(lines,
			`-A FORWARD -s `+p+` -m comment --comment "kilo: forward from `+p+`" -j ACCEPT`,
			`-A FORWARD -d `+p+` -m comment --comment "kilo: forward to `+p+`" -j ACCEPT`)
	}
	return lines
}

func TestForwardRulesInIPTables(t *testing.T) {
	const policy, foreign = "-P FORWARD DROP", `-A FORWARD -s 10.9.0.0/16 -m comment --comment "not ours" -j DROP`
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			nettest.New(t)
			v4, v6 := iptablesOn(t, kind)
			v4("", "", "-P", "FORWARD", "DROP")
			v6("", "", "-P", "FORWARD", "DROP")
			v4("*filter\n"+foreign+"\nCOMMIT\n", "-restore", "--noflush")
			before4, before6 := v4("", "", "-S"), v6("", "", "-S")
			h := newHost(t)
			check := func(s mesh.State, want4, want6 []string) {
				t.Helper()
				want4 = slices.Concat([]string{policy}, want4, []string{foreign})
				if diff := cmp.Diff(want4, strings.Split(strings.TrimSpace(v4("", "", "-S", "FORWARD")), "\n")); diff != "" {
					t.Errorf("iptables (-want +got)\n%s", diff)
				}
				want6 = slices.Concat([]string{policy}, want6)
				if diff := cmp.Diff(want6, strings.Split(strings.TrimSpace(v6("", "", "-S", "FORWARD")), "\n")); diff != "" {
					t.Errorf("ip6tables (-want +got)\n%s", diff)
				}
				mustBeQuiet(t, h, s)
				mustBeQuiet(t, newHost(t), s)
			}
			s := accepting("10.2.1.0/24", "10.2.2.0/23", "192.168.0.1/32", "fd00:2:1::/62")
			all4, all6 := forwardListing("10.2.1.0/24", "10.2.2.0/23", "192.168.0.1/32"), forwardListing("fd00:2:1::/62")
			if changes := mustApply(t, h, s); len(changes) != 2 {
				t.Errorf("changes %v, want one for each family", changes)
			}
			check(s, all4, all6)

			v4("", "", "-D", "FORWARD", "-s", "10.2.1.0/24", "-m", "comment", "--comment", "kilo: forward from 10.2.1.0/24", "-j", "ACCEPT")
			mustApply(t, h, s)
			check(s, all4, all6)

			v6("", "", "-F", "FORWARD")
			mustApply(t, h, s)
			check(s, all4, all6)

			v4(v4("", "-save"), "-restore")
			check(s, all4, all6) // the same rules in the form that the program writes

			less := accepting("10.2.2.0/23", "fd00:2:1::/62")
			v4("", "", "-I", "FORWARD", "5", "-d", "10.2.2.0/23", "-m", "comment", "--comment", "kilo: forward to 10.2.2.0/23", "-j", "ACCEPT") // twice
			mustApply(t, h, less)
			check(less, all4[2:4], all6)

			must(t, newHost(t).CleanUp(t.Context(), true))
			if diff := cmp.Diff(before4+before6, v4("", "", "-S")+v6("", "", "-S")); diff != "" {
				t.Errorf("clean-up (-before +after)\n%s", diff)
			}
			mustBeQuiet(t, h, mesh.State{})
		})
	}
}

func TestForwardRulesLetPacketsPass(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			a, router, b := nettest.Make(t), nettest.Make(t), nettest.Make(t)
			nettest.Veth(t, a, "eth0", "10.2.1.2/24", router, "pods", "10.2.1.1/24")
			nettest.Veth(t, b, "eth0", "10.2.2.2/24", router, "wire", "10.2.2.1/24")
			a.Do(t, func() { nettest.NoErr(t, addRoutes("10.2.1.1", "10.2.2.0/24")) })
			b.Do(t, func() { nettest.NoErr(t, addRoutes("10.2.2.1", "10.2.1.0/24")); echo(t, "10.2.2.2:7") })
			router.Do(t, func() {
				v4, _ := iptablesOn(t, kind)
				must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
				v4("", "", "-P", "FORWARD", "DROP")
			})
			a.Do(t, func() {
				if echoed(t, "10.2.2.2:7") {
					t.Error("an answer although everything is dropped")
				}
			})
			router.Do(t, func() { mustApply(t, newHost(t), accepting("10.2.1.0/24")) })
			a.Do(t, func() {
				if !echoed(t, "10.2.2.2:7") {
					t.Error("no answer")
				}
			})
		})
	}
}

func TestForwardRulesComeBackOnceFlushed(t *testing.T) {
	ns := nettest.New(t)
	v4, v6 := iptablesOn(t, "nft")
	s := accepting("10.2.1.0/24", "fd00:2:1::/64")
	h := newHost(t)
	mustApply(t, h, s)
	keep(t, ns, h, s)
	rules := func(chain string) string { return strings.Join(lines(chain, "kilo: forward"), "\n") }
	await := func(what string) {
		t.Helper()
		nettest.Await(t, what, func() bool {
			return rules(v4("", "", "-S", "FORWARD")) == strings.Join(forwardListing("10.2.1.0/24"), "\n") &&
				rules(v6("", "", "-S", "FORWARD")) == strings.Join(forwardListing("fd00:2:1::/64"), "\n")
		})
	}
	v4("", "", "-P", "FORWARD", "DROP")
	v6("", "", "-P", "FORWARD", "DROP")
	await("rules in the new chains")
	v4("", "", "-F", "FORWARD")
	v6("", "", "-F")
	await("rules in the flushed chains")
}

func TestForwardRulesMakeNoChain(t *testing.T) {
	nettest.New(t)
	before := nettest.World(t)
	s := accepting("10.2.1.0/24", "fd00:2:1::/64")
	h := newHost(t)
	mustBeQuiet(t, h, s)
	if after := nettest.World(t); after != before {
		t.Errorf("there is\n%s\nwant\n%s", after, before)
	}
	for _, v6 := range []bool{false, true} {
		if has := nettest.Must(iptablesOf(v6).has("filter"))(t); has {
			t.Errorf("%s has its table filter now", iptablesOf(v6).program)
		}
	}
}

// Where the only program is one for nf_tables, rules of x_tables cannot be
// reached: that is an error if ours are to be among them, and else not our business.
func TestMissingIPTablesIsExplained(t *testing.T) {
	nettest.New(t)
	v4, _ := iptablesOn(t, "legacy")
	v4("", "", "-P", "FORWARD", "DROP")
	dir := t.TempDir()
	nft := nettest.Must(exec.LookPath("iptables-nft"))(t)
	must(t, os.Symlink(nft, filepath.Join(dir, "iptables")))
	t.Setenv("PATH", dir)
	h := newHost(t)
	_, err := h.Apply(t.Context(), accepting("10.2.1.0/24"))
	if err == nil || !strings.Contains(err.Error(), "install iptables-legacy") {
		t.Errorf("error %v", err)
	}
	mustBeQuiet(t, h, mesh.State{})
	must(t, os.Remove(filepath.Join(dir, "iptables")))
	if _, err := h.Apply(t.Context(), accepting("10.2.1.0/24")); err == nil || !strings.Contains(err.Error(), "install iptables-legacy") {
		t.Errorf("error %v", err)
	}
}

func TestForwardScript(t *testing.T) {
	both := []forwardRule{{prefix: pfx("10.2.1.0/24")}, {pfx("10.2.1.0/24"), true}}
	for name, c := range map[string]struct {
		listed string
		want   []forwardRule
		script string
	}{
		"nothing to do": {strings.Join(append(forwardListing("10.2.1.0/24"), "-P FORWARD DROP"), "\n"), both, ""},
		"all missing": {"-P FORWARD DROP\n", both, `*filter
-I FORWARD -d 10.2.1.0/24 -m comment --comment "kilo: forward to 10.2.1.0/24" -j ACCEPT
-I FORWARD -s 10.2.1.0/24 -m comment --comment "kilo: forward from 10.2.1.0/24" -j ACCEPT
COMMIT
`},
		"one too many": {strings.Join(forwardListing("10.2.1.0/24"), "\n"), both[:1], `*filter
-D FORWARD -d 10.2.1.0/24 -m comment --comment "kilo: forward to 10.2.1.0/24" -j ACCEPT
COMMIT
`},
		"only others'": {`-A FORWARD -m comment --comment "not kilo: forward to 10.2.1.0/24" -j DROP`, nil, ""},
	} {
		script, change := forwardScript(c.listed, c.want)
		if change == nil {
			script = ""
		}
		if diff := cmp.Diff(c.script, script); diff != "" {
			t.Errorf("%s (-want +got)\n%s", name, diff)
		}
	}
}
