// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"go4.org/netipx"
)

// errTable says that the table is there, with content that is none of our making.
var errTable = errors.New("the table is not readable")

// observedTable is the table as the kernel has it.
type observedTable struct {
	chains map[string]fwChain // without the rules themselves
	rules  map[string][]string
	sets   map[string]observedSet
}

// observedSet is an interval set, see fwSet.
type observedSet struct {
	v6     bool
	ranges []netipx.IPRange
}

// observeTable reads the table, nil without one. An errTable says that it
// is there, but its content is none that we would have written.
func observeTable(conn *nftables.Conn) (*observedTable, error) {
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == tableName }) {
		return nil, nil
	}
	o := &observedTable{chains: map[string]fwChain{}, rules: map[string][]string{}, sets: map[string]observedSet{}}
	if err := o.readChains(conn); err != nil {
		return o, err
	}
	return o, o.readSets(conn)
}

func (o *observedTable) readChains(conn *nftables.Conn) error {
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return err
	}
	for _, c := range chains {
		if c.Table == nil || c.Table.Name != tableName {
			continue
		}
		seen := fwChain{name: c.Name, kind: string(c.Type)}
		if c.Hooknum != nil && c.Priority != nil && c.Policy != nil && *c.Policy == nftables.ChainPolicyAccept {
			seen.number = int32(*c.Priority)
			for _, hook := range []string{"prerouting", "input", "forward", "postrouting"} {
				if *c.Hooknum == *hookOf(hook) {
					seen.hook = hook
				}
			}
		}
		o.chains[c.Name] = seen
		rules, err := conn.GetRules(kiloTable(), c)
		if err != nil {
			return fmt.Errorf("%w: chain %s: %w", errTable, c.Name, err)
		}
		for _, r := range rules {
			comment, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			o.rules[c.Name] = append(o.rules[c.Name], comment)
		}
	}
	return nil
}

func (o *observedTable) readSets(conn *nftables.Conn) error {
	sets, err := conn.GetSets(kiloTable())
	if err != nil {
		return fmt.Errorf("%w: sets: %w", errTable, err)
	}
	for _, s := range sets {
		v6 := s.KeyType.Bytes == 16
		if !s.Interval || s.IsMap || s.Constant || s.Anonymous || s.HasTimeout {
			return fmt.Errorf("%w: set %s is not of our kind", errTable, s.Name)
		}
		elements, err := conn.GetSetElements(s)
		if err != nil {
			return fmt.Errorf("%w: set %s: %w", errTable, s.Name, err)
		}
		ranges, ok := rangesFrom(elements, v6)
		if !ok {
			return fmt.Errorf("%w: set %s has elements that are no ranges", errTable, s.Name)
		}
		o.sets[s.Name] = observedSet{v6, ranges}
	}
	return nil
}

// sameShape reports whether all but the elements of sets is as desired.
func (o *observedTable) sameShape(t fwTable) bool {
	if len(o.chains) != len(t.chains) || len(o.sets) != len(t.sets) {
		return false
	}
	for _, c := range t.chains {
		seen, ok := o.chains[c.name]
		if !ok || seen.kind != c.kind || seen.hook != c.hook || seen.number != c.number || len(o.rules[c.name]) != len(c.rules) {
			return false
		}
		for i, r := range c.rules {
			if o.rules[c.name][i] != r.String() {
				return false
			}
		}
	}
	for _, s := range t.sets {
		if seen, ok := o.sets[s.name]; !ok || seen.v6 != s.v6 {
			return false
		}
	}
	return true
}

// rangesFrom is the inverse of elementsOf. ok is false if the elements are none of its making.
func rangesFrom(elements []nftables.SetElement, v6 bool) (ranges []netipx.IPRange, ok bool) {
	slices.SortFunc(elements, func(a, b nftables.SetElement) int { return bytes.Compare(a.Key, b.Key) })
	for i := 0; i < len(elements); i++ {
		from, valid := netip.AddrFromSlice(elements[i].Key)
		if !valid || from.Is6() != v6 {
			return nil, false
		}
		if elements[i].IntervalEnd {
			if i == 0 && from.IsUnspecified() {
				continue // nft(8) starts its sets so: nothing begins at 0
			}
			return nil, false
		}
		to := lastAddr(v6)
		if i+1 < len(elements) {
			i++
			end, valid := netip.AddrFromSlice(elements[i].Key)
			if !valid || !elements[i].IntervalEnd || end.Is6() != v6 {
				return nil, false
			}
			to = end.Prev()
		}
		ranges = append(ranges, netipx.IPRangeFrom(from, to))
	}
	return ranges, true
}

func lastAddr(v6 bool) netip.Addr {
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	if v6 {
		all = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netipx.PrefixLastIP(all)
}
