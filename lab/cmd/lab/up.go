// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kilomesh/kilo/lab"
)

// tableBound is how long a mesh may take from ready agents to the full table.
const tableBound = 60 * time.Second

func newUp() *cobra.Command {
	var o lab.Options
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the three clouds of the demo and leave them running",
		Args:  args(cobra.NoArgs),
	}
	stack := addStack(cmd)
	cmd.Flags().StringVar(&o.ID, "id", "", "`ID` of the lab: lower-case letters and digits (default: a fresh one)")
	cmd.Flags().BoolVar(&o.KeepFailed, "keep", false, "leave it running even if it fails to come up, to look at")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o.Detached, o.Progress = true, cmd.ErrOrStderr()
		l, err := lab.Start(cmd.Context(), lab.Demo(lab.Stack(*stack)), o)
		if err != nil {
			return err
		}
		if _, err := l.WaitMatrix(cmd.Context(), tableBound); err != nil {
			if o.KeepFailed && cmd.Context().Err() == nil {
				return errors.Join(err, l.Detach())
			}
			return errors.Join(err, l.Close())
		}
		l.Progress("every pod and every node reaches every pod")
		if err := l.Detach(); err != nil {
			return err
		}
		return printHints(cmd.OutOrStdout(), l)
	}
	return cmd
}

func newDown() *cobra.Command {
	var stale, all bool
	cmd := &cobra.Command{
		Use:               "down [ID...]",
		Short:             "End labs and delete everything of theirs (default: the only one)",
		ValidArgsFunction: completeIDs,
	}
	cmd.Flags().BoolVar(&stale, "stale", false, "end those whose owner died without ending them")
	cmd.Flags().BoolVar(&all, "all", false, "end every lab on this machine")
	cmd.RunE = func(cmd *cobra.Command, ids []string) error {
		if err := lab.CheckMachine(); err != nil {
			return err
		}
		if stale {
			swept, err := lab.SweepStale()
			fmt.Fprintf(cmd.OutOrStdout(), "swept away: %d %v\n", len(swept), swept)
			return err
		}
		here, err := lab.IDs()
		if err != nil {
			return err
		}
		switch {
		case all:
			ids = here
		case len(ids) == 0 && len(here) > 1:
			return usageError{fmt.Errorf("%d labs are running %v: want IDs, or --all", len(here), here)}
		case len(ids) == 0:
			ids = here
		}
		var errs []error
		for _, id := range ids {
			errs = append(errs, lab.Down(id))
		}
		return errors.Join(errs...)
	}
	return cmd
}

func newList() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the IDs of the labs on this machine",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ids, err := lab.IDs()
			for _, id := range ids {
				fmt.Fprintln(cmd.OutOrStdout(), id)
			}
			return err
		},
	}
}

// printHints says what to do with a running lab.
func printHints(w io.Writer, l *lab.Lab) error {
	_, err := fmt.Fprintf(w, `
lab %[1]s is running; its logs are in %[2]s. Try, as root:
  bin/lab matrix --lab %[1]s                who reaches whom
  bin/lab exec --lab %[1]s b2 -- ip route   a command on a host, a pod (b2-0), a router (b-router),
                                            "internet" or "control"; see bin/lab exec --help
  bin/lab kubectl --lab %[1]s get nodes     kubectl as administrator
  bin/lab down %[1]s                        end it
--lab may be left out while there is only one.
`, l.ID, l.Dir)
	return err
}
