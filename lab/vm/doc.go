// SPDX-License-Identifier: Apache-2.0

// Package vm runs a program inside a virtual machine with Debian's kernel, for
// tests of what this machine's own kernel lacks: WireGuard, IPIP, netem.
//
//	err := vm.Fetch(ctx, dir, os.Stderr) // once: kernel and qemu, from Debian's packages
//	code, err := vm.Run(ctx, vm.Options{Dir: dir, Stdout: os.Stdout, Stderr: os.Stderr}, "./host.test", "-test.v")
//
// The machine lives as long as the program. It has no disk and no network: its
// file system, in memory, holds the program at its own path, what Options.With
// names, and the working directory with its testdata. The running program itself
// is its init process, see Init. Output and exit status come back over virtio
// serial ports.
//
// Nothing is installed on this machine and nothing left: neither a file outside
// the directory given to Fetch, nor a process once Run's has ended, however it
// ended. The processor is emulated, which works on every machine and is slow: a
// test in it says what is right, never how fast it is.
//
// Limits: amd64, and a Debian machine to fetch from. What the packages' scripts
// would do is not done.
package vm
