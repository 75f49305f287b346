// SPDX-License-Identifier: Apache-2.0

// Command lab runs meshes of simulated hosts and clouds on this machine, see
// package lab.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kilomesh/kilo/lab"
)

// The exit statuses: 0 is success, and lab exec, kubectl and apiserver pass on
// that of the program that they run.
const (
	exitFailure = 1
	exitUsage   = 2
)

// exitStatus is an error that has been told already, or that is another program's.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// usageError is a wrong command line.
type usageError struct{ error }

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var status exitStatus
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return int(status)
	}
	if errors.Is(err, context.Canceled) {
		err = fmt.Errorf("interrupted: %w", err)
	}
	fmt.Fprintf(stderr, "lab: %v\n", err)
	if errors.As(err, &usageError{}) {
		return exitUsage
	}
	return exitFailure
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "lab",
		Short: "Run meshes of simulated hosts and clouds on this machine",
		Long: `lab runs an API server, and hosts in simulated clouds with the real kg on each,
as network namespaces of this machine. It needs root.

Its binaries (kg, etcd, kube-apiserver, the CNI plugins) are looked for in
$KILOLAB_BIN, then beside lab itself, then in bin/ of the checkout.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newUp(), newDown(), newList(), newMatrix(), newExec(), newKubectl(), newDemo(), newAPIServer(), newVM())
	return root
}

// args makes a wrong number of arguments a usage error.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if err := check(cmd, a); err != nil {
			return usageError{fmt.Errorf("%w; usage: %s", err, cmd.UseLine())}
		}
		return nil
	}
}

// stackFlag is the value of --stack.
type stackFlag lab.Stack

func (s *stackFlag) Set(text string) error {
	stack, err := lab.ParseStack(text)
	*s = stackFlag(stack)
	return err
}
func (s *stackFlag) String() string { return string(*s) }
func (*stackFlag) Type() string     { return "4|6|dual" }

func addStack(cmd *cobra.Command) *stackFlag {
	s := stackFlag(lab.IPv4)
	cmd.Flags().Var(&s, "stack", "address families")
	_ = cmd.RegisterFlagCompletionFunc("stack", cobra.FixedCompletions([]string{"4", "6", "dual"}, cobra.ShellCompDirectiveNoFileComp)) // fails only for an unknown flag
	return &s
}

// addLab adds --lab, the ID of a running lab.
func addLab(cmd *cobra.Command) *string {
	id := cmd.Flags().String("lab", "", "`ID` of the lab (default: the only one)")
	_ = cmd.RegisterFlagCompletionFunc("lab", completeIDs) // fails only for an unknown flag
	return id
}

func completeIDs(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	ids, err := lab.IDs()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}
