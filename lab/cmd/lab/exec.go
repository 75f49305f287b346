// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"time"

	"github.com/spf13/cobra"

	"github.com/kilomesh/kilo/lab"
)

func newExec() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec [--lab ID] HOST -- COMMAND [ARG...]",
		Short: "Run a command on a host, in a pod, on a cloud's router, on \"internet\" or \"control\"",
		Long: `exec runs a command where the mesh sees it run: on a host that is its network
namespace with its own /run/wireguard, /etc/cni/net.d and /var/lib/kilo. The
exit status is the command's.`,
		Args: args(cobra.MinimumNArgs(2)),
	}
	id := addLab(cmd)
	cmd.Flags().SetInterspersed(false)
	cmd.ValidArgsFunction = func(_ *cobra.Command, done []string, _ string) ([]string, cobra.ShellCompDirective) {
		l, err := lab.Open(*id)
		if err != nil || len(done) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return l.Machines(), cobra.ShellCompDirectiveNoFileComp
	}
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		l, err := lab.Open(*id)
		if err != nil {
			return err
		}
		name, command := a[0], a[1:]
		if command[0] == "--" {
			command = command[1:]
		}
		return status(l.Exec(cmd.Context(), name, command...))
	}
	return cmd
}

func newKubectl() *cobra.Command {
	cmd := &cobra.Command{
		Use:                "kubectl [--lab ID] [ARG...]",
		Short:              "Run kubectl as the administrator of a lab's cluster",
		DisableFlagParsing: false,
	}
	id := addLab(cmd)
	cmd.Flags().SetInterspersed(false)
	cmd.RunE = func(cmd *cobra.Command, a []string) error {
		l, err := lab.Open(*id)
		if err != nil {
			return err
		}
		return status(l.Kubectl(cmd.Context(), a...))
	}
	return cmd
}

func newMatrix() *cobra.Command {
	var asJSON bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "matrix",
		Short: "Ping every pod from every pod and node; exit status 1 unless all answer",
		Args:  args(cobra.NoArgs),
	}
	id := addLab(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().DurationVar(&wait, "wait", 0, "try again for so long until all is ok")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		l, err := lab.Open(*id)
		if err != nil {
			return err
		}
		m := l.Matrix(cmd.Context(), time.Second)
		if m.Err() != nil && wait > 0 {
			m, _ = l.WaitMatrix(cmd.Context(), wait) // the table says it all
		}
		if asJSON {
			e := json.NewEncoder(cmd.OutOrStdout())
			e.SetIndent("", "  ")
			err = e.Encode(m)
		} else {
			err = m.Write(cmd.OutOrStdout())
		}
		if err == nil && m.Err() != nil {
			return exitStatus(exitFailure)
		}
		return err
	}
	return cmd
}

func newAPIServer() *cobra.Command {
	var o lab.Options
	cmd := &cobra.Command{
		Use:   "apiserver -- COMMAND [ARG...]",
		Short: "Run a command with KILO_TEST_KUBECONFIG set to a fresh API server on the loopback address",
		Long: `apiserver starts etcd and kube-apiserver on free ports of 127.0.0.1, installs the
CRDs and ends both after the command, whose exit status is its own. It needs no root.`,
		Args: args(cobra.MinimumNArgs(1)),
	}
	cmd.Flags().StringVar(&o.CRDs, "crds", "", "`file` of CustomResourceDefinitions (default: manifests/crds.yaml beside the directory of binaries)")
	cmd.Flags().SetInterspersed(false)
	cmd.RunE = func(cmd *cobra.Command, a []string) (err error) {
		cp, err := lab.StartControlPlane(cmd.Context(), o)
		if err != nil {
			return err
		}
		code, err := cp.Run(cmd.Context(), a...)
		if stopErr := cp.Stop(); err == nil {
			err = stopErr
		}
		return status(code, err)
	}
	return cmd
}

func status(code int, err error) error {
	if err == nil && code != 0 {
		return exitStatus(code)
	}
	return err
}
