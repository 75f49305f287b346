// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// binEnv names the directory of the binaries.
const binEnv = "KILOLAB_BIN"

// programs that a lab needs, by path in the directory of binaries.
var programs = append(controlPlanePrograms, "kg", "cni/bridge", "cni/host-local", "cni/loopback", "cni/portmap")

// controlPlanePrograms are all that StartControlPlane needs.
var controlPlanePrograms = []string{"etcd", "kube-apiserver"}

// FindBin returns the directory of the binaries: $KILOLAB_BIN, else that of
// the running program, else bin/ of the checkout around the working directory.
func FindBin() (string, error) {
	if dir := os.Getenv(binEnv); dir != "" {
		return filepath.Abs(dir)
	}
	if exe, err := os.Executable(); err == nil {
		dir := filepath.Dir(exe)
		if _, err := os.Stat(filepath.Join(dir, "kubelab")); err == nil {
			return dir, nil
		}
	}
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := wd; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.Contains(string(mod), "module github.com/kilomesh/kilo\n") {
			return filepath.Join(dir, "bin"), nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no directory of binaries: set %s, or run this in the checkout", binEnv)
		}
	}
}

// check fills in defaults and reports what the machine lacks.
func (o *Options) check() error {
	if err := CheckMachine(); err != nil {
		return err
	}
	return o.checkFiles(programs)
}

func (o *Options) checkFiles(programs []string) error {
	var err error
	if o.Bin == "" {
		if o.Bin, err = FindBin(); err != nil {
			return err
		}
	}
	if o.CRDs == "" {
		o.CRDs = filepath.Join(filepath.Dir(o.Bin), "manifests", "crds.yaml")
	}
	var errs []error
	for _, p := range programs {
		if _, err := os.Stat(filepath.Join(o.Bin, p)); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		errs = append(errs, errors.New(`run "make lab" in the checkout to build what is missing`))
	}
	if _, err := os.Stat(o.CRDs); err != nil {
		errs = append(errs, fmt.Errorf("CRDs: %w", err))
	}
	return errors.Join(errs...)
}

// CheckMachine reports whether labs can run on this machine at all: as root,
// with TUN devices. Tests skip without.
func CheckMachine() error {
	if os.Geteuid() != 0 {
		return errors.New("labs need root, for network namespaces")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return fmt.Errorf("labs need TUN devices: %w", err)
	}
	return nil
}

// CheckKernelLinks reports whether the kernel has the kinds of links that kg
// can make: WireGuard, and tunnels for both families.
func CheckKernelLinks() error {
	t, err := newThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) })
	if err != nil {
		return err
	}
	defer t.stop()
	var errs []error
	for _, kind := range []string{"wireguard", "ipip", "ip6tnl"} {
		errs = append(errs, t.do(func() error {
			err := netlink.LinkAdd(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: "probe-" + kind}, LinkType: kind})
			if err == nil || errors.Is(err, unix.EEXIST) { // the modules of tunnels make one by themselves
				return nil
			}
			return fmt.Errorf("this kernel has no links of type %s: %w", kind, err)
		}))
	}
	return errors.Join(errs...)
}
