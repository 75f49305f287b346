// SPDX-License-Identifier: Apache-2.0

package host

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/kilomesh/kilo/internal/mesh"
)

// LoadOrCreateKey reads the private key of this node from a file, or makes one
// and writes it there if there is no file; created tells which. The directory
// is made with mode 0700 and the file with 0600.
//
// A file that does not hold a key is an error and stays as it is: a new key
// would change who this node is for everybody else. No error quotes the content.
func LoadOrCreateKey(path string) (key mesh.SecretKey, created bool, err error) {
	key, err = readKey(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return key, false, err
	}
	key, text, err := newKey()
	if err != nil {
		return mesh.SecretKey{}, false, fmt.Errorf("make private key: %w", err)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return mesh.SecretKey{}, false, fmt.Errorf("private key: %w", err)
	}
	err = writeFile(path, []byte(text), 0o600, os.Link)
	if errors.Is(err, fs.ErrExist) {
		// Another process was faster; the key in the file is the one.
		key, err = readKey(path)
		return key, false, err
	}
	if err != nil {
		return mesh.SecretKey{}, false, fmt.Errorf("private key: %w", err)
	}
	return key, true, nil
}

func readKey(path string) (mesh.SecretKey, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return mesh.SecretKey{}, fmt.Errorf("private key: %w", err)
	}
	key, err := mesh.ParseSecretKey(strings.TrimSpace(string(text)))
	if err != nil {
		return mesh.SecretKey{}, fmt.Errorf("private key file %s (%d bytes): %w, as wg genkey prints it; mend the file, or delete it to get a new key", path, len(text), err)
	}
	return clamp(key.Reveal()), nil
}

// newKey returns a new key and its line for the file.
func newKey() (mesh.SecretKey, string, error) {
	var b [mesh.KeySize]byte
	if _, err := rand.Read(b[:]); err != nil {
		return mesh.SecretKey{}, "", err
	}
	key := clamp(b)
	b = key.Reveal()
	return key, base64.StdEncoding.EncodeToString(b[:]) + "\n", nil
}

// clamp gives the key the form that a device shows it in (RFC 7748 section 5,
// decodeScalar25519). Any other form of it would differ from the device's in every pass.
func clamp(b [mesh.KeySize]byte) mesh.SecretKey {
	b[0] &= 248
	b[31] = b[31]&127 | 64
	return mesh.NewSecretKey(b)
}

// writeFile writes a file so that at any moment, also after a crash, it is
// either as before or complete. place puts the finished temporary file at path:
// os.Rename replaces what is there, os.Link refuses to.
func writeFile(path string, data []byte, mode fs.FileMode, place func(from, to string) error) (err error) {
	dir := filepath.Dir(path)
	// No suffix that a reader of the directory, like a container runtime, would take for its own.
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) //nolint:errcheck // gone already after os.Rename
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Chmod(mode), tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	if err := place(tmp.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// syncDir makes a new name in the directory survive a power cut.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
