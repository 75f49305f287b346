// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMatrixTable(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.42.1.2"), netip.MustParseAddr("fd42::2")
	m := Matrix{[]Cell{
		{Kind: "pod", From: "a-0", To: "a-0", Addr: v4, RTT: 40 * time.Microsecond},
		{Kind: "pod", From: "a-0", To: "long-name", Addr: v4, RTT: 12345 * time.Microsecond},
		{Kind: "node", From: "a", To: "a-0", Addr: v4, RTT: time.Millisecond},
		{Kind: "node", From: "a", To: "long-name", Addr: v4, Error: "no reply within 1s"},
		{Kind: "node", From: "a", To: "a-0", Addr: v6, RTT: time.Millisecond},
	}}
	want := strings.TrimPrefix(`
IPv4 ms    a-0  long-name
pod a-0    0.0         12
node a     1.0       FAIL

IPv6 ms  a-0
node a   1.0

1 of 5 failed:
  node a → pod long-name (10.42.1.2): no reply within 1s
`, "\n")
	var b strings.Builder
	if err := m.Write(&b); err != nil {
		t.Fatal(err)
	}
	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	if diff := cmp.Diff(squeeze(want), squeeze(b.String())); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
	for line := range strings.Lines(b.String()) {
		if strings.HasPrefix(line, "pod a-0") && len(line) != len("IPv4 ms  a-0  long-name\n") {
			t.Errorf("row %q is not aligned", line)
		}
	}
	if err := m.Err(); err == nil || !strings.Contains(err.Error(), "1 of 5 pairs fail: node a → pod long-name") {
		t.Errorf("Err() = %v, want what failed", err)
	}
}

func TestMatrixWithoutCellsIsNotOK(t *testing.T) {
	if err := (Matrix{}).Err(); err == nil {
		t.Error("Err() = nil of a matrix that tested nothing")
	}
}

func TestSumMetric(t *testing.T) {
	const text = "# HELP kilo_x Text.\nkilo_x 3\nkilo_xy 100\nkilo_l{a=\"b} 7\"} 1\nkilo_l{a=\"c\"} 2.5e1\n"
	for name, want := range map[string]float64{"kilo_x": 3, "kilo_l": 26} {
		if got, err := sumMetric(text, name); err != nil || got != want {
			t.Errorf("sumMetric(%s) = %v, %v, want %v", name, got, err, want)
		}
	}
	if _, err := sumMetric(text, "kilo_z"); err == nil {
		t.Error("sumMetric(kilo_z) = nil, want an error")
	}
}

func TestNumberOfRequest(t *testing.T) {
	for _, tt := range []struct {
		seq  uint16
		sent int
		want int
	}{
		{0, 1, 0}, {5, 10, 5}, {65535, 65537, 65535}, {0, 65537, 65536}, {10, 70000, 65546}, {65000, 70000, 65000},
	} {
		if got := number(tt.seq, tt.sent); got != tt.want {
			t.Errorf("number(%d, %d) = %d, want %d", tt.seq, tt.sent, got, tt.want)
		}
	}
}
