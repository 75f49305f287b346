// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"net/netip"
	"os"
)

// StartControlPlane starts an API server and its etcd alone, on free ports of
// the loopback address, with the CRDs and the user "kilo". It needs neither
// root nor namespaces. Only Bin and CRDs of the options matter; an empty CRDs
// is manifests/crds.yaml beside Bin. The caller stops it.
func StartControlPlane(ctx context.Context, o Options) (*ControlPlane, error) {
	if err := o.checkFiles(controlPlanePrograms); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "kilolab-apiserver-")
	if err != nil {
		return nil, err
	}
	cp, err := startControlPlane(controlPlaneConfig{
		bin: o.Bin, dir: dir, stack: Dual, address: netip.MustParseAddr("127.0.0.1"),
	})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	cp.removeDir = dir
	if err := cp.Ready(ctx, o.CRDs); err != nil {
		return nil, errors.Join(err, cp.Stop())
	}
	return cp, nil
}

// Run runs a program with the caller's terminal and KILO_TEST_KUBECONFIG set to
// the administrator's kubeconfig, and returns its exit status.
func (cp *ControlPlane) Run(ctx context.Context, args ...string) (int, error) {
	return cp.thread.run(ctx, args, []string{"KILO_TEST_KUBECONFIG=" + cp.Kubeconfig, "KUBECONFIG=" + cp.Kubeconfig})
}
