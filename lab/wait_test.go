// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kilomesh/kilo/lab/vm"
)

func TestWaitForSaysWhatItWaitedFor(t *testing.T) {
	t.Setenv(vm.Env, "") // patience is longer in a virtual machine
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		err := WaitFor(t.Context(), "rain", time.Minute, func(context.Context) error { return errors.New("it is dry") })
		if err == nil || err.Error() != "wait for rain: not within 1m0s: it is dry" {
			t.Errorf("WaitFor() = %v", err)
		}
		if took := time.Since(start); took < time.Minute || took > time.Minute+time.Second {
			t.Errorf("took %v, want a minute", took)
		}
	})
}

func TestWaitForGivesUpOnFatal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		want := errors.New("the program has ended")
		err := WaitFor(t.Context(), "it", time.Minute, func(context.Context) error { return Fatal(want) })
		if !errors.Is(err, want) || time.Since(start) != 0 {
			t.Errorf("WaitFor() = %v after %v, want %v at once", err, time.Since(start), want)
		}
	})
}
