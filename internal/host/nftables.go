// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// tableName is our mark: the table of this name and family inet is ours as a whole.
const tableName = "kilo"

// nftConn returns the connection to nftables, opening it if needed.
func (h *Host) nftConn() (*nftables.Conn, error) {
	if h.nft != nil {
		return h.nft, nil
	}
	// One transaction with a thousand elements overflows the default buffers: on
	// the way in with EMSGSIZE, on the way out, when all are acknowledged, with ENOBUFS.
	const size = 32 << 20
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(
		func(c *netlink.Conn) error { return c.SetWriteBuffer(size) },
		func(c *netlink.Conn) error { return c.SetReadBuffer(size) },
		h.noteNFTPort,
	))
	if err != nil {
		return nil, err
	}
	h.nft = conn
	return conn, nil
}

// noteNFTPort keeps the address of the connection, by which Watch tells what it
// wrote from what others did.
func (h *Host) noteNFTPort(c *netlink.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var addr unix.Sockaddr
	var nameErr error
	err = raw.Control(func(fd uintptr) { addr, nameErr = unix.Getsockname(int(fd)) })
	if own, ok := addr.(*unix.SockaddrNetlink); ok {
		h.nftPort.Store(own.Pid)
	}
	return errors.Join(err, nameErr)
}

// closeNFT drops the connection: after an error there may be answers left in it.
func (h *Host) closeNFT() {
	if h.nft != nil {
		_ = h.nft.CloseLasting()
		h.nft = nil
	}
}

// wantsNoTable reports whether the State is that of a node without Kilo.
func (p *pass) wantsNoTable() bool {
	f := p.want.Firewall
	return len(p.want.Links) == 0 && len(f.MasqueradeFrom)+len(f.MasqueradeTo)+len(f.Known)+len(f.TunnelFrom) == 0
}

// firewall brings the table to the desired content: nothing if it is so, one
// transaction with the differing elements if only those differ, else one that
// replaces the table.
func (p *pass) firewall() {
	conn, err := p.h.nftConn()
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("nft list table inet %s: %w", tableName, err))
		return
	}
	var have *observedTable
	if p.base != nil && !p.wantsNoTable() {
		have = tableOf(p.base.Firewall)
	} else {
		have, err = observeTable(conn)
	}
	if err != nil && !errors.Is(err, errTable) {
		p.h.closeNFT()
		p.errs = append(p.errs, fmt.Errorf("nft list table inet %s: %w", tableName, err))
		return
	}
	if p.wantsNoTable() {
		if have != nil {
			conn.DelTable(kiloTable())
			p.flush(conn, Change{OpDelete, KindTable, "inet " + tableName})
		}
		return
	}
	want := firewallTable(p.want.Firewall)
	c := Change{OpAdd, KindTable, "inet " + tableName}
	if have != nil {
		c.Op = OpReplace
		if err == nil && have.sameShape(want) && p.updateSets(want, have) {
			return
		}
	}
	if conn, err = p.h.nftConn(); err != nil { // a failed update of sets closed it
		p.fail(c, err)
		return
	}
	if err := replaceTable(conn, want, have != nil); err != nil {
		p.h.closeNFT()
		p.fail(c, err)
		return
	}
	p.flush(conn, c)
}

// flush sends a transaction.
func (p *pass) flush(conn *nftables.Conn, changes ...Change) bool {
	if p.ctx.Err() != nil {
		p.h.closeNFT() // with what is queued in it
		return true
	}
	err := p.h.countWrite()
	if err == nil {
		err = conn.Flush()
	}
	if err != nil {
		p.h.closeNFT()
		p.fail(changes[0], err)
		return false
	}
	for _, c := range changes {
		p.did(c)
	}
	return true
}

// updateSets changes the elements that differ. It reports whether the table is
// as desired now; its failure is no error, as the table can still be replaced.
func (p *pass) updateSets(want fwTable, have *observedTable) bool {
	conn := p.h.nft
	var changes []Change
	for _, s := range want.sets {
		add, del := diffRanges(s.ranges, have.sets[s.name].ranges)
		if len(add)+len(del) == 0 {
			continue
		}
		changes = append(changes, Change{OpReplace, KindSet, fmt.Sprintf("inet %s %s: %d added, %d deleted", tableName, s.name, len(add), len(del))})
		set := nftSet(s)
		for chunk := range slices.Chunk(del, rangesPerMessage) {
			if err := conn.SetDeleteElements(set, elementsOf(chunk)); err != nil {
				p.h.closeNFT()
				return false
			}
		}
		if err := addElements(conn, set, add); err != nil {
			p.h.closeNFT()
			return false
		}
	}
	if len(changes) == 0 {
		return true
	}
	errs := len(p.errs)
	if p.flush(conn, changes...) {
		return true
	}
	p.errs = p.errs[:errs]
	return false
}

// diffRanges compares the ranges of a set with those that it has; both are sorted.
func diffRanges(want iter.Seq[netipx.IPRange], have []netipx.IPRange) (add, del []netipx.IPRange) {
	for w := range want {
		for len(have) > 0 && have[0].From().Less(w.From()) {
			del = append(del, have[0])
			have = have[1:]
		}
		if len(have) > 0 && have[0] == w {
			have = have[1:]
			continue
		}
		add = append(add, w) // one that only begins alike goes with those before the next
	}
	return add, append(del, have...)
}

func kiloTable() *nftables.Table {
	return &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
}

// replaceTable queues the transaction that puts the table in place of the one that is there.
func replaceTable(conn *nftables.Conn, t fwTable, exists bool) error {
	table := kiloTable()
	if exists {
		conn.DelTable(table)
	}
	conn.AddTable(table)
	for _, s := range t.sets {
		set := nftSet(s)
		if err := conn.AddSet(set, nil); err != nil {
			return err
		}
		if err := addElements(conn, set, slices.Collect(s.ranges)); err != nil {
			return err
		}
	}
	for _, c := range t.chains {
		policy := nftables.ChainPolicyAccept
		chain := conn.AddChain(&nftables.Chain{
			Name: c.name, Table: table, Type: nftables.ChainType(c.kind), Hooknum: hookOf(c.hook),
			Priority: new(nftables.ChainPriority(c.number)), Policy: &policy,
		})
		for _, r := range c.rules {
			conn.AddRule(&nftables.Rule{
				Table: table, Chain: chain, Exprs: r.exprs(),
				UserData: userdata.AppendString(nil, userdata.TypeComment, r.String()),
			})
		}
	}
	return nil
}

// hookOf returns the hook of that name, nil for one that we do not use.
func hookOf(name string) *nftables.ChainHook {
	switch name {
	case "prerouting":
		return nftables.ChainHookPrerouting
	case "input":
		return nftables.ChainHookInput
	case "forward":
		return nftables.ChainHookForward
	case "postrouting":
		return nftables.ChainHookPostrouting
	default:
		return nil
	}
}

func nftSet(s fwSet) *nftables.Set {
	set := &nftables.Set{Table: kiloTable(), Name: s.name, KeyType: nftables.TypeIPAddr, Interval: true, KeyByteOrder: binaryutil.BigEndian}
	if s.v6 {
		set.KeyType = nftables.TypeIP6Addr
	}
	return set
}

// rangesPerMessage keeps a message below 64 KiB, the longest that a netlink attribute can be.
const rangesPerMessage = 400

func addElements(conn *nftables.Conn, set *nftables.Set, ranges []netipx.IPRange) error {
	for chunk := range slices.Chunk(ranges, rangesPerMessage) {
		if err := conn.SetAddElements(set, elementsOf(chunk)); err != nil {
			return err
		}
	}
	return nil
}

// elementsOf returns the elements of an interval set: the first address of each
// range, and the first behind it with a flag, unless the address space ends there.
func elementsOf(ranges []netipx.IPRange) []nftables.SetElement {
	elements := make([]nftables.SetElement, 0, 2*len(ranges))
	for _, r := range ranges {
		elements = append(elements, nftables.SetElement{Key: r.From().AsSlice()})
		if end := r.To().Next(); end.IsValid() {
			elements = append(elements, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
		}
	}
	return elements
}

// exprs compiles the condition on the link.
func (l fwLink) exprs() (out []expr.Any) {
	key, op := expr.MetaKeyIIFNAME, expr.CmpOpEq
	if l.out {
		key = expr.MetaKeyOIFNAME
	}
	if l.not {
		op = expr.CmpOpNeq
	}
	for _, dev := range l.devs {
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, dev)
		out = append(out, &expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: name})
	}
	return out
}

// clampExprs compiles "tcp flags syn tcp option maxseg size set rt mtu", of which
// the kernel takes the lesser of both ways (net/netfilter/nft_rt.c).
func clampExprs() []expr.Any {
	const (
		flags, syn             = 13, 0x02 // in the header (RFC 9293, section 3.1)
		maxseg, offset, length = 2, 2, 2  // the option (section 3.2)
	)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: flags, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0}},
		&expr.Rt{Register: 1, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 2, Size: 2},
		&expr.Exthdr{SourceRegister: 1, Type: maxseg, Offset: offset, Len: length, Op: expr.ExthdrOpTcpopt},
	}
}

// exprs compiles the rule to what the kernel runs.
func (r fwRule) exprs() []expr.Any {
	family, size, saddr, daddr := byte(unix.NFPROTO_IPV4), uint32(4), uint32(12), uint32(16)
	if r.v6 {
		family, size, saddr, daddr = unix.NFPROTO_IPV6, 16, 8, 24
	}
	out := r.link.exprs()
	if r.clamp {
		return append(out, clampExprs()...)
	}
	if r.port != 0 {
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(r.port)})
	}
	// meta nfproto ipv4: nft(8) adds it to "ip saddr" in a table of family inet.
	out = append(out,
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}})
	if r.proto != 0 {
		if r.v6 {
			out = append(out, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1})
		} else {
			out = append(out, &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 9, Len: 1})
		}
		out = append(out, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{r.proto}})
	}
	for _, m := range r.match {
		offset := saddr
		if m.dst {
			offset = daddr
		}
		out = append(out,
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
			&expr.Lookup{SourceRegister: 1, SetName: m.set, Invert: m.not},
		)
	}
	if r.drop {
		return append(out, &expr.Verdict{Kind: expr.VerdictDrop})
	}
	return append(out, &expr.Masq{})
}
