// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"

	"github.com/kilomesh/kilo/internal/mesh"
)

// fwTable is the content of the table "inet kilo" as data: what is compared
// with the kernel, written to it and printed.
type fwTable struct {
	sets   []fwSet
	chains []fwChain
}

// fwSet is an interval set. Its ranges are sorted, and neither overlap nor touch.
type fwSet struct {
	name   string
	v6     bool
	ranges iter.Seq[netipx.IPRange]
}

// fwChain is a base chain.
type fwChain struct {
	name, kind, hook string
	// priority is nft's word; the number is the kernel's.
	priority string
	number   int32
	rules    []fwRule
}

// fwRule is one rule: "link, family saddr [not] in set, daddr not in set, verdict".
type fwRule struct {
	// link is a condition on the packet's link.
	link fwLink
	// clamp makes it a rule for TCP's SYN packets of both families, without addresses.
	clamp bool
	v6    bool
	// proto is a protocol number that the packet must have, 0 for any; port the
	// UDP port that it must be for, 0 for any.
	proto byte
	port  uint16
	match []fwMatch
	// drop, or masquerade.
	drop bool
}

// fwLink says that the link is one of the devices, or with not none of them;
// that by which the packet came in, or with out that by which it leaves.
type fwLink struct {
	out, not bool
	devs     []string
}

// fwMatch says that an address of the packet must (not) be in a set.
type fwMatch struct {
	dst, not bool
	set      string
}

// Priorities of nft(8) by name.
const (
	priorityRaw    = -300
	priorityMangle = -150
	priorityFilter = 0
	prioritySrcNAT = 100
)

// protoIPIP is the IP protocol number of IPv4 in IP (RFC 2003), protoIPv6 that of IPv6 in IP (RFC 2473).
const (
	protoIPIP = 4
	protoIPv6 = 41
)

// firewallTable lays the table out. The sets of postrouting are always there,
// so that a change of prefixes never changes more than elements; the input
// chain and its sets come and go with the tunnels.
func firewallTable(f mesh.Firewall) fwTable {
	var t fwTable
	t.addSets("known", f.Known)
	t.addSets("masquerade_from", f.MasqueradeFrom)
	t.addSets("masquerade_to", f.MasqueradeTo)
	post := fwChain{name: "postrouting", kind: "nat", hook: "postrouting", priority: "srcnat", number: prioritySrcNAT}
	for _, v6 := range []bool{false, true} {
		notKnown := fwMatch{dst: true, not: true, set: setName("known", v6)}
		post.rules = append(post.rules,
			fwRule{v6: v6, match: []fwMatch{{set: setName("masquerade_from", v6)}, notKnown}},
			fwRule{v6: v6, match: []fwMatch{{dst: true, set: setName("masquerade_to", v6)}, notKnown}},
		)
	}
	t.chains = append(t.chains, post)
	in := fwChain{name: "input", kind: "filter", hook: "input", priority: "filter", number: priorityFilter}
	for _, v6 := range []bool{false, true} {
		if !slices.ContainsFunc(f.TunnelFrom, func(p netip.Prefix) bool { return p.Addr().Is6() == v6 }) {
			continue // other people's tunnels over this family are not our business
		}
		from := fwSet{name: setName("tunnel_from", v6), v6: v6, ranges: rangesOf(f.TunnelFrom, v6)}
		t.sets = append(t.sets, from)
		notOurs := []fwMatch{{not: true, set: from.name}}
		if f.TunnelPort != 0 {
			in.rules = append(in.rules, fwRule{v6: v6, port: f.TunnelPort, match: notOurs, drop: true})
			continue
		}
		in.rules = append(in.rules, fwRule{v6: v6, proto: protoIPIP, match: notOurs, drop: true})
		if v6 {
			in.rules = append(in.rules, fwRule{v6: v6, proto: protoIPv6, match: notOurs, drop: true})
		}
	}
	if len(in.rules) > 0 {
		t.chains = append(t.chains, in)
	}
	t.clamp(f.ClampDevs)
	t.seal(f)
	return t
}

// clamp lays out the chain that fits the segments of TCP connections to our links.
func (t *fwTable) clamp(devs []string) {
	c := fwChain{name: "clamp", kind: "filter", hook: "forward", priority: "mangle", number: priorityMangle}
	for _, dev := range devs {
		for _, out := range []bool{false, true} {
			c.rules = append(c.rules, fwRule{clamp: true, link: fwLink{out: out, devs: []string{dev}}})
		}
	}
	if len(c.rules) > 0 {
		t.chains = append(t.chains, c)
	}
}

// seal lays out the chains that drop what is sealed and goes by other links.
func (t *fwTable) seal(f mesh.Firewall) {
	if len(f.SealedDevs) == 0 {
		return
	}
	t.addSets("sealed", f.Sealed)
	in := fwChain{name: "sealed_in", kind: "filter", hook: "prerouting", priority: "raw", number: priorityRaw}
	out := fwChain{name: "sealed_out", kind: "filter", hook: "postrouting", priority: "filter", number: priorityFilter}
	for _, v6 := range []bool{false, true} {
		set := setName("sealed", v6)
		in.rules = append(in.rules, fwRule{v6: v6, link: fwLink{not: true, devs: f.SealedDevs}, match: []fwMatch{{set: set}}, drop: true})
		out.rules = append(out.rules, fwRule{v6: v6, link: fwLink{out: true, not: true, devs: f.SealedDevs}, match: []fwMatch{{dst: true, set: set}}, drop: true})
	}
	t.chains = append(t.chains, in, out)
}

func (t *fwTable) addSets(name string, ps []netip.Prefix) {
	for _, v6 := range []bool{false, true} {
		t.sets = append(t.sets, fwSet{name: setName(name, v6), v6: v6, ranges: rangesOf(ps, v6)})
	}
}

func setName(name string, v6 bool) string {
	if v6 {
		return name + "6"
	}
	return name + "4"
}

// rangesOf yields the addresses of one family as the fewest ranges. The
// prefixes are sorted, and none contains another.
func rangesOf(ps []netip.Prefix, v6 bool) iter.Seq[netipx.IPRange] {
	return func(yield func(netipx.IPRange) bool) {
		var from, to netip.Addr // of the range that may go on
		for _, p := range ps {
			if p.Addr().Is6() != v6 {
				continue
			}
			if from.IsValid() && to.Next() == p.Addr() {
				to = netipx.PrefixLastIP(p)
				continue
			}
			if from.IsValid() && !yield(netipx.IPRangeFrom(from, to)) {
				return
			}
			from, to = p.Addr(), netipx.PrefixLastIP(p)
		}
		if from.IsValid() {
			yield(netipx.IPRangeFrom(from, to))
		}
	}
}

// FirewallText returns the table "inet kilo" that Apply makes of f, in the
// syntax that nft(8) prints and reads.
func FirewallText(f mesh.Firewall) string {
	var b strings.Builder
	b.WriteString("table inet kilo {\n")
	t := firewallTable(f)
	for _, s := range t.sets {
		fmt.Fprintf(&b, "\tset %s {\n\t\ttype %s\n\t\tflags interval\n", s.name, s.keyType())
		var texts []string
		for r := range s.ranges {
			texts = append(texts, rangeText(r))
		}
		if len(texts) > 0 {
			fmt.Fprintf(&b, "\t\telements = { %s }\n", strings.Join(texts, ",\n\t\t\t     "))
		}
		b.WriteString("\t}\n\n")
	}
	for i, c := range t.chains {
		if i > 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "\tchain %s {\n\t\ttype %s hook %s priority %s; policy accept;\n", c.name, c.kind, c.hook, c.priority)
		for _, r := range c.rules {
			fmt.Fprintf(&b, "\t\t%s\n", r)
		}
		b.WriteString("\t}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

func (s fwSet) keyType() string {
	if s.v6 {
		return "ipv6_addr"
	}
	return "ipv4_addr"
}

// rangeText prints a range as nft does: a single address, a prefix, or both ends.
func rangeText(r netipx.IPRange) string {
	if r.From() == r.To() {
		return r.From().String()
	}
	if p, ok := r.Prefix(); ok {
		return p.String()
	}
	return r.From().String() + "-" + r.To().String()
}

// words are in nft's syntax, one condition for each link.
func (l fwLink) words() (words []string) {
	side, not := "iifname", ""
	if l.out {
		side = "oifname"
	}
	if l.not {
		not = "!= "
	}
	for _, dev := range l.devs {
		words = append(words, fmt.Sprintf("%s %s%q", side, not, dev))
	}
	return words
}

// String returns the rule in nft's syntax.
func (r fwRule) String() string {
	family := "ip"
	if r.v6 {
		family = "ip6"
	}
	words := r.link.words()
	if r.clamp {
		return strings.Join(append(words, "tcp flags syn tcp option maxseg size set rt mtu"), " ")
	}
	switch {
	case r.port != 0:
		words = append(words, fmt.Sprintf("udp dport %d", r.port))
	case r.proto == 0:
	case r.v6:
		// Not "ip6 nexthdr": extension headers may come before the tunnelled packet.
		words = append(words, fmt.Sprintf("meta l4proto %d", r.proto))
	default:
		words = append(words, fmt.Sprintf("ip protocol %d", r.proto))
	}
	for _, m := range r.match {
		side, not := "saddr", ""
		if m.dst {
			side = "daddr"
		}
		if m.not {
			not = "!= "
		}
		words = append(words, fmt.Sprintf("%s %s %s@%s", family, side, not, m.set))
	}
	if r.drop {
		return strings.Join(append(words, "drop"), " ")
	}
	return strings.Join(append(words, "masquerade"), " ")
}
