// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kilomesh/kilo/internal/mesh"
)

// ownRule is a rule that the kernel has with our protocol.
type ownRule struct {
	mesh.Rule
	// odd rules have another priority, or match on what a mesh.Rule cannot say.
	odd bool
	raw netlink.Rule
}

var errNoFamily = errors.New("the rule has no destination, and so no address family")

func familyOf(a netip.Addr) int {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// observeRules reads the rules of our protocol.
func (p *pass) observeRules() ([]ownRule, error) {
	var own []ownRule
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rules, err := dump(func() ([]netlink.Rule, error) { return p.h.nl.RuleList(family) })
		if err != nil && !noFamily(err) {
			return nil, err
		}
		for _, r := range rules {
			if r.Protocol == RouteProtocol {
				own = append(own, ownRuleOf(r))
			}
		}
	}
	return own, nil
}

func ownRuleOf(r netlink.Rule) ownRule {
	o := ownRule{raw: r, Rule: mesh.Rule{From: prefixOf(r.Src), To: prefixOf(r.Dst), IIf: r.IifName, Protocol: mesh.Protocol(r.IPProto), Table: r.Table}} //nolint:gosec // the kernel has a byte
	if r.Sport != nil {
		o.SourcePorts = mesh.PortRange{First: r.Sport.Start, Last: r.Sport.End}
	}
	if !o.To.IsValid() { // the kernel does not tell a prefix of length 0 from none
		if o.To = netip.PrefixFrom(netip.IPv4Unspecified(), 0); r.Family == unix.AF_INET6 {
			o.To = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
	}
	o.odd = r.Priority != RulePriority || r.OifName != "" || r.Mark != 0 || r.Invert || r.Tos != 0 || r.Goto > 0 ||
		r.Dport != nil || r.UIDRange != nil || r.SuppressPrefixlen >= 0 || r.SuppressIfgroup >= 0 || r.TunID != 0
	return o
}

// addRules adds the rules that are missing, and returns those that are to be deleted.
func (p *pass) addRules() (stale []ownRule) {
	own, err := p.observeRules()
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("ip rule list: %w", err))
		return nil
	}
	have := map[mesh.Rule]bool{}
	for _, o := range own {
		if !o.odd {
			have[o.Rule] = true
		}
	}
	want := map[mesh.Rule]bool{}
	for _, w := range p.want.Rules {
		c := Change{OpAdd, KindRule, ruleText(w)}
		if !w.To.IsValid() {
			p.fail(c, errNoFamily)
			continue
		}
		if want[w] {
			continue
		}
		if want[w] = true; !have[w] {
			p.write(c, func() error { return p.h.nl.RuleAdd(rawRule(w)) })
		}
	}
	seen := map[mesh.Rule]bool{}
	for _, o := range own {
		if o.odd || !want[o.Rule] || seen[o.Rule] {
			stale = append(stale, o)
			continue
		}
		seen[o.Rule] = true
	}
	return stale
}

// deleteRules deletes rules of ours.
func (p *pass) deleteRules(stale []ownRule) {
	for _, o := range stale {
		p.write(Change{OpDelete, KindRule, ruleText(o.Rule)}, func() error {
			return gone(p.h.nl.RuleDel(&o.raw), unix.ENOENT, unix.ESRCH)
		})
	}
}

func rawRule(w mesh.Rule) *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.Priority, r.Protocol, r.Table, r.IifName = familyOf(w.To.Addr()), RulePriority, RouteProtocol, w.Table, w.IIf
	if w.From.IsValid() {
		r.Src = ipNet(w.From)
	}
	if w.To.Bits() > 0 {
		r.Dst = ipNet(w.To)
	}
	if r.IPProto = int(w.Protocol); w.SourcePorts != (mesh.PortRange{}) {
		r.Sport = netlink.NewRulePortRange(w.SourcePorts.First, w.SourcePorts.Last)
	}
	return r
}

func ruleText(r mesh.Rule) string {
	return fmt.Sprintf("pref %d %s", RulePriority, ruleWords(r))
}

func ruleWords(r mesh.Rule) string { return strings.TrimPrefix(r.String(), "rule ") }
