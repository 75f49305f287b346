// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// putAptGet makes a shell script apt-get, and the only program there is.
func putAptGet(t *testing.T, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "apt-get"), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
}

func TestFailedFetchIsExplainedAndLeavesNothing(t *testing.T) {
	for script, want := range map[string]string{
		"echo nothing listens >&2; exit 100": "apt-get update: exit status 100\nnothing listens",
		"exit 0":                             `apt-cache ` + kernelPackage + `: exec: "apt-cache": executable file not found in $PATH`,
	} {
		putAptGet(t, script)
		dir := t.TempDir()
		err := Fetch(t.Context(), filepath.Join(dir, "vm"), io.Discard)
		if err == nil || strings.TrimSpace(err.Error()) != want {
			t.Errorf("error %v, want %s", err, want)
		}
		left, err := os.ReadDir(dir)
		if err != nil || len(left) > 0 {
			t.Errorf("left %v, %v", left, err)
		}
	}
}

func TestInterruptedFetchEndsAndLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	started := filepath.Join(t.TempDir(), "started")
	putAptGet(t, ": >"+started+"; exec /bin/sleep 600")
	ctx, cancel := context.WithCancelCause(t.Context())
	want := errors.New("no more time")
	defer cancel(nil)
	done := make(chan error)
	go func() { done <- Fetch(ctx, filepath.Join(dir, "vm"), io.Discard) }()
	await(t, "start of apt-get", func() bool { _, err := os.Stat(started); return err == nil })
	cancel(want)
	if err := <-done; !errors.Is(err, want) {
		t.Errorf("error %v, want %v", err, want)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestRemainsOfAKilledFetchAreNotUsed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "vm")
	for _, old := range []string{dir + ".apt/archives/old.deb", dir + ".part/boot/vmlinuz-old"} {
		if err := os.MkdirAll(old, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	putAptGet(t, `for f in ../archives/*.deb ../../vm.part/boot/*; do [ ! -e "$f" ] || echo "found $f"; done; exit 3`)
	if err := Fetch(t.Context(), dir, io.Discard); err == nil || strings.TrimSpace(err.Error()) != "apt-get update: exit status 3" {
		t.Errorf("error %v, want only the exit status", err)
	}
}

func TestNothingIsFetchedTwice(t *testing.T) {
	putAptGet(t, "exit 1")
	if err := Fetch(t.Context(), t.TempDir(), io.Discard); err != nil {
		t.Error(err)
	}
}
