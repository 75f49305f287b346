// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// putProgram makes a shell script the only program there is.
func putProgram(t *testing.T, name, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
}

func TestFailedFetchIsExplainedAndLeavesNothing(t *testing.T) {
	for script, want := range map[string]string{
		"echo nothing listens >&2; exit 100": "apt-get update: exit status 100\nnothing listens",
		"exit 0":                             `apt-cache ` + kernelPackage + `: exec: "apt-cache": executable file not found in $PATH`,
	} {
		putProgram(t, "apt-get", script)
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

func TestNothingIsFetchedTwice(t *testing.T) {
	putProgram(t, "apt-get", "exit 1")
	if err := Fetch(t.Context(), t.TempDir(), io.Discard); err != nil {
		t.Error(err)
	}
}
