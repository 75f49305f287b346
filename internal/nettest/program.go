// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nettest

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// programEnv tells a test binary to be a program instead.
const programEnv = "KILO_NETTEST_PROGRAM"

// Program is the body of a process that a test starts.
type Program func(args []string) error

// Main runs the tests of a package: TestMain calls it. Where Start asked for
// it, the process is one of the programs instead.
func Main(m *testing.M, programs map[string]Program) {
	name, ok := os.LookupEnv(programEnv)
	if !ok {
		os.Exit(m.Run())
	}
	program, ok := programs[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "nettest: no program %q\n", name)
		os.Exit(2)
	}
	if err := program(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Process is a process that a test started.
type Process struct {
	cmd    *exec.Cmd
	output output
	done   chan error
}

// output is written to while others read it.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// String returns what was written so far.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// Start starts one of Main's programs in the current namespace. It is killed
// when the test ends. All threads of a process of its own are inside the
// namespace, which those of the test's are not.
func Start(t testing.TB, program string, args ...string) *Process {
	t.Helper()
	p := &Process{cmd: exec.Command("/proc/self/exe", args...), done: make(chan error, 1)}
	p.cmd.Env = append(os.Environ(), programEnv+"="+program)
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	// The thread that starts it is the test's own, and ends with the test.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	NoErr(t, p.cmd.Start())
	go func() { p.done <- p.cmd.Wait() }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		err := <-p.done
		if t.Failed() {
			t.Logf("output of %s %s (%v):\n%s", program, strings.Join(args, " "), err, p.output.String())
		}
	})
	return p
}

// Signal sends a signal.
func (p *Process) Signal(t testing.TB, s os.Signal) {
	t.Helper()
	NoErr(t, p.cmd.Process.Signal(s))
}

// Wait waits for the process to end.
func (p *Process) Wait() error {
	err := <-p.done
	p.done <- err
	return err
}

// Output returns what the process wrote so far, all of it once Wait returned.
func (p *Process) Output() string { return p.output.String() }
