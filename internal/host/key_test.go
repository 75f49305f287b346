// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"encoding/base64"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

func TestKeyIsMadeOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kilo")
	path := filepath.Join(dir, "key")
	key, created, err := LoadOrCreateKey(path)
	must(t, err)
	if !created || key.IsZero() {
		t.Errorf("created %t", created)
	}
	for file, mode := range map[string]fs.FileMode{dir: 0o700, path: 0o600} {
		if got := nettest.Must(os.Stat(file))(t).Mode().Perm(); got != mode {
			t.Errorf("mode of %s is %o, want %o", file, got, mode)
		}
	}
	again, created, err := LoadOrCreateKey(path)
	must(t, err)
	if created || again != key {
		t.Errorf("second time: created %t, same %t", created, again == key)
	}
	if files := nettest.Must(os.ReadDir(dir))(t); len(files) != 1 {
		t.Errorf("files %v, want the key alone", files)
	}
}

func TestKeyFileIsTolerantOfWhiteSpace(t *testing.T) {
	raw := secret(3).Reveal()
	text := base64.StdEncoding.EncodeToString(raw[:])
	for _, content := range []string{text, text + "\n", "\n" + text + "\r\n\n"} {
		path := filepath.Join(t.TempDir(), "key")
		must(t, os.WriteFile(path, []byte(content), 0o600))
		key, created, err := LoadOrCreateKey(path)
		if err != nil || created || key != secret(3) {
			t.Errorf("%q: created %t, error %v", content, created, err)
		}
	}
}

// A device shows a key in one form only, and would differ from the file in every pass.
func TestKeyIsTakenInTheFormThatADeviceShows(t *testing.T) {
	raw := secret(3).Reveal()
	raw[0] |= 7
	raw[31] |= 128
	path := filepath.Join(t.TempDir(), "key")
	must(t, os.WriteFile(path, []byte(base64.StdEncoding.EncodeToString(raw[:])), 0o600))
	key, _, err := LoadOrCreateKey(path)
	if err != nil || key != clamp(raw) || key == mesh.NewSecretKey(raw) {
		t.Errorf("error %v, clamped %t", err, key == clamp(raw))
	}
}

func TestKeyFileThatDoesNotParseIsNeverReplaced(t *testing.T) {
	for _, content := range []string{"", "\n", "c2VjcmV0", "this is my secret", strings.Repeat("A", 43) + "="} {
		path := filepath.Join(t.TempDir(), "key")
		must(t, os.WriteFile(path, []byte(content), 0o600))
		_, created, err := LoadOrCreateKey(path)
		if err == nil || created || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "base64") {
			t.Errorf("%q: created %t, error %v", content, created, err)
		}
		if err != nil && len(content) > 1 && strings.Contains(err.Error(), content) {
			t.Errorf("error quotes the file: %v", err)
		}
		if got := nettest.Must(os.ReadFile(path))(t); string(got) != content {
			t.Errorf("file is %q now, was %q", got, content)
		}
	}
}

func TestKeyOfManyAtOnceIsOne(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kilo", "key")
	var keys [16]mesh.SecretKey
	var errs [len(keys)]error
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() { keys[i], _, errs[i] = LoadOrCreateKey(path) })
	}
	wg.Wait()
	for i := range keys {
		if errs[i] != nil || keys[i] != keys[0] {
			t.Errorf("%d: error %v, same %t", i, errs[i], keys[i] == keys[0])
		}
	}
}
