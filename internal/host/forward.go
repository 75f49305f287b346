// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/google/nftables/xt"

	"github.com/kilomesh/kilo/internal/mesh"
)

// An accept in our own table is no help against a drop in another one, since
// every chain at a hook is asked (nft(8)). So what --iptables-forward-rules
// accepts is accepted in the chain FORWARD of iptables(8). That is a chain of
// nf_tables, which netlink reaches, and one of the older x_tables, see
// xtables.go: a host may have either or both. A chain that is not there
// drops nothing, and is not made.

// forwardMark begins the comments of our rules, by which they are known again.
const forwardMark = "kilo: forward "

const forwardChainName = "FORWARD"

// forwardRule accepts forwarded packets from a prefix, or with dst to it.
type forwardRule struct {
	prefix netip.Prefix
	dst    bool
}

// comment says all that the rule does, so that the same comment is the same rule.
func (r forwardRule) comment() string {
	if r.dst {
		return forwardMark + "to " + r.prefix.String()
	}
	return forwardMark + "from " + r.prefix.String()
}

// forwardRules are those that a State asks for in one family.
func forwardRules(s mesh.State, v6 bool) (rules []forwardRule) {
	for _, prefix := range s.AcceptForward {
		if prefix.Addr().Is6() == v6 {
			rules = append(rules, forwardRule{prefix, false}, forwardRule{prefix, true})
		}
	}
	return rules
}

// forward adds the missing rules and deletes those that are not desired.
func (p *pass) forward() {
	for _, v6 := range []bool{false, true} {
		rules := forwardRules(p.want, v6)
		if err := p.forwardNFT(v6, rules); err != nil {
			p.h.closeNFT()
			p.errs = append(p.errs, fmt.Errorf("nft list chain %s: %w", forwardChain(v6), err))
		}
		p.forwardXtables(v6, rules)
	}
}

// forwardChain names the chain in nft's syntax.
func forwardChain(v6 bool) string {
	if v6 {
		return "ip6 filter FORWARD"
	}
	return "ip filter FORWARD"
}

// diffForward returns the rules that the comments lack, and says which of the
// comments are too many: others than ours never are.
func diffForward(rules []forwardRule, comments []string) (missing []forwardRule, surplus []bool) {
	surplus = make([]bool, len(comments))
	for i, c := range comments {
		wanted := slices.ContainsFunc(rules, func(r forwardRule) bool { return r.comment() == c })
		surplus[i] = strings.HasPrefix(c, forwardMark) && (!wanted || slices.Contains(comments[:i], c))
	}
	for _, r := range rules {
		if !slices.Contains(comments, r.comment()) {
			missing = append(missing, r)
		}
	}
	return missing, surplus
}

// forwardChange is the Change of a chain, nil if there is none.
func forwardChange(where string, missing []forwardRule, surplus []bool) *Change {
	deleted := 0
	for _, s := range surplus {
		if s {
			deleted++
		}
	}
	if len(missing)+deleted == 0 {
		return nil
	}
	return &Change{OpReplace, KindChain, fmt.Sprintf("%s: %d rules added, %d deleted", where, len(missing), deleted)}
}

// forwardNFT does it in the chain of nf_tables, in one transaction.
func (p *pass) forwardNFT(v6 bool, want []forwardRule) error {
	conn, err := p.h.nftConn()
	if err != nil {
		return err
	}
	chain := &nftables.Chain{Name: forwardChainName, Table: &nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4}}
	if v6 {
		chain.Table.Family = nftables.TableFamilyIPv6
	}
	have, err := conn.GetRules(chain.Table, chain) // none, and no error, without the chain
	if err != nil {
		return err
	}
	comments := make([]string, len(have))
	for i, r := range have {
		comments[i] = commentOf(r)
	}
	missing, surplus := diffForward(want, comments)
	if len(missing) > 0 {
		// Asked only now: iptables(8) may have thousands of chains.
		chains, err := conn.ListChainsOfTableFamily(chain.Table.Family)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(chains, func(c *nftables.Chain) bool { return c.Name == chain.Name && c.Table.Name == chain.Table.Name }) {
			missing = nil
		}
	}
	change := forwardChange(forwardChain(v6), missing, surplus)
	if change == nil {
		return nil
	}
	for i, r := range have {
		if surplus[i] {
			r.Table, r.Chain = chain.Table, chain
			if err := conn.DelRule(r); err != nil {
				return err
			}
		}
	}
	for _, r := range slices.Backward(missing) { // each goes before those that are there
		conn.InsertRule(&nftables.Rule{
			Table: chain.Table, Chain: chain, Exprs: r.exprs(),
			UserData: userdata.AppendString(nil, userdata.TypeComment, r.comment()),
		})
	}
	p.flush(conn, *change)
	return nil
}

// commentOf reads the comment of a rule: nft(8) and we write it into the user
// data, where iptables-nft(8) reads it too; but that writes it as a match, and
// so do ours come back when it restores what it saved.
func commentOf(r *nftables.Rule) string {
	if c, ok := userdata.GetString(r.UserData, userdata.TypeComment); ok {
		return c
	}
	for _, e := range r.Exprs {
		if m, ok := e.(*expr.Match); ok {
			if c, ok := m.Info.(*xt.Comment); ok {
				return string(*c)
			}
		}
	}
	return ""
}

// exprs compiles the rule to what iptables-nft(8) would make of it: of anything
// else that program could not list, nor change, the whole table.
func (r forwardRule) exprs() []expr.Any {
	size, offset := uint32(4), uint32(12) // saddr
	if r.prefix.Addr().Is6() {
		size, offset = 16, 8
	}
	if r.dst {
		offset += size
	}
	var out []expr.Any
	if r.prefix.Bits() > 0 {
		out = append(out, &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size})
		if !r.prefix.IsSingleIP() {
			out = append(out, &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: size, Mask: ipNet(r.prefix).Mask, Xor: make([]byte, size)})
		}
		out = append(out, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: r.prefix.Addr().AsSlice()})
	}
	return append(out, &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictAccept})
}
