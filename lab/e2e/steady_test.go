// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kilomesh/kilo/lab"
	"github.com/kilomesh/kilo/lab/labtest"
)

// TestSteadyState: an agent that looks at an unchanged mesh again writes
// nothing to the kernel, and it never starts a process at all.
func TestSteadyState(t *testing.T) {
	spec := lab.Demo(lab.Dual)
	spec.Resync = time.Second
	l := labtest.Start(t, spec)
	waitMatrix(t, l)
	for _, h := range l.Hosts() {
		t.Run(h.Name(), func(t *testing.T) {
			t.Parallel()
			// The last pass over a change may still be under way: writes are
			// counted from a pass that made none.
			passes, writes := counters(t, h)
			waitFor(t, "a pass of "+h.Name()+" without writes", 15*time.Second, func(context.Context) error {
				passesBefore, writesBefore := passes, writes
				if passes, writes = counters(t, h); passes == passesBefore || writes != writesBefore {
					return fmt.Errorf("%v passes made %v writes", passes-passesBefore, writes-writesBefore)
				}
				return nil
			})
			waitFor(t, "3 further passes of "+h.Name(), 15*time.Second, func(context.Context) error {
				if p, _ := counters(t, h); p < passes+3 {
					return fmt.Errorf("%v of %v passes", p-passes, 3)
				}
				return nil
			})
			if p, w := counters(t, h); w != writes {
				t.Errorf("%v passes over an unchanged mesh made %v writes to the kernel, want 0", p-passes, w-writes)
			}
			c, err := h.Agent().Children()
			if err != nil {
				t.Fatal(err)
			}
			if len(c.Running) > 0 || c.MinorFaults > 0 {
				t.Errorf("the agent has children %v, and %d page faults of children that ended; want none ever", c.Running, c.MinorFaults)
			}
		})
	}
}

func counters(t *testing.T, h *lab.Host) (passes, writes float64) {
	t.Helper()
	passes, err := h.Metric(t.Context(), "kilo_reconciles_total")
	if err != nil {
		t.Fatal(err)
	}
	writes, err = h.Metric(t.Context(), "kilo_kernel_writes_total")
	if err != nil {
		t.Fatal(err)
	}
	return passes, writes
}
