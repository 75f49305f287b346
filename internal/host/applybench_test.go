// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

// cpuTime is what this process has used, without the WireGuard device, which is another one.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	nettest.NoErr(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// syscallCounter counts the system calls of this process, those of the Go
// runtime's threads included, by the kernel's tracepoint raw_syscalls:sys_enter.
type syscallCounter []int // of perf events, one for each thread and those it starts

// countSyscalls starts a counter, which is nil where the kernel does not allow for it.
func countSyscalls(b *testing.B) syscallCounter {
	b.Helper()
	c, err := openSyscallCounter(b.TempDir())
	b.Cleanup(func() {
		for _, fd := range c {
			_ = unix.Close(fd)
		}
	})
	if err != nil {
		b.Logf("NOT MEASURED: system calls: %v", err)
		return nil
	}
	return c
}

func openSyscallCounter(dir string) (c syscallCounter, err error) {
	if err := unix.Mount("tracefs", dir, "tracefs", 0, ""); err != nil {
		return nil, fmt.Errorf("mount tracefs: %w", err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "events/raw_syscalls/sys_enter/id"))
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		return nil, fmt.Errorf("unmount tracefs: %w", err)
	}
	if err != nil {
		return nil, err
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(raw)), 10, 64)
	if err != nil {
		return nil, err
	}
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: id, Bits: unix.PerfBitInherit}
	attr.Size = uint32(unsafe.Sizeof(attr))
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return nil, err
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			return c, err
		}
		fd, err := unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
		if err != nil {
			return c, fmt.Errorf("perf_event_open of thread %d: %w", tid, err)
		}
		c = append(c, fd)
	}
	return c, nil
}

func (c syscallCounter) read(b *testing.B) (n uint64) {
	b.Helper()
	for _, fd := range c {
		var value [8]byte
		nettest.Must(unix.Read(fd, value[:]))(b)
		n += binary.NativeEndian.Uint64(value[:])
	}
	return n
}

// BenchmarkApply is what a leader in a mesh of 1,000 locations writes to a kernel
// with a userspace device: all from nothing; one location more and less, as a
// pass that reads everything does it, and as one while the kernel is watched; nothing.
func BenchmarkApply(b *testing.B) {
	all, more := bigState(1000), bigState(1001)
	b.Run("from-nothing", func(b *testing.B) {
		_, h := benchHost(b)
		measured(b, h, func() {
			for b.Loop() {
				b.StopTimer()
				nettest.NoErr(b, h.CleanUp(b.Context(), false))
				b.StartTimer()
				benchApply(b, h, all)
			}
		})
	})
	for _, bb := range []struct {
		name   string
		states [2]mesh.State
		watch  bool
	}{
		{"one-change-read-back", [2]mesh.State{all, more}, false},
		{"one-change", [2]mesh.State{all, more}, true},
		{"no-change-read-back", [2]mesh.State{all, all}, false},
		{"no-change", [2]mesh.State{all, all}, true},
	} {
		b.Run(bb.name, func(b *testing.B) {
			ns, h := benchHost(b)
			if bb.watch {
				watched(b, ns, h)
			}
			benchApply(b, h, all)
			measured(b, h, func() {
				for i := 1; b.Loop(); i++ {
					benchApply(b, h, bb.states[i%2])
				}
			})
		})
	}
}

// benchHost is a Host in a namespace of its own: each benchmark has a thread of its own.
func benchHost(b *testing.B) (*nettest.NS, *Host) {
	b.Helper()
	ns := nettest.New(b)
	nettest.Dummy(b, "eth0", "192.168.1.1/24", "fd01::1/64")
	startWireGuard(b)
	h := nettest.Must(New(Config{WireGuardDev: "kilo0", TunnelDev: "tunl0"}))(b)
	b.Cleanup(func() { nettest.NoErr(b, h.Close()) })
	return ns, h
}

func benchApply(b *testing.B, h *Host, s mesh.State) {
	b.Helper()
	if _, err := h.Apply(b.Context(), s); err != nil {
		b.Fatal(err)
	}
}

// measured adds what passes cost in CPU time, system calls and writes, of
// from-nothing with the clean-up before each.
func measured(b *testing.B, h *Host, passes func()) {
	b.Helper()
	counter := countSyscalls(b)
	cpu, writes, calls := cpuTime(b), h.Writes(), counter.read(b)
	passes()
	if counter != nil {
		b.ReportMetric(float64(counter.read(b)-calls)/float64(b.N), "syscalls/op")
	}
	b.ReportMetric(float64((cpuTime(b)-cpu).Microseconds())/1000/float64(b.N), "cpu-ms/op")
	b.ReportMetric(float64(h.Writes()-writes)/float64(b.N), "writes/op")
}
