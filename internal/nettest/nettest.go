// SPDX-License-Identifier: Apache-2.0

//go:build linux

package nettest

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// Must returns v, or fails the test.
func Must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		NoErr(t, err)
		return v
	}
}

// NoErr fails the test on an error.
func NoErr(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// RequireRoot skips the test if it does not run as root, see Skip.
func RequireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "network namespaces need root")
	}
}

// Skip skips the test loudly, for want of something that CI has; where a
// skipped test would go unnoticed, when CI is true, it fails it.
func Skip(t testing.TB, reason string) {
	t.Helper()
	skip(t, reason, "CI")
}

// SkipKernel does the same for want of something in the kernel, which only that
// of `make vm-test` must have: there KILO_VM is true.
func SkipKernel(t testing.TB, reason string) {
	t.Helper()
	skip(t, reason, "KILO_VM")
}

// InVM says that this is the machine of `make vm-test`, whose processor is emulated.
func InVM() bool { return os.Getenv("KILO_VM") == "true" }

// SkipInVM skips a test in the machine of `make vm-test`, for it needs more than
// the kernel, and runs outside.
func SkipInVM(t testing.TB) {
	t.Helper()
	if InVM() {
		t.Skip("tested outside of the virtual machine")
	}
}

func skip(t testing.TB, reason, env string) {
	t.Helper()
	text := "NOT TESTED: " + reason
	if os.Getenv(env) == "true" {
		t.Fatal(text)
	}
	fmt.Fprintf(os.Stderr, "%s: %s\n", t.Name(), text)
	t.Skip(text)
}

// NS is a namespace that lives until its test ends.
type NS struct {
	net, mnt *os.File
}

// New makes a namespace, with the loopback link up, and enters it for the rest
// of the test.
func New(t testing.TB) *NS {
	t.Helper()
	ns := Make(t)
	NoErr(t, ns.enter())
	return ns
}

// Make makes a namespace, with the loopback link up, for use with Do. The
// test stays where it is, on a locked thread.
func Make(t testing.TB) *NS {
	t.Helper()
	RequireRoot(t)
	// Never unlocked: the runtime ends the thread with the goroutine, and its namespaces with it.
	runtime.LockOSThread()
	NoErr(t, unix.Unshare(unix.CLONE_FS))
	outside := current(t)
	NoErr(t, unix.Unshare(unix.CLONE_NEWNET|unix.CLONE_NEWNS))
	NoErr(t, privateRun())
	Up(t, "lo")
	ns := current(t)
	NoErr(t, outside.enter())
	return ns
}

// privateRun gives the mount namespace an empty /var/run.
func privateRun() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	run, err := filepath.EvalSymlinks("/var/run")
	if err != nil {
		return err
	}
	if err := unix.Mount("nettest", run, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount %s: %w", run, err)
	}
	return nil
}

// current returns the namespaces of the thread.
func current(t testing.TB) *NS {
	t.Helper()
	ns := &NS{
		net: Must(os.Open("/proc/thread-self/ns/net"))(t),
		mnt: Must(os.Open("/proc/thread-self/ns/mnt"))(t),
	}
	t.Cleanup(func() {
		_ = ns.net.Close()
		_ = ns.mnt.Close()
	})
	return ns
}

// enter moves the thread to ns, and keeps its working directory.
func (ns *NS) enter() error {
	wd, err := unix.Getwd()
	if err != nil {
		return err
	}
	if err := unix.Setns(int(ns.net.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	if err := unix.Setns(int(ns.mnt.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter mount namespace: %w", err)
	}
	return unix.Chdir(wd)
}

// Do runs f inside ns, on the test's own goroutine.
func (ns *NS) Do(t testing.TB, f func()) {
	t.Helper()
	outside := current(t)
	NoErr(t, ns.enter())
	defer func() { NoErr(t, outside.enter()) }()
	f()
}

// Go runs f inside ns, on a goroutine that all waits for.
func (ns *NS) Go(t testing.TB, all *sync.WaitGroup, f func()) {
	all.Go(func() {
		runtime.LockOSThread() // as in Make
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			t.Errorf("unshare: %v", err)
			return
		}
		if err := ns.enter(); err != nil {
			t.Error(err)
			return
		}
		f()
	})
}

// Veth joins two namespaces by a pair of links, both up and with the addresses given.
func Veth(t testing.TB, a *NS, nameA, addrA string, b *NS, nameB, addrB string) {
	t.Helper()
	a.Do(t, func() {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = nameA
		NoErr(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: nameB, PeerNamespace: netlink.NsFd(b.net.Fd())}))
		Up(t, nameA, addrA)
	})
	b.Do(t, func() { Up(t, nameB, addrB) })
	a.Do(t, func() { settle(t, nameA) })
}

// Dummy makes a link that leads nowhere, up and with the addresses given, in
// the current namespace: one end of a veth pair, as not every kernel has dummies.
func Dummy(t testing.TB, name string, addrs ...string) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	peer := name + "-p"
	NoErr(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer}))
	Up(t, peer)
	Up(t, name, addrs...)
}

// settle waits until the kernel has made a local route of each IPv6 address of
// the link, which it does in its own time after the link is up.
func settle(t testing.TB, name string) {
	t.Helper()
	l := Must(netlink.LinkByName(name))(t)
	Await(t, "local routes of "+name, func() bool {
		local := map[string]bool{}
		filter := &netlink.Route{Table: unix.RT_TABLE_LOCAL, LinkIndex: l.Attrs().Index}
		for _, r := range Must(netlink.RouteListFiltered(unix.AF_INET6, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF))(t) {
			local[r.Dst.IP.String()] = true
		}
		for _, a := range Must(netlink.AddrList(l, unix.AF_INET6))(t) {
			if !a.IP.IsLinkLocalUnicast() && !local[a.IP.String()] {
				return false
			}
		}
		return true
	})
}

// Up gives a link addresses and sets it up, in the current namespace.
func Up(t testing.TB, name string, addrs ...string) {
	t.Helper()
	l := Must(netlink.LinkByName(name))(t)
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: netipx.PrefixIPNet(netip.MustParsePrefix(a))}
		if addr.IP.To4() == nil {
			addr.Flags = unix.IFA_F_NODAD
		}
		NoErr(t, netlink.AddrAdd(l, addr))
	}
	NoErr(t, netlink.LinkSetUp(l))
	if l = Must(netlink.LinkByName(name))(t); l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 {
		settle(t, name)
	}
}

// Await waits until ok returns true, and fails the test if that takes too long.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	const most, step = 20 * time.Second, 5 * time.Millisecond
	for end := time.Now().Add(most); !ok(); time.Sleep(step) {
		if time.Now().After(end) {
			t.Fatalf("gave up after %s: %s", most, what)
		}
	}
}
