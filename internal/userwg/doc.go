// SPDX-License-Identifier: Apache-2.0

// Package userwg serves a WireGuard link from userspace, for kernels without
// WireGuard: a TUN device, and the usual control socket
// /var/run/wireguard/<interface>.sock (wireguard.com/xplatform).
//
// It configures nothing: keys, peers, addresses and routes are package host's
// work, in another process, so that restarting that one does not cut traffic.
package userwg
