// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
)

// Machines lists the names that Exec knows: hosts, pods, routers, the
// internet's router and the control plane.
func (l *Lab) Machines() []string {
	var out []string
	for _, h := range l.Hosts() {
		out = append(out, h.Name())
	}
	for _, p := range l.Pods() {
		out = append(out, p.Name())
	}
	for _, c := range l.Spec().Clouds {
		if c.Network {
			out = append(out, routerName(c.Name))
		}
	}
	return append(out, internetName, ControlPlaneName)
}

// Exec runs a program on a machine with the caller's terminal and returns its
// exit status. Only hosts have files of their own.
func (l *Lab) Exec(ctx context.Context, machine string, args ...string) (int, error) {
	if h, err := l.FindHost(machine); err == nil {
		defer h.stopThread()
		return h.Exec(ctx, args...)
	}
	if !slices.Contains(l.Machines(), machine) {
		return 0, fmt.Errorf("no machine %q in lab %s: want one of %v", machine, l.ID, l.Machines())
	}
	path := l.netnsPath(machine)
	for _, p := range l.Pods() {
		if p.Name() == machine {
			path = p.Netns()
		}
	}
	return l.execIn(ctx, path, args, nil)
}

// Kubectl runs kubectl as the administrator and returns its exit status.
func (l *Lab) Kubectl(ctx context.Context, args ...string) (int, error) {
	kubeconfig := filepath.Join(l.Dir, ControlPlaneName, "admin.conf")
	args = append([]string{filepath.Join(l.options.Bin, "kubectl")}, args...)
	return l.execIn(ctx, l.netnsPath(ControlPlaneName), args, []string{"KUBECONFIG=" + kubeconfig})
}

func (l *Lab) execIn(ctx context.Context, netns string, args, env []string) (int, error) {
	t, err := newThread(func() error { return enterNetns(netns) })
	if err != nil {
		return 0, err
	}
	defer t.stop()
	return t.run(ctx, args, env)
}
