// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kilomesh/kilo/internal/mesh"
)

// SnapshotFile keeps the cluster as a file, readable for root alone: it has the
// preshared keys of peers. The zero value has no path and must not be used.
type SnapshotFile struct {
	Path string
	// written is the content of the file as far as this process knows.
	written []byte
}

// snapshotVersion is that of the format. Others are not read.
const snapshotVersion = 1

// snapshotJSON is the content of the file.
type snapshotJSON struct {
	Version int
	Nodes   []mesh.Node
	Peers   []peerJSON
	Self    *mesh.Declared
}

// peerJSON is a peer with the secret that would print as hidden.
type peerJSON struct {
	mesh.Peer
	PresharedKey string `json:",omitempty"`
}

// Load reads the file. The error is fs.ErrNotExist if there is none, and quotes no secret.
func (f *SnapshotFile) Load() (mesh.Snapshot, error) {
	text, err := os.ReadFile(f.Path)
	if err != nil {
		return mesh.Snapshot{}, fmt.Errorf("saved cluster: %w", err)
	}
	var in snapshotJSON
	if err := json.Unmarshal(text, &in); err != nil {
		return mesh.Snapshot{}, fmt.Errorf("saved cluster: file %s (%d bytes): %w", f.Path, len(text), err)
	}
	if in.Version != snapshotVersion {
		return mesh.Snapshot{}, fmt.Errorf("saved cluster: file %s: version %d: want %d", f.Path, in.Version, snapshotVersion)
	}
	s := mesh.Snapshot{Nodes: in.Nodes, Self: in.Self, Peers: make([]mesh.Peer, 0, len(in.Peers))}
	for _, p := range in.Peers {
		if p.PresharedKey != "" {
			if p.Peer.PresharedKey, err = mesh.ParseSecretKey(p.PresharedKey); err != nil {
				return mesh.Snapshot{}, fmt.Errorf("saved cluster: file %s: peer/%s: %w", f.Path, p.Name, err)
			}
		}
		s.Peers = append(s.Peers, p.Peer)
	}
	f.written = text
	return s, nil
}

// Forget removes the file.
func (f *SnapshotFile) Forget() error {
	f.written = nil
	if err := os.Remove(f.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("saved cluster: %w", err)
	}
	return nil
}

// Save writes s, but for its Problems, unless the file has it already.
func (f *SnapshotFile) Save(s mesh.Snapshot) error {
	out := snapshotJSON{Version: snapshotVersion, Nodes: s.Nodes, Self: s.Self, Peers: make([]peerJSON, 0, len(s.Peers))}
	for _, p := range s.Peers {
		j := peerJSON{Peer: p}
		if !p.PresharedKey.IsZero() {
			raw := p.PresharedKey.Reveal()
			j.PresharedKey = base64.StdEncoding.EncodeToString(raw[:])
		}
		out.Peers = append(out.Peers, j)
	}
	text, err := json.Marshal(out)
	if err != nil {
		return fmt.Errorf("save the cluster: %w", err)
	}
	if bytes.Equal(text, f.written) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(f.Path), 0o700); err != nil {
		return fmt.Errorf("save the cluster: %w", err)
	}
	if err := writeFile(f.Path, text, 0o600, os.Rename); err != nil {
		return fmt.Errorf("save the cluster: %w", err)
	}
	f.written = text
	return nil
}
