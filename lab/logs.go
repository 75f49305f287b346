// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// AgentLog returns the path of kg's log, over all its starts.
func (h *Host) AgentLog() string { return filepath.Join(h.dir(), "kg.log") }

// LogRecords returns what kg logged on this host since it first started. kg's
// promise is one JSON object a line, so any other line is an error.
func (h *Host) LogRecords() ([]map[string]any, error) {
	b, err := os.ReadFile(h.AgentLog())
	if err != nil {
		return nil, err
	}
	var out []map[string]any
	for line := range bytes.Lines(b) {
		var r map[string]any
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("log of kg on %s: %q: %w", h.Name(), line, err)
		}
		out = append(out, r)
	}
	return out, nil
}

// SaveLogs copies all logs of the lab into dir.
func (l *Lab) SaveLogs(dir string) error {
	logs, err := filepath.Glob(filepath.Join(l.Dir, "*", "*.log"))
	if err != nil {
		return err
	}
	for _, path := range logs {
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		machine := filepath.Join(dir, filepath.Base(filepath.Dir(path)))
		if err := os.MkdirAll(machine, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(machine, filepath.Base(path)), b, 0o644); err != nil {
			return err
		}
	}
	return nil
}
