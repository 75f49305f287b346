// SPDX-License-Identifier: Apache-2.0

// Package labtest runs labs for tests: they end with the test, whatever
// happens, and a test that fails shows what the agents logged.
//
// With KILOLAB_LOGS set, the logs of a failed test go to a directory below it
// that is called after the test.
package labtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kilomesh/kilo/lab"
	"github.com/kilomesh/kilo/lab/vm"
)

// tailLines of each agent's log are shown.
const tailLines = 25

// Require skips the test on machines where no lab can run, and fails it there
// if CI=true. It fails wherever binaries are missing.
func Require(t testing.TB) {
	t.Helper()
	if err := lab.CheckMachine(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("with CI=true this test must run: %v", err)
		}
		t.Skipf("SKIPPED, NOT TESTED: %v", err)
	}
}

// RequireKernelLinks skips the test where the kernel lacks WireGuard or tunnels
// of IP in IP, and fails it in the machine of `make vm-test`, which has them.
func RequireKernelLinks(t testing.TB) {
	t.Helper()
	Require(t)
	if err := lab.CheckKernelLinks(); err != nil {
		if os.Getenv(vm.Env) == "true" {
			t.Fatalf("in a virtual machine this test must run: %v", err)
		}
		t.Skipf("SKIPPED, NOT TESTED: %v", err)
	}
}

// Start starts a lab that ends with the test.
func Start(t testing.TB, spec lab.Spec) *lab.Lab {
	t.Helper()
	Require(t)
	logs := ""
	if dir := os.Getenv("KILOLAB_LOGS"); dir != "" {
		logs = filepath.Join(dir, strings.ReplaceAll(t.Name(), "/", "-"))
	}
	l, err := lab.Start(t.Context(), spec, lab.Options{Progress: t.Output(), FailureLogs: logs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			showLogs(t, l)
			if logs != "" {
				if err := l.SaveLogs(logs); err != nil {
					t.Error(err)
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func showLogs(t testing.TB, l *lab.Lab) {
	for _, h := range l.Hosts() {
		b, err := os.ReadFile(h.AgentLog())
		if err != nil {
			t.Log(err)
			continue
		}
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		from := max(0, len(lines)-tailLines)
		t.Logf("log of kg on %s, last %d of %d lines:\n%s", h.Name(), len(lines)-from, len(lines), strings.Join(lines[from:], "\n"))
	}
}
