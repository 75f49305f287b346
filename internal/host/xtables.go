// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// iptables names what concerns x_tables in one family: where the kernel lists
// the tables that it has, and the program. Of x_tables only the whole of a
// table can be written, in a form that depends on kernel and machine, so the
// program does it; but it runs only where the kernel has the table: merely
// listing rules would make it.
type iptables struct{ names, program string }

func iptablesOf(v6 bool) iptables {
	if v6 {
		return iptables{"/proc/thread-self/net/ip6_tables_names", "ip6tables"}
	}
	return iptables{"/proc/thread-self/net/ip_tables_names", "iptables"}
}

// has reports whether the kernel has the table.
func (x iptables) has(table string) (bool, error) {
	names, err := os.ReadFile(x.names)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return slices.Contains(strings.Fields(string(names)), table), err
}

var errNoProgram = errors.New("the kernel has rules of the older iptables, and there is no program to add ours to them: install iptables-legacy")

// find returns the name of the program for x_tables. Where none says in its name
// that it is, the one without such a name may be for nf_tables.
func (x iptables) find(ctx context.Context) (string, error) {
	if _, err := exec.LookPath(x.program + "-legacy"); err == nil {
		return x.program + "-legacy", nil
	}
	if _, err := exec.LookPath(x.program); err != nil {
		return "", errNoProgram
	}
	version, err := runProgram(ctx, "", x.program, "--version")
	if err == nil && strings.Contains(version, "nf_tables") {
		err = errNoProgram
	}
	return x.program, err
}

// forwardXtables is forward for the chain of x_tables: all of it by one
// iptables-restore(8), which writes the table once.
func (p *pass) forwardXtables(v6 bool, want []forwardRule) {
	x := iptablesOf(v6)
	has, err := x.has("filter")
	if err != nil {
		p.errs = append(p.errs, err)
	}
	if !has || len(want) == 0 && p.h.xtablesClean[x] {
		return
	}
	program, err := x.find(p.ctx)
	if errors.Is(err, errNoProgram) && len(want) == 0 {
		return // who could have made rules of ours?
	}
	var saved string
	if err == nil {
		saved, err = runProgram(p.ctx, "", program, "--wait", "-S", "FORWARD")
	}
	if err != nil {
		p.errs = append(p.errs, fmt.Errorf("%s -S FORWARD: %w", x.program, err))
		return
	}
	script, change := forwardScript(saved, want)
	if change == nil {
		if p.h.xtablesClean == nil {
			p.h.xtablesClean = map[iptables]bool{}
		}
		p.h.xtablesClean[x] = len(want) == 0
		return
	}
	change.Text = x.program + " " + change.Text
	p.write(*change, func() error {
		_, err := runProgram(p.ctx, script, program+"-restore", "--wait", "--noflush")
		return err
	})
}

// forwardScript returns what iptables-restore(8) must be told so that the chain,
// listed as by iptables -S, has the desired rules; no Change if it has them.
func forwardScript(listed string, want []forwardRule) (string, *Change) {
	var specs, comments []string
	for line := range strings.Lines(listed) {
		spec, isRule := strings.CutPrefix(strings.TrimSpace(line), "-A ")
		if _, c, ok := strings.Cut(spec, `--comment "`+forwardMark); isRule && ok {
			c, _, _ = strings.Cut(c, `"`)
			specs, comments = append(specs, spec), append(comments, forwardMark+c)
		}
	}
	missing, surplus := diffForward(want, comments)
	var script strings.Builder
	script.WriteString("*filter\n")
	for i, spec := range specs {
		if surplus[i] {
			fmt.Fprintf(&script, "-D %s\n", spec)
		}
	}
	for _, r := range slices.Backward(missing) {
		side := "-s"
		if r.dst {
			side = "-d"
		}
		fmt.Fprintf(&script, "-I FORWARD %s %s -m comment --comment %q -j ACCEPT\n", side, r.prefix, r.comment())
	}
	script.WriteString("COMMIT\n")
	return script.String(), forwardChange("filter FORWARD", missing, surplus)
}

// runProgram runs a program and returns what it printed. The error has what it complained of.
func runProgram(ctx context.Context, stdin, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
