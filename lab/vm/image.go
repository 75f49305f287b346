// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cavaliergopher/cpio"
)

// image is the file system of a machine: the files of this machine to put into
// it, and some others, by their absolute paths.
type image struct {
	dirs     map[string]bool
	files    map[string]string // path in the machine to path here
	links    map[string]string // symbolic links and where they point
	contents map[string]string
}

func newImage() *image {
	return &image{dirs: map[string]bool{}, files: map[string]string{}, links: map[string]string{}, contents: map[string]string{}}
}

// addDir adds a directory and those above it.
func (m *image) addDir(path string) {
	for ; path != "/" && !m.dirs[path]; path = filepath.Dir(path) {
		m.dirs[path] = true
	}
}

// addFile adds a file of this machine.
func (m *image) addFile(path, source string) {
	m.addDir(filepath.Dir(path))
	m.files[path] = source
}

// add adds what a user names: a program to be found in $PATH if there is no
// slash, else a file, or a directory with all that is below it. Programs come with their libraries. It
// returns the absolute path.
func (m *image) add(name string) (string, error) {
	path := name
	if !strings.Contains(name, "/") {
		found, err := exec.LookPath(name)
		if err != nil {
			return "", err
		}
		path = found
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	if _, err := filepath.EvalSymlinks(path); err != nil {
		return "", err
	}
	return path, m.addTree(path)
}

// addTree adds a file or directory, and what a symbolic link leads to.
func (m *image) addTree(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			m.addDir(path)
			return nil
		case d.Type().IsRegular():
			m.addFile(path, path)
			return m.addLibraries(path)
		case d.Type() != fs.ModeSymlink:
			return fmt.Errorf("%s: neither a directory, a regular file nor a symbolic link", path)
		}
		if m.links[path] != "" {
			return nil // perhaps it leads to where it is
		}
		to, err := os.Readlink(path)
		if err != nil {
			return err
		}
		m.addDir(filepath.Dir(path))
		m.links[path] = to
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(path), to)
		}
		return m.addTree(to)
	})
}

// libraryDirs are where Debian's dynamic linker looks.
var libraryDirs = []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib", "/usr/lib"}

// addLibraries adds the dynamic linker and the libraries of a program or
// library, if the file is one.
func (m *image) addLibraries(file string) error {
	f, err := elf.Open(file)
	if _, ok := errors.AsType[*elf.FormatError](err); ok || errors.Is(err, io.EOF) {
		return nil
	}
	if err != nil {
		return err
	}
	defer discard(f)
	names, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	paths := make([]string, 0, len(names)+1)
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			linker, err := io.ReadAll(p.Open())
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			paths = append(paths, strings.TrimRight(string(linker), "\x00"))
		}
	}
	for _, name := range names {
		i := slices.IndexFunc(libraryDirs, func(dir string) bool {
			_, err := os.Stat(filepath.Join(dir, name))
			return err == nil
		})
		if i < 0 {
			return fmt.Errorf("%s: library %s not found in %s", file, name, strings.Join(libraryDirs, ", "))
		}
		paths = append(paths, filepath.Join(libraryDirs[i], name))
	}
	for _, path := range paths {
		if _, ok := m.files[path]; ok {
			continue
		}
		if _, err := m.add(path); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// addJSON adds a file that holds v.
func (m *image) addJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	m.addDir(filepath.Dir(path))
	m.contents[path] = string(b)
	return nil
}

// write writes the image as the kernel wants it: uncompressed, since it is
// unpacked on a slow machine.
func (m *image) write(w io.Writer) error {
	c := cpio.NewWriter(w)
	for _, path := range slices.Sorted(maps.Keys(m.dirs)) { // a directory before what is in it
		if err := c.WriteHeader(&cpio.Header{Name: path[1:], Mode: cpio.TypeDir | 0o755}); err != nil {
			return err
		}
	}
	for _, path := range slices.Sorted(maps.Keys(m.links)) {
		if err := writeFile(c, path, cpio.TypeSymlink|0o777, int64(len(m.links[path])), strings.NewReader(m.links[path])); err != nil {
			return err
		}
	}
	for _, path := range slices.Sorted(maps.Keys(m.contents)) {
		if err := writeFile(c, path, cpio.TypeReg|0o644, int64(len(m.contents[path])), strings.NewReader(m.contents[path])); err != nil {
			return err
		}
	}
	for _, path := range slices.Sorted(maps.Keys(m.files)) {
		if err := copyFile(c, path, m.files[path]); err != nil {
			return err
		}
	}
	return c.Close()
}

func copyFile(c *cpio.Writer, path, source string) error {
	f, err := os.Open(source)
	if err != nil {
		return err
	}
	defer discard(f)
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return writeFile(c, path, cpio.TypeReg|cpio.FileMode(info.Mode().Perm()), info.Size(), f)
}

func writeFile(c *cpio.Writer, path string, mode cpio.FileMode, size int64, content io.Reader) error {
	if err := c.WriteHeader(&cpio.Header{Name: path[1:], Mode: mode, Size: size}); err != nil {
		return err
	}
	if _, err := io.CopyN(c, content, size); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
