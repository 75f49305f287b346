// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routeProtocol marks kg's routes and rules in the kernel.
const routeProtocol = 117

// KiloRoutes returns the destinations of the routes on the host that bear kg's
// mark, in all tables.
func (h *Host) KiloRoutes() ([]netip.Prefix, error) {
	var out []netip.Prefix
	err := h.Do(func() error {
		filter := &netlink.Route{Protocol: routeProtocol, Table: unix.RT_TABLE_UNSPEC}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err := netlink.RouteListFiltered(family, filter, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TABLE)
			if err != nil {
				return fmt.Errorf("list routes of %s: %w", h.Name(), err)
			}
			for _, r := range routes {
				ip, _ := netip.AddrFromSlice(r.Dst.IP)
				bits, _ := r.Dst.Mask.Size()
				out = append(out, netip.PrefixFrom(ip.Unmap(), bits))
			}
		}
		return nil
	})
	return out, err
}

// KiloRules counts the policy-routing rules on the host that bear kg's mark.
func (h *Host) KiloRules() (n int, err error) {
	err = h.Do(func() error {
		rules, err := netlink.RuleList(netlink.FAMILY_ALL)
		for _, r := range rules {
			if r.Protocol == routeProtocol {
				n++
			}
		}
		return err
	})
	return n, err
}

// HasKiloTable reports whether the host has the nftables table inet kilo.
func (h *Host) HasKiloTable() (has bool, err error) {
	err = h.Do(func() error {
		conn, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
		for _, t := range tables {
			has = has || t.Name == "kilo"
		}
		return err
	})
	return has, err
}

// Children is what a process did by way of other processes.
type Children struct {
	// Running are the PIDs of its children.
	Running []int
	// MinorFaults of children that ended: not 0 if there ever was one (cminflt in proc(5)).
	MinorFaults uint64
}

// Children reads the children of the process from the kernel.
func (p *Process) Children() (Children, error) {
	var c Children
	proc := filepath.Join("/proc", strconv.Itoa(p.PID))
	stat, err := os.ReadFile(filepath.Join(proc, "stat"))
	if err != nil {
		return c, err
	}
	// The name in parentheses may contain anything; cminflt is the 11th field.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 9 {
		return c, fmt.Errorf("%s/stat: %q", proc, stat)
	}
	if c.MinorFaults, err = strconv.ParseUint(fields[8], 10, 64); err != nil {
		return c, fmt.Errorf("%s/stat: %w", proc, err)
	}
	threads, err := filepath.Glob(filepath.Join(proc, "task", "*", "children"))
	if err != nil {
		return c, err
	}
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for f := range strings.FieldsSeq(string(b)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return c, fmt.Errorf("%s: %w", path, err)
			}
			c.Running = append(c.Running, pid)
		}
	}
	return c, nil
}
