// SPDX-License-Identifier: Apache-2.0

// Package host brings one node's kernel and files to a desired mesh.State and
// says what the node is: mesh.Facts. It runs on Linux.
//
// Apply is level-triggered: it reads what the kernel holds, compares, adds or
// replaces what is missing or different, and then deletes what is not wanted.
// What is already as desired is not touched, so a second Apply of the same
// State writes nothing, also in a new process: nothing but the configured
// endpoint of a WireGuard peer is ever remembered.
//
// What Kilo owns carries a mark that survives the process:
//
//	object            mark
//	link              group 117 (made by us) or alias "kilo-adopted" (a tunnel link that was there)
//	                  or "kilo-userspace"
//	address           is on one of our links, and not link-local
//	route             protocol 117
//	rule              protocol 117, priority 1107
//	WireGuard peer    is on our device
//	nftables          table "inet kilo"
//	iptables          comment "kilo: forward …" in the chain FORWARD
//
// Everything else is left alone. The order of one pass keeps traffic flowing:
//
//	links made, MTU ─► sysctls ─► FORWARD ─► peers and prefixes added or moved ─► firewall
//	─► addresses added ─► links up ─► routes added or replaced ─► rules
//	─► routes deleted ─► addresses deleted ─► prefixes and peers removed
//	─► links down ─► links deleted
//
// A tunnel over IPv6 is an external ip6tnl link: there the kernel's route says
// "encap ip6 dst VIA" where a mesh.Route says "via VIA".
//
// A Watch tells when to call Apply again because others changed something.
//
// Other releases marked nothing: what they left is told by its form and removed
// by the first pass, see legacy.go.
//
// Limits: the route metrics are the kernel's defaults, so two programs cannot
// both have a route to one destination in one table: the other one's stays, and
// Apply reports ours as an error.
package host
