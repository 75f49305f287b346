// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kilomesh/kilo/lab/vm"
)

// emulated is how many times more patient to be on an emulated processor.
const emulated = 5

// errFatal marks an error after which waiting on is useless.
type errFatal struct{ error }

func (e errFatal) Unwrap() error { return e.error }

// Fatal makes WaitFor give up at once with err.
func Fatal(err error) error { return errFatal{err} }

// WaitFor calls check until it returns nil, at most for bound. The error says
// what was waited for and the last error of check.
func WaitFor(ctx context.Context, what string, bound time.Duration, check func(context.Context) error) error {
	if os.Getenv(vm.Env) == "true" {
		bound *= emulated
	}
	ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("not within %v", bound))
	defer cancel()
	pause := 20 * time.Millisecond
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if f := (errFatal{}); errors.As(err, &f) {
			return fmt.Errorf("wait for %s: %w", what, f.error)
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), context.Canceled) { // somebody lost interest in the reasons
				return fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
			}
			return fmt.Errorf("wait for %s: %w: %w", what, context.Cause(ctx), last)
		case <-time.After(pause):
		}
		pause = min(pause*3/2, 250*time.Millisecond)
	}
}
