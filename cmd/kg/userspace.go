// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kilomesh/kilo/internal/userwg"
)

func newUserspace(level *logLevel) *cobra.Command {
	var iface string
	var mtu int
	cmd := &cobra.Command{
		Use:   "userspace-wireguard",
		Short: "Run WireGuard in user space, for kernels without it",
		Long: `Runs a userspace WireGuard device on a TUN link and serves its control socket,
/var/run/wireguard/INTERFACE.sock, until it is told to stop. It is a process of
its own, so that restarting the agent does not cut traffic. Needs root and
/dev/net/tun. The agent configures it: kg --wireguard=userspace (or auto).`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if mtu < 1280 || mtu > 65535 {
				return fmt.Errorf("--mtu %d: want a number of bytes, 1280 to 65535", mtu)
			}
			log := newLogger(cmd.OutOrStdout(), level).With("component", "wireguard")
			defer level.follow(log)()
			return userwg.Run(cmd.Context(), userwg.Config{Interface: iface, MTU: mtu, Log: log})
		},
	}
	cmd.Flags().StringVar(&iface, "interface", "kilo0", "`name` of the WireGuard link")
	cmd.Flags().IntVar(&mtu, "mtu", 1420, "MTU of the link in bytes until the agent sets its own, 1280 to 65535")
	return cmd
}
