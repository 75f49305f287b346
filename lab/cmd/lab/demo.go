// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kilomesh/kilo/lab"
)

func newDemo() *cobra.Command {
	var keep, asJSON bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show a mesh of three clouds: who reaches whom, who leads, which links there are",
		Long: `demo starts three clouds: "a" with two public nodes, "b" with a private network of
three nodes and a public leader, "c" with two nodes behind NAT. It waits until
every pod reaches every pod and every node reaches every pod, shows the mesh and
ends it. The exit status is 0 only if all of them were reached.`,
		Args: args(cobra.NoArgs),
	}
	stack := addStack(cmd)
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the lab running")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the result as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return demo(cmd.Context(), lab.Stack(*stack), keep, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return cmd
}

func demo(ctx context.Context, stack lab.Stack, keep, asJSON bool, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	l, err := lab.Start(ctx, lab.Demo(stack), lab.Options{Detached: keep, KeepFailed: keep, Progress: stderr})
	if err != nil {
		return err
	}
	defer func() {
		if keep && ctx.Err() == nil {
			err = errors.Join(err, l.Detach(), printHints(stdout, l))
		} else {
			err = errors.Join(err, l.Close())
		}
	}()
	m, err := l.WaitMatrix(ctx, tableBound)
	took := time.Since(start)
	if err == nil {
		l.Progress("every pod and every node reaches every pod\n")
		// Once more, for times without the first handshakes.
		m = l.Matrix(ctx, time.Second)
		err = m.Err()
	}
	r, reportErr := l.Report(ctx, m)
	show := r.Write
	if asJSON {
		show = r.WriteJSON
	}
	err = errors.Join(err, reportErr, show(stdout))
	if err == nil && !asJSON {
		_, err = fmt.Fprintf(stdout, "\nfull table after %.1f s\n", took.Seconds())
	}
	return err
}
