// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/google/nftables/xt"
)

// The other agent's chains are made by iptables(8): either in nf_tables, where
// netlink reaches them, or in the older x_tables, which only that program can
// write. Beside its own two chains it has rules in those of the host: jumps to
// its own, and some that accept or drop. Their comments tell them.

const legacyComment = "Kilo: "

var (
	legacyChains     = []string{"KILO-IPIP", "KILO-NAT"}
	legacyTables     = []string{"filter", "nat"}
	legacyBaseChains = []string{"FORWARD", "INPUT", "POSTROUTING"}
)

// removeLegacyChains removes the rules and chains.
func (p *pass) removeLegacyChains() {
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		if err := p.legacyNFT(family); err != nil {
			p.h.closeNFT()
			p.errs = append(p.errs, fmt.Errorf("nft list ruleset %s: %w", familyWord(family), err))
		}
	}
	for _, v6 := range []bool{false, true} {
		p.legacyXtables(iptablesOf(v6))
	}
}

func familyWord(f nftables.TableFamily) string {
	if f == nftables.TableFamilyIPv6 {
		return "ip6"
	}
	return "ip"
}

// legacyNFT removes those of one family in nf_tables, all at once.
func (p *pass) legacyNFT(family nftables.TableFamily) error {
	conn, err := p.h.nftConn()
	if err != nil {
		return err
	}
	chains, err := conn.ListChainsOfTableFamily(family)
	if err != nil {
		return err
	}
	chains = slices.DeleteFunc(chains, func(c *nftables.Chain) bool { return !slices.Contains(legacyTables, c.Table.Name) })
	var changes []Change
	for _, c := range chains {
		if !slices.Contains(legacyBaseChains, c.Name) {
			continue
		}
		rules, err := conn.GetRules(c.Table, c)
		if err != nil {
			return fmt.Errorf("table %s chain %s: %w", c.Table.Name, c.Name, err)
		}
		for _, r := range rules {
			if !isLegacyRule(r) {
				continue
			}
			if err := conn.DelRule(r); err != nil {
				return err
			}
			changes = append(changes, Change{OpDelete, KindChain, fmt.Sprintf("rule %s %s %s handle %d", familyWord(family), c.Table.Name, c.Name, r.Handle)})
		}
	}
	for _, c := range chains {
		if slices.Contains(legacyChains, c.Name) {
			conn.FlushChain(c)
			conn.DelChain(c)
			changes = append(changes, Change{OpDelete, KindChain, fmt.Sprintf("chain %s %s %s", familyWord(family), c.Table.Name, c.Name)})
		}
	}
	if len(changes) > 0 {
		p.flush(conn, changes...)
	}
	return nil
}

// isLegacyRule reads what iptables-nft(8) makes of a rule.
func isLegacyRule(r *nftables.Rule) bool {
	if c, ok := userdata.GetString(r.UserData, userdata.TypeComment); ok && strings.HasPrefix(c, legacyComment) {
		return true
	}
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case *expr.Match:
			if c, ok := e.Info.(*xt.Comment); ok && strings.HasPrefix(string(*c), legacyComment) {
				return true
			}
		case *expr.Verdict:
			if slices.Contains(legacyChains, e.Chain) {
				return true
			}
		}
	}
	return false
}

// legacyXtables removes those of one family in x_tables. Nothing is run where
// the kernel has no such tables.
func (p *pass) legacyXtables(x iptables) {
	for _, table := range legacyTables {
		has, err := x.has(table)
		if err != nil {
			p.errs = append(p.errs, err)
		}
		if has {
			p.legacyXtable(x, table)
		}
	}
}

func (p *pass) legacyXtable(x iptables, table string) {
	program, err := x.find(p.ctx)
	if errors.Is(err, errNoProgram) {
		p.h.log.WarnContext(p.ctx, "cannot look for what other releases left in this table; see that it has no chain KILO-NAT or KILO-IPIP", "table", table, "error", err)
		return
	}
	var saved string
	if err == nil {
		saved, err = runProgram(p.ctx, "", program+"-save", "-t", table)
	}
	if err != nil {
		p.errs = append(p.errs, err)
		return
	}
	if script := legacyScript(table, saved); script != "" {
		p.write(Change{OpDelete, KindChain, fmt.Sprintf("rules and chains of other releases in %s -t %s", x.program, table)}, func() error {
			_, err := runProgram(p.ctx, script, program+"-restore", "--noflush", "--wait")
			return err
		})
	}
}

// legacyScript returns what iptables-restore(8) must be told so that a table
// loses the rules and chains in question, "" if it has none. It takes what iptables-save(8) printed.
func legacyScript(table, saved string) string {
	var rules, chains strings.Builder
	for line := range strings.Lines(saved) {
		line = strings.TrimSuffix(line, "\n")
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		if name, ok := strings.CutPrefix(words[0], ":"); ok && slices.Contains(legacyChains, name) {
			fmt.Fprintf(&chains, "-F %s\n-X %s\n", name, name)
			continue
		}
		rule, ok := strings.CutPrefix(line, "-A ")
		if !ok || !slices.Contains(legacyBaseChains, words[1]) {
			continue
		}
		target := slices.Index(words, "-j") + 1
		isJump := target > 0 && target < len(words) && slices.Contains(legacyChains, words[target])
		if isJump || strings.Contains(rule, `--comment "`+legacyComment) {
			fmt.Fprintf(&rules, "-D %s\n", rule)
		}
	}
	if rules.Len()+chains.Len() == 0 {
		return ""
	}
	return "*" + table + "\n" + rules.String() + chains.String() + "COMMIT\n"
}
