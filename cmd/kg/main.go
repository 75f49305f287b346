// SPDX-License-Identifier: Apache-2.0

// Command kg is Kilo's agent: it runs on every node and joins it to the mesh.
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
)

// version is set by the linker (-X main.version=...).
var version = "dev"

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit status: 0, or 1 after an error, which it prints as one line.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	if err := root.ExecuteContext(ctx); err != nil && !errors.Is(err, errVersionShown) {
		fmt.Fprintf(stderr, "error: %v\n", err)
		return 1
	}
	return 0
}

// errVersionShown ends a command of which --version was all that was asked.
var errVersionShown = errors.New("version shown")

func newRoot() *cobra.Command {
	var level logLevel
	var showVersion bool
	cmd := newAgent(&level)
	cmd.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if !showVersion {
			return nil
		}
		fmt.Fprintln(cmd.OutOrStdout(), version)
		return errVersionShown
	}
	cmd.SilenceErrors = true
	cmd.SilenceUsage = true
	cmd.PersistentFlags().Var(&level, "log-level", "how much to log: all, debug, info, warn, error or none; SIGUSR1 changes it to debug, SIGUSR2 back")
	cmd.PersistentFlags().BoolVar(&showVersion, "version", false, "print the version and exit")
	cmd.AddCommand(newUserspace(&level), &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		Run:   func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), version) },
	})
	return cmd
}
