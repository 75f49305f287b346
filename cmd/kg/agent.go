// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/kilomesh/kilo/internal/agent"
	"github.com/kilomesh/kilo/internal/host"
	"github.com/kilomesh/kilo/internal/kube"
	"github.com/kilomesh/kilo/internal/mesh"
)

// snapshotPath holds the cluster as the API server last told it.
const snapshotPath = "/var/lib/kilo/snapshot.json"

// undoPath holds what clean-up must undo.
const undoPath = "/var/lib/kilo/undo.json"

func newAgent(level *logLevel) *cobra.Command {
	var flags agentFlags
	cmd := &cobra.Command{
		Use:   "kg",
		Short: "Join this Kubernetes node to the Kilo mesh",
		Long: `kg joins the node that it runs on to a WireGuard mesh of all the cluster's nodes,
across data centres, clouds and NAT. It needs root, and an API server that it
may list nodes and peers on and patch its own node.`,
		Args: cobra.NoArgs,
	}
	flags.register(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := flags.parse()
		if err != nil {
			return err
		}
		log := newLogger(cmd.OutOrStdout(), level)
		defer level.follow(log)()
		klog.SetSlogLogger(log.With("component", "k8s backend"))
		return runAgent(cmd.Context(), s, flags, log)
	}
	return cmd
}

// runAgent wires the parts together and runs them until ctx ends. The caches
// and the server outlive the loop, which uses them while it cleans up.
func runAgent(ctx context.Context, s settings, flags agentFlags, log *slog.Logger) (err error) {
	listener, err := net.Listen("tcp", flags.listen)
	if err != nil {
		return fmt.Errorf("--listen %q: %w", flags.listen, err)
	}
	defer closeOnError(&err, listener)
	key, created, err := host.LoadOrCreateKey(flags.privateKey)
	if err != nil {
		return err
	}
	if created {
		log.Info("private key created", "file", flags.privateKey)
	}
	s.host.UndoFile = undoPath
	s.host.Log = log.With("component", "host")
	kernel, err := host.New(s.host)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, kernel.Close()) }()

	var a *agent.Agent
	cluster, err := kube.New(s.rest, kube.Options{
		NodeName: s.agent.NodeName, TopologyLabel: flags.topologyLabel, Heartbeat: flags.heartbeat,
		Log: log.With("component", "k8s backend"), Poke: func() { a.Poke() },
	})
	if err != nil {
		return err
	}
	s.agent.Key = key
	s.agent.Memory = &host.SnapshotFile{Path: snapshotPath}
	s.agent.Log = log.With("component", "kilo")
	if a, err = agent.New(s.agent, cluster, kernelOf{kernel, flags.cniPath}); err != nil {
		return err
	}
	log.Info("starting", "version", version, "node", s.agent.NodeName, "listen", listener.Addr())
	return supervise(ctx, a, cluster, &http.Server{Handler: a.Handler(), ReadHeaderTimeout: 10 * time.Second}, listener)
}

// supervise runs the three parts. The first that fails ends the others.
func supervise(ctx context.Context, a *agent.Agent, cluster *kube.Cluster, server *http.Server, listener net.Listener) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	background, stopBackground := context.WithCancel(context.WithoutCancel(ctx))
	defer stopBackground()
	var errCluster, errServer error
	var running sync.WaitGroup
	running.Go(func() {
		if errCluster = cluster.Run(background); errCluster != nil {
			stop(errCluster)
		}
	})
	running.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			errServer = err
			stop(err)
		}
	})
	err := a.Run(ctx)
	stopBackground()
	err = errors.Join(err, server.Close())
	running.Wait()
	return errors.Join(err, errCluster, errServer)
}

func closeOnError(err *error, l net.Listener) {
	if *err != nil {
		_ = l.Close() // the error that matters is the one that ended us; the server may have closed it already
	}
}

// kernelOf is a host as the loop sees it: what was changed, the host logs itself.
type kernelOf struct {
	*host.Host
	cniPath string
}

// Apply implements agent.Kernel.
func (k kernelOf) Apply(ctx context.Context, s mesh.State) error {
	_, err := k.Host.Apply(ctx, s)
	return err
}

// WriteCNI implements agent.Kernel.
func (k kernelOf) WriteCNI(podCIDRs []netip.Prefix, mtu int) error {
	return k.Host.WriteCNI(k.cniPath, podCIDRs, mtu)
}
