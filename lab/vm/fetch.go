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
	"regexp"
	"syscall"
	"time"
)

const (
	kernelPackage = "linux-image-cloud-amd64" // has no files, but depends on the package of the current kernel
	qemuPackage   = "qemu-system-x86"
	qemuProgram   = "qemu-system-x86_64"
)

// Fetch downloads Debian's cloud kernel into dir, and qemu with the libraries
// that this machine lacks, unless qemu is installed. It does nothing if dir is
// there already. It writes nowhere else and needs no root. Progress goes to log.
func Fetch(ctx context.Context, dir string, log io.Writer) (err error) {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return err
	}
	a := apt{work: dir + ".apt", log: log}
	part := dir + ".part"
	remove := func() error { return errors.Join(os.RemoveAll(a.work), os.RemoveAll(part)) }
	defer func() { err = errors.Join(err, remove()) }()
	if err := remove(); err != nil { // what a killed one left, perhaps of another kernel
		return err
	}
	for _, d := range []string{filepath.Join(a.work, "lists/partial"), filepath.Join(a.archives(), "partial"), part} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	fmt.Fprintf(log, "vm: fetching Debian's kernel and qemu (60 MB) into %s\n", dir)
	if err := a.download(ctx); err != nil {
		return err
	}
	packages, err := filepath.Glob(filepath.Join(a.archives(), "*.deb"))
	if err != nil {
		return err
	}
	fmt.Fprintf(log, "vm: unpacking %d packages\n", len(packages))
	for _, p := range packages {
		if _, err := a.run(ctx, "dpkg-deb", "--extract", p, part); err != nil {
			return err
		}
	}
	return os.Rename(part, dir)
}

// apt runs Debian's package programs, with their state in a directory of its own.
type apt struct {
	work string
	log  io.Writer
}

func (a apt) archives() string { return filepath.Join(a.work, "archives") }

// download fills archives.
func (a apt) download(ctx context.Context) error {
	if _, err := a.apt(ctx, "apt-get", "update"); err != nil {
		return err
	}
	kernel, err := a.kernel(ctx)
	if err != nil {
		return err
	}
	// Not what it depends on: that is for installing it.
	if _, err := a.apt(ctx, "apt-get", "download", kernel); err != nil {
		return err
	}
	if _, err := exec.LookPath(qemuProgram); err == nil {
		return nil
	}
	_, err = a.apt(ctx, "apt-get", "install", "--download-only", "--no-install-recommends", "--yes", qemuPackage)
	return err
}

var kernelDepends = regexp.MustCompile(`(?m)^ +Depends: (linux-image-\S+)$`)

// kernel returns the name of the current kernel's package.
func (a apt) kernel(ctx context.Context) (string, error) {
	out, err := a.apt(ctx, "apt-cache", "depends", kernelPackage)
	if err != nil {
		return "", err
	}
	m := kernelDepends.FindStringSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("apt-cache depends %s: got %q, want a line \"Depends: linux-image-...\"", kernelPackage, out)
	}
	return m[1], nil
}

// apt runs apt-get or apt-cache.
func (a apt) apt(ctx context.Context, program string, args ...string) (string, error) {
	options := []string{
		"-o", "Dir::State::lists=" + filepath.Join(a.work, "lists"),
		"-o", "Dir::Cache=" + a.work,
		"-o", "Dir::Cache::archives=" + a.archives(),
		"-o", "Debug::NoLocking=true", // of the system's own state, which is not written
		"-o", "APT::Update::Error-Mode=any",
		"-o", "Acquire::Retries=3",
		"-o", "APT::Sandbox::User=root", // another user might not reach the directory
	}
	return a.run(ctx, program, append(options, args...)...)
}

// run runs a program in archives, and returns what it printed.
func (a apt) run(ctx context.Context, program string, args ...string) (string, error) {
	var out bytes.Buffer
	var all tail // of both, which are written at once
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = a.archives()
	cmd.WaitDelay = 5 * time.Second // for the programs that it started
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	cmd.Stdout = io.MultiWriter(&out, &all)
	cmd.Stderr = &all
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", program, args[len(args)-1], err, &all)
	}
	return out.String(), nil
}
