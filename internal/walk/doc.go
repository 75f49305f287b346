// SPDX-License-Identifier: Apache-2.0

// Package walk proves a mesh: it takes the State that every host wants, and a
// model of the network between the hosts, and walks packets hop by hop as the
// Linux kernels would. What it says of a packet is where it arrived, with which
// source and whether it was ever in clear between locations, or how, where and
// why it died. It is pure: no I/O, no clock; the same World gives the same Trace.
//
// What is modelled
//
//   - routing: policy rules before table main, longest prefix, routes of links
//     and addresses, gateways with and without onlink, the preferred source and
//     the kernel's own choice of one for either family, forwarding switches, TTL;
//   - WireGuard: cryptokey routing on both sides, keys, preshared keys, ports,
//     endpoints, roaming and keepalives, the outer packet's own way, and its loop;
//   - ipip, ip6tnl and vxlan links with the input firewall of the receiver, and
//     tunnels of other pod networks (Overlay);
//   - masquerading on the way out and its reversal for the reply, and sealed prefixes;
//   - the underlay: segments, routers that know their site and drop sources that
//     are not of it, strict sites that let only their own addresses pass, source
//     NAT and forwarded ports towards the internet. Private addresses of other
//     sites are unreachable.
//
// What is simplified: a pod is any address of a pod CIDR; a machine behind an
// allowed location IP answers to its own site only; handshakes always succeed
// if either side's first packet arrives; a NAT keeps every mapping; a route over
// a link that is down kills the packet, where a kernel would drop the route.
//
// What is not modelled: MTU and fragments, rp_filter, ports but WireGuard's,
// ICMP errors, services, IPv6 link-local addresses and neighbour discovery,
// multipath, time.
package walk
