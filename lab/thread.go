// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// netnsDir is where ip-netns(8) keeps named network namespaces.
const netnsDir = "/run/netns"

// thread is an operating system thread that lives in namespaces of its own and
// runs functions there, one after another. Programs started by these functions
// inherit the namespaces; their Pdeathsig is bound to the thread, so it must
// live as long as they shall.
type thread struct {
	calls chan func()
	done  chan struct{}
	close sync.Once
}

// newThread starts a thread and runs setup on it first.
func newThread(setup func() error) (*thread, error) {
	t := &thread{calls: make(chan func()), done: make(chan struct{})}
	ready := make(chan error)
	onFreshThread(func() {
		defer close(t.done)
		err := setup()
		ready <- err
		if err != nil {
			return
		}
		for f := range t.calls {
			f()
		}
	})
	if err := <-ready; err != nil {
		return nil, err
	}
	return t, nil
}

// do runs f on the thread and waits for it. Not after stop.
func (t *thread) do(f func() error) error {
	result := make(chan error, 1)
	t.calls <- func() { result <- f() }
	return <-result
}

// stop ends the thread; programs with a Pdeathsig that it started end with it.
func (t *thread) stop() {
	t.close.Do(func() { close(t.calls) })
	<-t.done
}

// onFreshThread runs f on a thread that is thrown away afterwards, so f may do
// to it what it likes. It is never the main thread: that one cannot be thrown
// away, and /proc/PID/ns would show f's namespaces as the whole process's.
func onFreshThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return // without unlocking, which ends the thread
		}
		passed := make(chan struct{})
		go func() { // while this goroutine holds the main thread
			runtime.LockOSThread()
			close(passed)
			f()
		}()
		<-passed
		runtime.UnlockOSThread()
	}()
}

// inNetns runs f on a thread in the network namespace at path. Sockets that f
// makes stay in there.
func inNetns(path string, f func() error) error {
	result := make(chan error, 1)
	onFreshThread(func() {
		if err := enterNetns(path); err != nil {
			result <- err
			return
		}
		result <- f()
	})
	return <-result
}

// enterNetns moves the calling thread.
func enterNetns(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer discard(f)
	if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	return nil
}

// namespaceSysctls hold in every namespace of a lab: whatever the machine has
// set, nothing forwards unless told so, and IPv6 addresses work at once.
var namespaceSysctls = [][2]string{
	{"net/ipv4/ip_forward", "0"},
	{"net/ipv4/conf/all/rp_filter", "0"},
	{"net/ipv4/conf/default/rp_filter", "0"},
	{"net/ipv6/conf/all/forwarding", "0"},
	{"net/ipv6/conf/default/forwarding", "0"},
	{"net/ipv6/conf/all/accept_dad", "0"},
	{"net/ipv6/conf/default/accept_dad", "0"},
	{"net/ipv6/conf/all/accept_ra", "0"},
	{"net/ipv6/conf/default/accept_ra", "0"},
}

// createNetns makes a named network namespace with lo up.
func createNetns(name string) error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	path := filepath.Join(netnsDir, name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0)
	if err != nil {
		return fmt.Errorf("create network namespace: %w", err)
	}
	discard(f)
	result := make(chan error, 1)
	onFreshThread(func() {
		result <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("unshare: %w", err)
			}
			if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
				return fmt.Errorf("mount on %s: %w", path, err)
			}
			if err := setSysctls(namespaceSysctls); err != nil {
				return err
			}
			return linkUp("lo")
		}()
	})
	if err := <-result; err != nil {
		return errors.Join(fmt.Errorf("create network namespace %s: %w", name, err), deleteNetns(name))
	}
	return nil
}

// deleteNetns is fine with a namespace that is gone, or half there.
func deleteNetns(name string) error {
	path := filepath.Join(netnsDir, name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// setSysctls writes them in the network namespace of the calling thread. What
// the kernel lacks, such as all of IPv6, is left out.
func setSysctls(kv [][2]string) error {
	for _, s := range kv {
		err := os.WriteFile("/proc/sys/"+s[0], []byte(s[1]), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("sysctl: %w", err)
		}
	}
	return nil
}

// discard closes what was only read or has been handed on: an error tells nothing.
func discard(c io.Closer) { _ = c.Close() }

// netnsInode identifies the network namespace at path, as in /proc/PID/ns/net.
func netnsInode(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, err
	}
	return st.Ino, nil
}
