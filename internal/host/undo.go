// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// undoing is what CleanUp takes back and no mark in the kernel tells of. It is
// in a file from before each change is made, for a process may die at any moment.
type undoing struct {
	// Sysctls in the order in which they were set first.
	Sysctls []sysctlUndo `json:"sysctls,omitempty"`
	// Files that were not there before.
	Files []string `json:"files,omitempty"`
}

// sysctlUndo is a path below /proc/sys, what it held before us, and what we set.
type sysctlUndo struct {
	Key string `json:"key"`
	Was string `json:"was"`
	Set string `json:"set"`
}

func (h *Host) readUndoing() (undoing, error) {
	var u undoing
	text, err := os.ReadFile(h.cfg.UndoFile)
	if errors.Is(err, fs.ErrNotExist) {
		return u, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &u)
	}
	if err != nil {
		return u, fmt.Errorf("what clean-up has to undo: %s: %w; want a file that kg wrote, or none", h.cfg.UndoFile, err)
	}
	return u, nil
}

// noteUndoing changes the file, without one it does nothing.
func (h *Host) noteUndoing(change func(*undoing)) error {
	if h.cfg.UndoFile == "" {
		return nil
	}
	u, err := h.readUndoing()
	if err != nil {
		return err
	}
	change(&u)
	text, err := json.MarshalIndent(u, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(h.cfg.UndoFile), 0o700); err != nil {
		return err
	}
	return writeFile(h.cfg.UndoFile, text, 0o600, os.Rename)
}

// noteSysctl keeps the value that a sysctl had before we set it for the first time.
func (h *Host) noteSysctl(key, was, set string) error {
	return h.noteUndoing(func(u *undoing) {
		i := slices.IndexFunc(u.Sysctls, func(s sysctlUndo) bool { return s.Key == key })
		if i < 0 {
			u.Sysctls = append(u.Sysctls, sysctlUndo{key, was, set})
			return
		}
		u.Sysctls[i].Set = set
	})
}

// noteFile says that the file is ours to delete.
func (h *Host) noteFile(path string) error {
	return h.noteUndoing(func(u *undoing) {
		if !slices.Contains(u.Files, path) {
			u.Files = append(u.Files, path)
		}
	})
}

// undo takes everything back, the last first. A sysctl that others have set
// since stays. What fails is tried again by the next clean-up.
func (h *Host) undo() error {
	if h.cfg.UndoFile == "" {
		return nil
	}
	u, err := h.readUndoing()
	if err != nil {
		return err
	}
	var errs []error
	for _, s := range slices.Backward(u.Sysctls) {
		path := "/proc/sys/" + s.Key
		now, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) { // of a link that is gone
			continue
		}
		if err == nil && strings.TrimSpace(string(now)) == s.Set {
			if err = os.WriteFile(path, []byte(s.Was+"\n"), 0o644); err == nil {
				h.log.Info("restored", "kind", string(KindSysctl), "object", strings.ReplaceAll(s.Key, "/", ".")+"="+s.Was)
			}
		}
		errs = append(errs, err)
	}
	for _, path := range u.Files {
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.Remove(h.cfg.UndoFile); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
