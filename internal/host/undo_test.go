// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kilomesh/kilo/internal/nettest"
)

// sysctlsOf reads those that Apply may set.
func sysctlsOf(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, key := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding", "net/ipv6/conf/eth0/forwarding", "net/ipv6/conf/eth0/accept_ra", "net/ipv4/conf/kilo0/rp_filter"} {
		out[key] = strings.TrimSpace(string(nettest.Must(os.ReadFile("/proc/sys/" + key))(t)))
	}
	return out
}

func TestCleanUpRestoresSysctlsAndDeletesFilesThatWeMade(t *testing.T) {
	nettest.New(t)
	uplink(t)
	startWireGuard(t)
	setSysctl(t, "ipv4/conf/all/rp_filter", "1")
	dir := t.TempDir()
	withFile := func(c *Config) { c.UndoFile = filepath.Join(dir, "state", "undo.json") }
	before := sysctlsOf(t)
	h := newHost(t, withFile)
	mustApply(t, h, fullState())
	if diff := cmp.Diff(before, sysctlsOf(t)); diff == "" {
		t.Error("nothing was set")
	}
	made, old := filepath.Join(dir, "made.conflist"), filepath.Join(dir, "old.conflist")
	must(t, os.WriteFile(old, []byte(bridge4), 0o644))
	for _, path := range []string{made, old} {
		must(t, h.WriteCNI(path, []netip.Prefix{pfx("10.2.1.0/24")}, 1420))
	}
	mustBeQuiet(t, newHost(t, withFile), fullState())
	must(t, newHost(t, withFile).CleanUp(t.Context(), false)) // of another process
	if diff := cmp.Diff(before, sysctlsOf(t)); diff != "" {
		t.Errorf("sysctls (-before +after)\n%s", diff)
	}
	if _, err := os.Stat(made); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file that we made: %v", err)
	}
	if _, err := os.Stat(old); err != nil {
		t.Errorf("the file that was there: %v", err)
	}
	if left := nettest.Must(os.ReadDir(filepath.Join(dir, "state")))(t); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestCleanUpLeavesSysctlsThatOthersSetSince(t *testing.T) {
	nettest.New(t)
	uplink(t)
	startWireGuard(t)
	withFile := func(c *Config) { c.UndoFile = filepath.Join(t.TempDir(), "undo.json") }
	h := newHost(t, withFile)
	setSysctl(t, "ipv6/conf/eth0/accept_ra", "1")
	mustApply(t, h, fullState())
	setSysctl(t, "ipv6/conf/eth0/accept_ra", "0")
	must(t, h.CleanUp(t.Context(), false))
	if got := sysctlsOf(t)["net/ipv6/conf/eth0/accept_ra"]; got != "0" {
		t.Errorf("accept_ra is %s, want what another set", got)
	}
}

func TestABrokenUndoFileIsAnErrorAndNothingIsSet(t *testing.T) {
	nettest.New(t)
	uplink(t)
	startWireGuard(t)
	path := filepath.Join(t.TempDir(), "undo.json")
	must(t, os.WriteFile(path, []byte("{"), 0o600))
	h := newHost(t, func(c *Config) { c.UndoFile = path })
	before := sysctlsOf(t)
	if _, err := h.Apply(t.Context(), fullState()); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v, want one that names the file", err)
	}
	if diff := cmp.Diff(before, sysctlsOf(t)); diff != "" {
		t.Errorf("sysctls (-before +after)\n%s", diff)
	}
}
