// SPDX-License-Identifier: Apache-2.0

// Package lab runs real meshes on one machine: an internet, clouds with private
// networks and NAT, an etcd and a kube-apiserver, and on every host the real kg
// and its WireGuard, in user space or the kernel's, with pods attached by the real CNI plugins.
//
//	spec := lab.Demo(lab.Dual)
//	l, err := lab.Start(ctx, spec, lab.Options{Log: os.Stderr})
//	defer l.Close()
//	m, err := l.WaitMatrix(ctx, 30*time.Second)
//
// A host is a network namespace, a directory and a thread. Everything that
// happens on it happens on its thread, which lives in its network namespace and
// in a mount namespace of its own: there /etc, /var, /run and /sys are the
// host's, so sockets, keys and CNI files are apart and every host may call its
// link kilo0. A program started from that thread inherits both. Another process
// (lab exec) makes such a thread again from what is on disk.
//
//	203.0.113.0/24, 2001:db8::/64   ── internet ──┬── control plane
//	                                              ├── public hosts
//	                                              └── router of a cloud ── its private hosts
//
// Names: the namespaces of lab "x1" are /run/netns/x1-*, its directory is
// /run/kilolab/x1. Close kills every process that it finds in these namespaces,
// then deletes both. A lab whose owner died is swept away by the next one.
//
// The product is seen as its users see it: binaries, flags, annotations,
// manifests. Nothing is imported from it, so its dependencies and those of the
// API server need not agree.
//
// Limits: no kubelet, no controller manager: the lab itself writes the Nodes.
// No Services. A full-cone NAT serves one inner host. Linux, as root; only
// StartControlPlane works without namespaces and without root.
package lab
