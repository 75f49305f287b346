// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// wireGuardPort is kg's --port.
const wireGuardPort = 51820

// setNAT writes the firewall of a cloud's router, in the namespace of the
// calling thread. inner is who gets unsolicited packets through a full cone.
//
//	table inet nat {
//		chain postrouting {
//			type nat hook postrouting priority srcnat
//			oifname "eth0" masquerade [random-fully]
//		}
//		chain prerouting {	# full cone
//			type nat hook prerouting priority dstnat
//			iifname "eth0" meta nfproto ipv4 udp dport 51820 dnat to INNER
//		}
//		chain input {	# unless OpenInput
//			type filter hook input priority filter
//			iifname "eth0" meta l4proto { tcp, udp } ct state new drop
//		}
//	}
//
// Without the input chain, an unsolicited packet to the router leaves a
// conntrack entry. It takes the port that the inner host's flow to the same
// place would get, and hole punching fails where a real router's would work.
func setNAT(c CloudSpec, inner []netip.Addr) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "nat"})
	if c.NAT != NATNone {
		post := conn.AddChain(&nftables.Chain{
			Table: table, Name: "postrouting", Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		masquerade := &expr.Masq{FullyRandom: c.NAT == NATSymmetric}
		conn.AddRule(&nftables.Rule{Table: table, Chain: post, Exprs: append(onLink(expr.MetaKeyOIFNAME), masquerade)})
	}
	if c.NAT == NATFullCone {
		pre := conn.AddChain(&nftables.Chain{
			Table: table, Name: "prerouting", Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest,
		})
		for _, ip := range inner {
			conn.AddRule(&nftables.Rule{Table: table, Chain: pre, Exprs: dnatWireGuard(ip)})
		}
	}
	if !c.OpenInput && c.NAT != NATNone {
		input := conn.AddChain(&nftables.Chain{
			Table: table, Name: "input", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			conn.AddRule(&nftables.Rule{Table: table, Chain: input, Exprs: dropNew(proto)})
		}
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("nat of cloud %q: %w", c.Name, err)
	}
	return nil
}

// onLink matches packets that come in or go out through the uplink.
func onLink(key expr.MetaKey) []expr.Any {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, publicLink)
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
	}
}

func dropNew(proto byte) []expr.Any {
	return append(onLink(expr.MetaKeyIIFNAME),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{
			SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitNEW), Xor: make([]byte, 4),
		},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		&expr.Verdict{Kind: expr.VerdictDrop},
	)
}

func dnatWireGuard(ip netip.Addr) []expr.Any {
	family := byte(unix.NFPROTO_IPV4)
	if ip.Is6() {
		family = unix.NFPROTO_IPV6
	}
	return append(onLink(expr.MetaKeyIIFNAME),
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(wireGuardPort)},
		&expr.Immediate{Register: 1, Data: ip.AsSlice()},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(family), RegAddrMin: 1},
	)
}
