// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nettest

import (
	"runtime"
	"testing"
)

// ending is a test that remembers how it was ended.
type ending struct {
	testing.TB
	how string
}

func (e *ending) Fatal(...any) { e.end("failed") }
func (e *ending) Skip(...any)  { e.end("skipped") }

func (e *ending) end(how string) {
	e.how = how
	runtime.Goexit()
}

// how a test that skips is ended.
func how(t *testing.T, skip func(testing.TB, string)) string {
	e := &ending{TB: t, how: "not"}
	done := make(chan struct{})
	go func() {
		defer close(done)
		skip(e, "this is a test")
	}()
	<-done
	return e.how
}

func TestWhereATestMayBeSkipped(t *testing.T) {
	for _, c := range []struct{ ci, vm, anything, kernel string }{
		{"", "", "skipped", "skipped"},
		{"true", "", "failed", "skipped"},
		{"", "true", "skipped", "failed"},
		{"true", "true", "failed", "failed"},
	} {
		t.Setenv("CI", c.ci)
		t.Setenv("KILO_VM", c.vm)
		if got := how(t, Skip); got != c.anything {
			t.Errorf("CI=%q KILO_VM=%q: Skip %s, want %s", c.ci, c.vm, got, c.anything)
		}
		if got := how(t, SkipKernel); got != c.kernel {
			t.Errorf("CI=%q KILO_VM=%q: SkipKernel %s, want %s", c.ci, c.vm, got, c.kernel)
		}
	}
}
