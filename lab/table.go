// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Write prints m as a table for each address family, and explains what failed.
func (m Matrix) Write(w io.Writer) error {
	var b strings.Builder
	for _, family := range []string{"IPv4", "IPv6"} {
		var cells []Cell
		for _, c := range m.Cells {
			if c.Addr.Is4() == (family == "IPv4") {
				cells = append(cells, c)
			}
		}
		if len(cells) > 0 {
			writeTable(&b, family, cells)
		}
	}
	failed := m.Failed()
	if len(failed) == 0 {
		fmt.Fprintf(&b, "all %d ok\n", len(m.Cells))
	} else {
		fmt.Fprintf(&b, "%d of %d failed:\n", len(failed), len(m.Cells))
		for _, c := range failed {
			fmt.Fprintf(&b, "  %s\n", c)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// writeTable prints the cells of one family: a row for each source, a column for each pod.
func writeTable(b *strings.Builder, family string, cells []Cell) {
	var columns, rows []string
	text := map[[2]string]string{}
	for _, c := range cells {
		row := c.Kind + " " + c.From
		columns, rows = appendNew(columns, c.To), appendNew(rows, row)
		text[[2]string{row, c.To}] = c.short()
	}
	lines := [][]string{append([]string{family + " ms"}, columns...)}
	for _, r := range rows {
		line := []string{r}
		for _, c := range columns {
			line = append(line, text[[2]string{r, c}])
		}
		lines = append(lines, line)
	}
	writeColumns(b, lines)
	b.WriteByte('\n')
}

func (c Cell) short() string {
	if c.Error != "" {
		return "FAIL"
	}
	ms := float64(c.RTT) / float64(time.Millisecond)
	if ms < 10 {
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

// writeColumns aligns lines of equal length: the first column to the left, the others to the right.
func writeColumns(b *strings.Builder, lines [][]string) {
	width := make([]int, len(lines[0]))
	for _, line := range lines {
		for i, s := range line {
			width[i] = max(width[i], utf8.RuneCountInString(s))
		}
	}
	for _, line := range lines {
		for i, s := range line {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(s))
			if i == 0 {
				b.WriteString(s + pad)
			} else {
				b.WriteString("  " + pad + s)
			}
		}
		b.WriteByte('\n')
	}
}

func appendNew(list []string, s string) []string {
	if slices.Contains(list, s) {
		return list
	}
	return append(list, s)
}
