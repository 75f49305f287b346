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

// ruleKey is a rule as a comparable value. A prefix of length 0 is none: the
// kernel does not tell the two apart.
type ruleKey struct {
	mesh.Rule
	family int
}

// ownRule is a rule that the kernel has with our protocol.
type ownRule struct {
	key ruleKey
	// odd rules have another priority, or match on what a mesh.Rule cannot say.
	odd bool
	raw netlink.Rule
}

var errNoFamily = errors.New("the rule has no address, and so no address family")

func keyOfRule(r mesh.Rule) (ruleKey, error) {
	k := ruleKey{Rule: r, family: unix.AF_INET}
	switch {
	case r.To.IsValid():
		k.family = familyOf(r.To.Addr())
	case r.From.IsValid():
		k.family = familyOf(r.From.Addr())
	default:
		return ruleKey{}, errNoFamily
	}
	for _, p := range []*netip.Prefix{&k.From, &k.To} {
		if *p = p.Masked(); p.Bits() == 0 {
			*p = netip.Prefix{}
		}
	}
	return k, nil
}

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
	o := ownRule{raw: r, key: ruleKey{mesh.Rule{From: prefixOf(r.Src), To: prefixOf(r.Dst), IIf: r.IifName, Table: r.Table}, r.Family}}
	o.odd = r.Priority != RulePriority || r.OifName != "" || r.Mark != 0 || r.Invert || r.Tos != 0 || r.Goto > 0 ||
		r.IPProto != 0 || r.Dport != nil || r.Sport != nil || r.UIDRange != nil || r.SuppressPrefixlen >= 0 || r.SuppressIfgroup >= 0 || r.TunID != 0
	return o
}

// addRules adds the rules that are missing, and returns those that are to be deleted.
func (p *pass) addRules() (stale []ownRule) {
	own, err := p.observeRules()
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("ip rule list: %w", err))
		return nil
	}
	have := map[ruleKey]bool{}
	for _, o := range own {
		if !o.odd {
			have[o.key] = true
		}
	}
	want := map[ruleKey]bool{}
	for _, w := range p.want.Rules {
		c := Change{OpAdd, KindRule, ruleText(w)}
		k, err := keyOfRule(w)
		if err != nil {
			p.fail(c, err)
			continue
		}
		if want[k] {
			continue
		}
		if want[k] = true; !have[k] {
			p.write(c, func() error { return p.h.nl.RuleAdd(rawRule(k)) })
		}
	}
	seen := map[ruleKey]bool{}
	for _, o := range own {
		if o.odd || !want[o.key] || seen[o.key] {
			stale = append(stale, o)
			continue
		}
		seen[o.key] = true
	}
	return stale
}

// deleteRules deletes rules of ours.
func (p *pass) deleteRules(stale []ownRule) {
	for _, o := range stale {
		p.write(Change{OpDelete, KindRule, ruleText(o.key.Rule)}, func() error {
			return gone(p.h.nl.RuleDel(&o.raw), unix.ENOENT, unix.ESRCH)
		})
	}
}

func rawRule(k ruleKey) *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.Priority, r.Protocol, r.Table, r.IifName = k.family, RulePriority, RouteProtocol, k.Table, k.IIf
	if k.From.IsValid() {
		r.Src = ipNet(k.From)
	}
	if k.To.IsValid() {
		r.Dst = ipNet(k.To)
	}
	return r
}

func ruleText(r mesh.Rule) string {
	return fmt.Sprintf("pref %d %s", RulePriority, strings.TrimPrefix(r.String(), "rule "))
}
