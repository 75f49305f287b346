// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Process is a program that the lab started, with its log in a file.
type Process struct {
	// Name is the program's in the lab: "kg", "etcd".
	Name string
	// PID of the program.
	PID int
	// LogPath is the file of its stdout and stderr. Starting again appends to it.
	LogPath string

	exited chan struct{}
	mu     sync.Mutex
	err    error
}

// command describes a program to start.
type command struct {
	name    string
	args    []string
	env     []string // added to the lab's own
	logPath string
	// detached programs outlive the lab's process.
	detached bool
}

// start starts c on the thread.
func (t *thread) start(c command) (*Process, error) {
	if err := os.MkdirAll(filepath.Dir(c.logPath), 0o755); err != nil {
		return nil, err
	}
	log, err := os.OpenFile(c.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer discard(log) // the program has its own
	cmd := exec.Command(c.args[0], c.args[1:]...)
	cmd.Env = append(os.Environ(), c.env...)
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	// A session of its own: Ctrl-C is for the lab, which ends its programs in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if !c.detached {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	if err := t.do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	p := &Process{Name: c.name, PID: cmd.Process.Pid, LogPath: c.logPath, exited: make(chan struct{})}
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(p.exited)
	}()
	return p, nil
}

// Exited is closed when the program has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Running reports whether the program has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// Stop sends sig and waits until the program has ended, which is an error
// after the bound: then the program is killed.
func (p *Process) Stop(sig syscall.Signal, bound time.Duration) error {
	if !p.Running() {
		return nil
	}
	if err := syscall.Kill(p.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal %s: %w", p.Name, err)
	}
	select {
	case <-p.exited:
		return nil
	case <-time.After(bound):
	}
	_ = syscall.Kill(p.PID, syscall.SIGKILL)
	<-p.exited
	return fmt.Errorf("%s did not end within %v of %v and was killed; log: %s", p.Name, bound, sig, p.LogPath)
}

// alive returns an error that names the end of the log if the program has ended.
func (p *Process) alive() error {
	if p.Running() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	state := "exit status 0"
	if p.err != nil {
		state = p.err.Error()
	}
	return fmt.Errorf("%s has ended (%s): %s; log: %s", p.Name, state, lastLine(p.LogPath), p.LogPath)
}

// lastLine returns the last line of a log, shortened.
func lastLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return "no log"
	}
	s := strings.TrimSpace(string(b))
	s = s[strings.LastIndexByte(s, '\n')+1:]
	if len(s) > 400 {
		s = s[:400] + "..."
	}
	return s
}

// run runs a program to its end on the thread, with the caller's terminal, and
// returns its exit status. Ctrl-C reaches the program itself.
func (t *thread) run(ctx context.Context, args, env []string) (int, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := t.do(cmd.Start); err != nil {
		return 0, err
	}
	err := cmd.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if code := exit.ExitCode(); code >= 0 {
			return code, nil
		}
		return 128 + int(exit.Sys().(syscall.WaitStatus).Signal()), nil
	}
	return 0, err
}

// output runs a program to its end on the thread and returns what it printed.
func (t *thread) output(ctx context.Context, args []string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := t.do(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), err
}
