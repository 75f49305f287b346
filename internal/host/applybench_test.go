// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"testing"
	"time"

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

// BenchmarkApply is what a leader in a mesh of 1,000 locations writes to a kernel
// with a userspace device: all from nothing, one location more and less, nothing.
func BenchmarkApply(b *testing.B) {
	all, more := bigState(1000), bigState(1001)
	b.Run("from-nothing", func(b *testing.B) {
		h := benchHost(b)
		measured(b, h, func() {
			for b.Loop() {
				b.StopTimer()
				nettest.NoErr(b, h.CleanUp(b.Context(), false))
				b.StartTimer()
				benchApply(b, h, all)
			}
		})
	})
	for name, states := range map[string][2]mesh.State{"one-change": {all, more}, "no-change": {all, all}} {
		b.Run(name, func(b *testing.B) {
			h := benchHost(b)
			benchApply(b, h, all)
			measured(b, h, func() {
				for i := 1; b.Loop(); i++ {
					benchApply(b, h, states[i%2])
				}
			})
		})
	}
}

// benchHost is a Host in a namespace of its own: each benchmark has a thread of its own.
func benchHost(b *testing.B) *Host {
	b.Helper()
	nettest.New(b)
	nettest.Dummy(b, "eth0", "192.168.1.1/24", "fd01::1/64")
	startWireGuard(b)
	h := nettest.Must(New(Config{WireGuardDev: "kilo0", TunnelDev: "tunl0"}))(b)
	b.Cleanup(func() { nettest.NoErr(b, h.Close()) })
	return h
}

func benchApply(b *testing.B, h *Host, s mesh.State) {
	b.Helper()
	if _, err := h.Apply(b.Context(), s); err != nil {
		b.Fatal(err)
	}
}

// measured adds what passes cost in CPU time and writes, of from-nothing with the
// clean-up before each.
func measured(b *testing.B, h *Host, passes func()) {
	b.Helper()
	cpu, writes := cpuTime(b), h.Writes()
	passes()
	b.ReportMetric(float64((cpuTime(b)-cpu).Microseconds())/1000/float64(b.N), "cpu-ms/op")
	b.ReportMetric(float64(h.Writes()-writes)/float64(b.N), "writes/op")
}
