// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cavaliergopher/cpio"
	"github.com/google/go-cmp/cmp"
)

func TestImageHoldsWhatWasAdded(t *testing.T) {
	dir := t.TempDir()
	for path, mode := range map[string]os.FileMode{"a/b/run": 0o755, "a/text": 0o644} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, filepath.Dir(path)), 0o755), os.WriteFile(filepath.Join(dir, path), []byte(path), mode)); err != nil {
			t.Fatal(err)
		}
	}
	for path, to := range map[string]string{"link": "a", "a/inner": "b/run", "a/b/loop": "../b"} {
		if err := os.Symlink(to, filepath.Join(dir, path)); err != nil {
			t.Fatal(err)
		}
	}
	m := newImage()
	root := filepath.Join(dir, "link")
	if path, err := m.add(root); err != nil || path != root {
		t.Fatalf("add %s: %s, %v", root, path, err)
	}
	if err := m.addJSON("/x/job", "hello"); err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if err := m.write(&archive); err != nil {
		t.Fatal(err)
	}
	var got []string
	for r := cpio.NewReader(&archive); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%o /%s %s%s", h.Mode, h.Name, content, h.Linkname))
	}
	want := []string{
		"40755 /x ", `100644 /x/job "hello"`,
		"120777 " + root + " a", "40755 " + dir + "/a ", "100644 " + dir + "/a/text a/text",
		"120777 " + dir + "/a/inner b/run", "40755 " + dir + "/a/b ", "120777 " + dir + "/a/b/loop ../b", "100755 " + dir + "/a/b/run a/b/run",
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		want = append(want, "40755 "+d+" ")
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("archive (-want +got)\n%s", diff)
	}
}

func TestProgramsBringTheirLibraries(t *testing.T) {
	m := newImage()
	path, err := m.add("sh")
	if err != nil {
		t.Fatal(err)
	}
	if m.files[path] == "" && m.links[path] == "" {
		t.Errorf("no %s in %v", path, m)
	}
	for _, library := range []string{"/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libc.so.6"} {
		if m.files[library] == "" && m.links[library] == "" {
			t.Errorf("no %s in %v", library, m)
		}
	}
}

func TestWhatIsMissingIsNamed(t *testing.T) {
	_, noProgram := newImage().add("nosuchprogram")
	_, noFile := newImage().add("/no/such/file")
	_, noSocket := newImage().add("/dev/null")
	_, noModule := (&kernel{image: "/boot/vmlinuz-6"}).order([]string{"nosuchmodule"})
	_, noKernel := findKernel("/no/such")
	for _, c := range []struct {
		err  error
		want string
	}{
		{noProgram, `exec: "nosuchprogram": executable file not found in $PATH`},
		{noFile, "lstat /no: no such file or directory"},
		{noSocket, "/dev/null: neither a directory, a regular file nor a symbolic link"},
		{noModule, "kernel vmlinuz-6 has no module nosuchmodule"},
		{noKernel, "0 kernels in /no/such/boot, want 1: run `lab vm fetch`"},
	} {
		if c.err == nil || c.err.Error() != c.want {
			t.Errorf("error %v, want %s", c.err, c.want)
		}
	}
}
