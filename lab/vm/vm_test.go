// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// fetched is where `make vm-test` puts the kernel and qemu.
const fetched = "../../bin/vm"

// programs are what the test binary is when its first argument names one.
var programs = map[string]func() error{
	"report": func() error {
		wd, err := os.Getwd()
		if err != nil {
			return err
		}
		text, err := os.ReadFile("testdata/hello.txt")
		if err != nil {
			return err
		}
		version, err := exec.Command("nft", "--version").Output()
		if err != nil {
			return err
		}
		fmt.Printf("%s %q %s=%s mark=%s %s%s", wd, os.Args[2:], Env, os.Getenv(Env), os.Getenv("VM_TEST_MARK"), text, version[:len("nftables")])
		return errors.New("told")
	},
	"flood": func() error {
		_, err := os.Stdout.Write(bytes.Repeat([]byte("0123456789abcde\n"), 1<<16))
		return err
	},
	"kill": func() error { return syscall.Kill(os.Getpid(), syscall.SIGKILL) },
	"panic": func() error {
		return os.WriteFile("/proc/sysrq-trigger", []byte("c"), 0) // crash
	},
	"hang": func() error {
		fmt.Println("here")
		select {}
	},
	// outside runs a machine, like lab does.
	"outside": func() error {
		path, err := os.Executable()
		if err != nil {
			return err
		}
		_, err = Run(context.Background(), options(os.Stdout, os.Stderr), path, "hang")
		return err
	},
}

func TestMain(m *testing.M) {
	if os.Getpid() == 1 {
		fmt.Fprintln(os.Stderr, Init())
	}
	if len(os.Args) > 1 && programs[os.Args[1]] != nil {
		if err := programs[os.Args[1]](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(9)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func options(stdout, stderr io.Writer) Options {
	return Options{
		Dir: fetched, Init: []string{"/proc/self/exe"}, With: []string{"nft"}, CPUs: 1, Memory: 256,
		Timeout: 5 * time.Minute, Stdout: stdout, Stderr: stderr,
	}
}

func requireFetched(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(fetched); err != nil {
		text := "NOT TESTED: run `make vm-test`: " + err.Error()
		if os.Getenv("CI") == "true" {
			t.Fatal(text)
		}
		fmt.Fprintf(os.Stderr, "%s: %s\n", t.Name(), text)
		t.Skip(text)
	}
}

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func TestProgramRunsAsItWouldOutside(t *testing.T) {
	requireFetched(t)
	t.Setenv("VM_TEST_MARK", "7")
	var stdout, stderr bytes.Buffer
	code, err := Run(t.Context(), options(&stdout, &stderr), self(t), "report", "a b", `"`)
	if err != nil {
		t.Fatal(err)
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%s %q KILO_VM=true mark=7 hello\nnftables", wd, []string{"a b", `"`})
	if code != 9 || stdout.String() != want || stderr.String() != "told\n" {
		t.Errorf("exit status %d, stdout %q, stderr %q; want 9, %q, %q", code, stdout.String(), stderr.String(), want, "told\n")
	}
}

func TestEndsOfAMachine(t *testing.T) {
	requireFetched(t)
	for _, c := range []struct {
		program string
		code    int
		stdout  string
		err     string
	}{
		{program: "flood", stdout: strings.Repeat("0123456789abcde\n", 1<<16)},
		{program: "kill", code: 128 + 9},
		{program: "panic", err: "virtual machine: it ended without an exit status; the end of its console:\n"},
	} {
		t.Run(c.program, func(t *testing.T) {
			t.Parallel()
			var stdout bytes.Buffer
			code, err := Run(t.Context(), options(&stdout, io.Discard), self(t), c.program)
			if (c.err == "") != (err == nil) || err != nil && !strings.HasPrefix(err.Error(), c.err) {
				t.Fatalf("error %v, want %q", err, c.err)
			}
			if code != c.code || stdout.String() != c.stdout {
				t.Errorf("exit status %d and %d bytes, want %d and %d, and the same text", code, stdout.Len(), c.code, len(c.stdout))
			}
		})
	}
}

// when calls f at the first write.
type when struct{ f func() }

func (w *when) Write(p []byte) (int, error) {
	w.f()
	return len(p), nil
}

func TestInterruptEndsTheMachine(t *testing.T) {
	requireFetched(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := Run(ctx, options(&when{cancel}, io.Discard), self(t), "hang"); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}

func TestMachineIsKilledAfterItsTime(t *testing.T) {
	requireFetched(t)
	o := options(io.Discard, io.Discard)
	o.Timeout = time.Nanosecond
	if _, err := Run(t.Context(), o, self(t), "hang"); err == nil || err.Error() != "the program has not ended after 1ns" {
		t.Errorf("error %v", err)
	}
}

func TestMachineDiesWithTheProcessThatRunsIt(t *testing.T) {
	requireFetched(t)
	cmd := exec.Command(self(t), "outside")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(stdout, make([]byte, 4)); err != nil {
		t.Errorf("nothing said in the machine: %v", err)
	}
	children := childrenOf(t, cmd.Process.Pid)
	if len(children) != 1 {
		t.Errorf("children %v, want qemu", children)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	for _, pid := range children {
		await(t, fmt.Sprintf("end of process %d", pid), func() bool { return syscall.Kill(pid, 0) != nil })
	}
}

// childrenOf returns the processes that a process has started.
func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for word := range strings.FieldsSeq(string(b)) {
			n, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, n)
		}
	}
	return out
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	const most, step = 20 * time.Second, 5 * time.Millisecond
	for end := time.Now().Add(most); !ok(); time.Sleep(step) {
		if time.Now().After(end) {
			t.Fatalf("gave up after %s: %s", most, what)
		}
	}
}
