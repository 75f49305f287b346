// SPDX-License-Identifier: Apache-2.0

// Package nettest lets tests use the real kernel: fresh network namespaces,
// veth pairs between them, programs inside them. Only tests import it.
//
// A namespace here is a network namespace and a mount namespace with an empty
// /var/run, so that every one of them can have a WireGuard control socket of
// the same name. A test enters one with New and works on one locked OS thread;
// goroutines that it starts, and subtests, are outside.
package nettest
