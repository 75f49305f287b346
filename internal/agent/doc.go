// SPDX-License-Identifier: Apache-2.0

// Package agent is the loop of kg: wake, snapshot, compute, apply, publish. It
// owns the only clock and every goroutine of its own, and it knows neither the
// kernel nor Kubernetes: Kernel and Cluster are what it needs of them.
//
// Events carry no data here. Whatever happens, a poke wakes the loop, which
// looks at everything again; a pass over an unchanged world changes nothing
// and logs nothing. A pass that fails in part does the rest and comes again,
// sooner at first, then less often.
//
// Limits: a node is alive, and a leader leads, as long as its annotations are there.
package agent
