// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// hostMounts are the directories that a host keeps on disk, below its own, so
// that they outlive its threads and that other processes can look into them.
var hostMounts = [][2]string{ // directory of the host, where the host sees it
	{"wireguard", "/run/wireguard"},
	{"kilo", "/var/lib/kilo"},
	{"cni", "/etc/cni/net.d"},
	{"cni-state", "/var/lib/cni"},
}

// enterHost moves the calling thread into the host's network namespace and into
// a new mount namespace that shows the host's files. The machine's file system
// is not written: mount points that it lacks are made in overlays.
func enterHost(netns, dir string) error {
	if err := enterNetns(netns); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare mounts: %w", err)
	}
	if err := mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := forgetNetns(); err != nil {
		return err
	}
	scratch := filepath.Join(dir, "mnt")
	if err := mkdirs(scratch); err != nil {
		return err
	}
	if err := mount("kilolab", scratch, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	if err := mountRun(scratch); err != nil {
		return err
	}
	for _, top := range []string{"etc", "var"} {
		upper, work := filepath.Join(scratch, top+".upper"), filepath.Join(scratch, top+".work")
		if err := mkdirs(upper, work); err != nil {
			return err
		}
		options := fmt.Sprintf("lowerdir=/%s,upperdir=%s,workdir=%s", top, upper, work)
		if err := mount("kilolab", "/"+top, "overlay", 0, options); err != nil {
			return err
		}
	}
	// Last of those that hide a part of dir.
	if err := mount(filepath.Join(scratch, "run"), "/run", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if fi, err := os.Lstat("/var/run"); err == nil && fi.IsDir() {
		if err := mount("/run", "/var/run", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return err
		}
	}
	for _, m := range hostMounts {
		source := filepath.Join(dir, m[0])
		if err := mkdirs(source, m[1]); err != nil {
			return err
		}
		if err := mount(source, m[1], "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	// sysfs shows the links of the network namespace in which it was mounted.
	return mount("sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

// mountRun prepares the host's /run: empty but for the labs' own directory.
func mountRun(scratch string) error {
	labs := filepath.Join(scratch, "run", filepath.Base(labsDir))
	if err := mkdirs(labs); err != nil {
		return err
	}
	return mount(labsDir, labs, "", unix.MS_BIND, "")
}

// forgetNetns drops this mount namespace's copies of the named network
// namespaces: they would keep namespaces alive that are deleted elsewhere.
func forgetNetns() error {
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], netnsDir+"/") {
			if err := unix.Unmount(f[4], unix.MNT_DETACH); err != nil && err != unix.EINVAL {
				return fmt.Errorf("unmount %s: %w", f[4], err)
			}
		}
	}
	return nil
}

func mount(source, target, fstype string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	return nil
}

func mkdirs(dirs ...string) error {
	for _, d := range dirs {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	return nil
}
