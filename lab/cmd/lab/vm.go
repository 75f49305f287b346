// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/kilomesh/kilo/lab/vm"
)

func newVM() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "vm",
		Short: "Run a program in a virtual machine whose kernel has WireGuard, IPIP and netem",
		Args:  args(cobra.NoArgs),
	}
	dir := cmd.PersistentFlags().String("dir", "", "`directory` of the kernel and qemu (default: vm beside lab itself)")
	cmd.AddCommand(newVMFetch(dir), newVMRun(dir), &cobra.Command{
		Use:    "init",
		Short:  "Be the init process of the machine",
		Hidden: true,
		RunE:   func(*cobra.Command, []string) error { return vm.Init() },
	})
	return cmd
}

func newVMFetch(dir *string) *cobra.Command {
	timeout := 10 * time.Minute
	cmd := &cobra.Command{
		Use:   "fetch",
		Short: "Download Debian's kernel and, if it is not installed, qemu; nothing is installed",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, d, err := vmFiles(*dir)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, fmt.Errorf("nothing fetched after %v", timeout))
			defer cancel()
			return vm.Fetch(ctx, d, cmd.ErrOrStderr())
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "give up after this `time`")
	return cmd
}

func newVMRun(dir *string) *cobra.Command {
	o := vm.Options{CPUs: 1, Memory: 1024, Timeout: 30 * time.Minute}
	cmd := &cobra.Command{
		Use:   "run PROGRAM [ARG...]",
		Short: "Run a program of this machine in the virtual one",
		Long: `run starts a virtual machine, runs a program in it as root, with the environment
and in the directory of its caller, and ends with the program's exit status. In
the machine there are only the program, what --with names, and the testdata of
the working directory. So tests of a package run with

    go test -exec 'lab vm run' ./package`,
		Args: args(cobra.MinimumNArgs(1)),
	}
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringArrayVar(&o.With, "with", nil, "put this into the machine too: a program in $PATH, or a `path` with a slash to a file or directory")
	cmd.Flags().IntVar(&o.CPUs, "cpus", o.CPUs, "`number` of CPUs")
	cmd.Flags().IntVar(&o.Memory, "memory", o.Memory, "memory in `MiB`")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", o.Timeout, "kill the machine after this `time`")
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		self, d, err := vmFiles(*dir)
		if err != nil {
			return err
		}
		o.Dir, o.Init = d, []string{self, "vm", "init"}
		o.Stdout, o.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
		return status(vm.Run(cmd.Context(), o, a...))
	}
	return cmd
}

// vmFiles returns the path of this program, and the directory given or the default one.
func vmFiles(dir string) (self, d string, err error) {
	self, err = os.Executable()
	if err == nil && dir == "" {
		dir = filepath.Join(filepath.Dir(self), "vm")
	}
	return self, dir, err
}
