// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	initPath = "/init"
	jobPath  = "/job.json"
)

// The ports of a machine by which Init talks to Run, in chunks (RFC 9112,
// section 7.1), so that the end of each can be told from the machine's.
const (
	portStdout = "stdout"
	portStderr = "stderr"
	portStatus = "status"
)

// Init is the body of a machine's init process: it does what Run asked for and
// waits for Run to end the machine, or switches it off if that failed. It
// returns only an error, if even that did.
func Init() error {
	if os.Getpid() != 1 {
		return errors.New("this is not the init process of a virtual machine")
	}
	err := prepare()
	if err == nil {
		err = work()
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "init: %v\n", err) // the console
	}
	return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// prepare makes the machine what a program expects.
func prepare() error {
	for _, dir := range []string{"/proc", "/sys", "/dev", "/etc", "/opt", "/run", "/tmp", "/var"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	for path, kind := range map[string]string{"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs"} {
		if err := unix.Mount(kind, path, kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", path, err)
		}
	}
	return os.Symlink("/run", "/var/run")
}

// work runs the program and reports its end.
func work() error {
	b, err := os.ReadFile(jobPath)
	if err != nil {
		return err
	}
	var j job
	if err := json.Unmarshal(b, &j); err != nil {
		return fmt.Errorf("%s: %w", jobPath, err)
	}
	for _, path := range j.Modules {
		if err := load(path); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	ports := map[string]io.WriteCloser{}
	for _, name := range []string{portStdout, portStderr, portStatus} {
		port, err := openPort(name)
		if err != nil {
			return err
		}
		ports[name] = httputil.NewChunkedWriter(port)
	}
	cmd := exec.Command(j.Args[0], j.Args[1:]...)
	cmd.Env, cmd.Dir = j.Env, j.Dir
	cmd.Stdout, cmd.Stderr = ports[portStdout], ports[portStderr]
	cmd.WaitDelay = time.Second // for what it left running with its output
	var r result
	if err := cmd.Run(); cmd.ProcessState != nil {
		r.Code = exitCode(cmd.ProcessState.Sys().(syscall.WaitStatus))
	} else {
		r.Error = err.Error()
	}
	if err := json.NewEncoder(ports[portStatus]).Encode(r); err != nil {
		return err
	}
	for _, port := range ports {
		if err := port.Close(); err != nil {
			return err
		}
	}
	for {
		// Not the end of the machine, which would lose what qemu has not yet
		// passed on. The only error is the interruption by a signal.
		_ = unix.Pause()
	}
}

// exitCode is that of a shell.
func exitCode(s syscall.WaitStatus) int {
	if s.Signaled() {
		return 128 + int(s.Signal())
	}
	return s.ExitStatus()
}

// load loads a module.
func load(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer discard(f)
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil {
		return fmt.Errorf("load %s: %w", path, err)
	}
	return nil
}

// openPort opens a port once the driver has made it.
func openPort(name string) (*os.File, error) {
	const most, step = 30 * time.Second, 10 * time.Millisecond
	for end := time.Now().Add(most); time.Now().Before(end); time.Sleep(step) {
		files, err := filepath.Glob("/sys/class/virtio-ports/*/name")
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			if strings.TrimSpace(string(b)) == name {
				return os.OpenFile(filepath.Join("/dev", filepath.Base(filepath.Dir(file))), os.O_WRONLY, 0)
			}
		}
	}
	return nil, fmt.Errorf("no port %s after %v", name, most)
}
