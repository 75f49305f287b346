// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Report is what there is to say of a running lab.
type Report struct {
	Matrix  Matrix   `json:"matrix"`
	Leaders []Leader `json:"leaders"`
	Links   []Link   `json:"links"`
	Memory  []Memory `json:"memory"`
}

// Report collects everything but the matrix, which the caller has.
func (l *Lab) Report(ctx context.Context, m Matrix) (Report, error) {
	r := Report{Matrix: m}
	var errs [2]error
	r.Leaders, errs[0] = l.Leaders(ctx)
	r.Links, errs[1] = l.Links(ctx)
	err := errors.Join(errs[:]...)
	for _, h := range l.Hosts() {
		mem, memErr := h.Memory()
		r.Memory = append(r.Memory, mem)
		err = errors.Join(err, memErr)
	}
	return r, err
}

// WriteJSON prints all of r.
func (r Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// Write prints r as tables.
func (r Report) Write(w io.Writer) error {
	if err := r.Matrix.Write(w); err != nil {
		return err
	}
	var b strings.Builder
	lines := [][]string{{"\nlocation", "leader", "WireGuard IP"}}
	for _, l := range r.Leaders {
		lines = append(lines, []string{l.Location, l.Node, strings.Join(l.WireGuardIPs, " ")})
	}
	writeColumns(&b, lines)
	lines = [][]string{{"\nlink", "endpoint", "handshake", "received", "sent"}}
	for _, k := range r.Links {
		lines = append(lines, []string{k.From + " → " + k.To, orDash(k.Endpoint), k.age(), bytesText(k.Received), bytesText(k.Sent)})
	}
	writeColumns(&b, lines)
	lines = [][]string{{"\nresident memory", "kg", "userspace WireGuard"}}
	for _, m := range r.Memory {
		lines = append(lines, []string{m.Host, bytesText(m.Agent), bytesText(m.WireGuard)})
	}
	writeColumns(&b, lines)
	_, err := io.WriteString(w, b.String())
	return err
}

func (k Link) age() string {
	if k.Handshake < 0 {
		return "never"
	}
	return fmt.Sprintf("%.1f s ago", k.Handshake.Round(100*time.Millisecond).Seconds())
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func bytesText(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
