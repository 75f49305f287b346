// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Env is "true" in the environment of programs in a machine.
const Env = "KILO_VM"

// Options of a machine.
type Options struct {
	// Dir is the directory that Fetch filled.
	Dir string
	// Init is the program to be the init process, which calls Init, and its arguments.
	Init []string
	// With names programs in $PATH, files and directories to put into the
	// machine, at their own paths.
	With []string
	// CPUs of the machine, at least 1.
	CPUs int
	// Memory in MiB, which holds the files too.
	Memory int
	// Timeout after which the machine is killed, more than 0.
	Timeout time.Duration
	// Stdout and Stderr get what the program prints.
	Stdout, Stderr io.Writer
}

// job is what a machine is to do.
type job struct {
	Modules []string // paths in the machine, in the order to load them
	Args    []string
	Env     []string
	Dir     string
}

// result is how a job ended.
type result struct {
	Code  int
	Error string // why the program was not run
}

// Run starts a machine, runs the program args[0] in it as root, with this
// process's environment and in its working directory, and returns its exit
// status: 128 and the number of the signal that ended it, if one did.
func Run(ctx context.Context, o Options, args ...string) (int, error) {
	k, err := findKernel(o.Dir)
	if err != nil {
		return 0, err
	}
	qemu, err := findQEMU(o.Dir)
	if err != nil {
		return 0, err
	}
	initrd, err := k.initrd(o, args)
	if err != nil {
		return 0, err
	}
	defer discard(initrd)
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("the program has not ended after %v", o.Timeout))
	defer cancel()
	var status bytes.Buffer
	var console tail
	err = qemu.run(ctx, k, o, initrd, &status, &console)
	var r result
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case err == nil:
		err = json.Unmarshal(status.Bytes(), &r)
	}
	if err == nil && r.Error != "" {
		err = errors.New(r.Error)
	}
	if err != nil {
		return 0, fmt.Errorf("virtual machine: %w; the end of its console:\n%s", err, &console)
	}
	return r.Code, nil
}

// initrd returns the file system to boot, as a file without a name.
func (k *kernel) initrd(o Options, args []string) (*os.File, error) {
	m := newImage()
	order, err := k.order(modules)
	if err != nil {
		return nil, err
	}
	j := job{Dir: "/", Args: args}
	for _, file := range order {
		path := filepath.Join("/modules", filepath.Base(file))
		m.addFile(path, file)
		j.Modules = append(j.Modules, path)
	}
	if j.Args[0], err = m.add(args[0]); err != nil {
		return nil, err
	}
	for _, name := range o.With {
		if _, err := m.add(name); err != nil {
			return nil, err
		}
	}
	if j.Dir, err = os.Getwd(); err != nil {
		return nil, err
	}
	m.addDir(j.Dir)
	if _, err := os.Stat("testdata"); err == nil {
		if _, err := m.add("./testdata"); err != nil {
			return nil, err
		}
	}
	j.Env = append(os.Environ(), Env+"=true", "TMPDIR=/tmp")
	m.addFile(initPath, o.Init[0])
	if err := m.addJSON(jobPath, j); err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("initrd", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "initrd")
	if err := m.write(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// qemu is the program, and its environment.
type qemu struct {
	path string
	args []string
	env  []string
}

// findQEMU finds the one that Fetch unpacked, else the one that is installed.
func findQEMU(dir string) (*qemu, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	q := &qemu{path: filepath.Join(dir, "usr/bin", qemuProgram)}
	if _, err := os.Stat(q.path); err == nil {
		q.args = []string{"-L", filepath.Join(dir, "usr/share/qemu"), "-L", filepath.Join(dir, "usr/share/seabios")}
		q.env = []string{"LD_LIBRARY_PATH=" + filepath.Join(dir, libraryDirs[0]) + ":" + filepath.Join(dir, libraryDirs[1])}
		return q, nil
	}
	q.path, err = exec.LookPath(qemuProgram)
	return q, err
}

// run runs a machine until its program and all that it printed have ended, or
// ctx, and then kills it.
func (q *qemu) run(ctx context.Context, k *kernel, o Options, initrd *os.File, status, console io.Writer) error {
	// Not kvm: inside a virtual machine the device may be there, and hang.
	args := append(q.args,
		"-machine", "pc", "-accel", "tcg", "-cpu", "max", "-smp", strconv.Itoa(o.CPUs), "-m", strconv.Itoa(o.Memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", k.image, "-initrd", "/dev/fd/3", "-append", strings.Join(append([]string{
			"console=ttyS0", "quiet", "loglevel=4", "panic=-1", "rdinit=" + initPath,
			"mitigations=off", "tsc=reliable", "no_timer_check", "--",
		}, o.Init[1:]...), " "),
		"-device", "virtio-serial-pci")
	// Pdeathsig is about the thread that starts the process.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, end := context.WithCancel(ctx)
	defer end()
	var streams, rest errgroup.Group
	cmd := exec.CommandContext(ctx, q.path)
	cmd.ExtraFiles = []*os.File{initrd}
	for _, port := range []struct {
		name string
		to   io.Writer
	}{{"console", console}, {portStdout, o.Stdout}, {portStderr, o.Stderr}, {portStatus, status}} {
		// A pipe, as qemu would empty a file.
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer discard(r)
		defer discard(w)
		cmd.ExtraFiles = append(cmd.ExtraFiles, w)
		args = append(args, "-chardev", fmt.Sprintf("file,id=%s,path=/dev/fd/%d", port.name, 2+len(cmd.ExtraFiles)))
		if port.name == "console" {
			args = append(args, "-serial", "chardev:console")
			rest.Go(func() error {
				_, err := io.Copy(port.to, r)
				return err
			})
			continue
		}
		args = append(args, "-device", fmt.Sprintf("virtserialport,chardev=%s,name=%[1]s", port.name))
		streams.Go(func() error {
			_, err := io.Copy(port.to, httputil.NewChunkedReader(r))
			switch {
			case errors.Is(err, io.ErrUnexpectedEOF):
				return errors.New("it ended without an exit status")
			case err != nil:
				end() // nobody reads any more
			}
			return err
		})
	}
	cmd.Args = append(cmd.Args, args...)
	cmd.Env = append(os.Environ(), q.env...)
	cmd.Stderr = console
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	err := cmd.Start()
	for _, w := range cmd.ExtraFiles[1:] {
		discard(w)
	}
	if err != nil {
		return errors.Join(err, streams.Wait(), rest.Wait())
	}
	var whole bool
	rest.Go(func() error {
		err := streams.Wait()
		if whole = err == nil; whole {
			end() // Init waits for this
		}
		return err
	})
	err = cmd.Wait()
	if failed := rest.Wait(); !whole {
		return errors.Join(failed, err)
	}
	return nil
}

// discard closes a file whose content is no longer wanted.
func discard(c io.Closer) { _ = c.Close() }

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte
}

func (t *tail) Write(p []byte) (int, error) {
	const most = 8 << 10
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-most):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.text))
}
