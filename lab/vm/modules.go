// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// modules are what a machine needs: the ports to its host, then what a node of
// Kubernetes has, and what simulates a bad network.
var modules = []string{
	"virtio_pci", "virtio_console",
	"wireguard", "ipip", "ip6_tunnel", "vxlan", "tun",
	"bridge", "br_netfilter", "veth", "dummy", "vrf", "sch_netem", "sch_tbf", "overlay",
	"nf_tables", "nft_ct", "nft_nat", "nft_masq", "nft_redir", "nft_chain_nat", "nft_fib_inet", "nft_reject_inet", "nft_limit", "nft_log", "nft_numgen", "nft_hash",
	"nf_conntrack_netlink",
}

// kernel is one that Fetch unpacked.
type kernel struct {
	image   string            // the file to boot
	builtin map[string]bool   // modules that are part of the image
	modules map[string]string // the files of the others
}

// findKernel finds the only kernel in a directory that Fetch filled.
func findKernel(dir string) (*kernel, error) {
	images, err := filepath.Glob(filepath.Join(dir, "boot/vmlinuz-*"))
	if err != nil {
		return nil, err
	}
	if len(images) != 1 {
		return nil, fmt.Errorf("%d kernels in %s, want 1: run `lab vm fetch`", len(images), filepath.Join(dir, "boot"))
	}
	k := &kernel{image: images[0], builtin: map[string]bool{}, modules: map[string]string{}}
	tree := filepath.Join(dir, "lib/modules", strings.TrimPrefix(filepath.Base(k.image), "vmlinuz-"))
	builtin, err := os.ReadFile(filepath.Join(tree, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for path := range strings.FieldsSeq(string(builtin)) {
		k.builtin[moduleName(path)] = true
	}
	return k, filepath.WalkDir(tree, func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, ".ko") {
			k.modules[moduleName(path)] = path
		}
		return err
	})
}

// moduleName returns the name by which a kernel knows the module of a file.
func moduleName(path string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".ko"), "-", "_")
}

// order returns the files of modules and of all that they depend on, those
// first that others depend on.
func (k *kernel) order(names []string) ([]string, error) {
	var files []string
	done := map[string]bool{}
	var add func(name string) error
	add = func(name string) error {
		name = moduleName(name)
		if done[name] || k.builtin[name] {
			return nil
		}
		done[name] = true
		file, ok := k.modules[name]
		if !ok {
			return fmt.Errorf("kernel %s has no module %s", filepath.Base(k.image), name)
		}
		needs, err := dependencies(file)
		if err != nil {
			return err
		}
		for _, n := range needs {
			if err := add(n); err != nil {
				return fmt.Errorf("module %s: %w", name, err)
			}
		}
		files = append(files, file)
		return nil
	}
	var errs []error
	for _, n := range names {
		errs = append(errs, add(n))
	}
	return files, errors.Join(errs...)
}

// dependencies returns the names of the modules that one says it depends on: no
// depmod has run, and so there is no modules.dep.
func dependencies(file string) ([]string, error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, fmt.Errorf("module %s: %w", file, err)
	}
	defer discard(f)
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("module %s: no section .modinfo", file)
	}
	info, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("module %s: section .modinfo: %w", file, err)
	}
	for field := range strings.SplitSeq(string(info), "\x00") {
		if names, ok := strings.CutPrefix(field, "depends="); ok {
			return strings.FieldsFunc(names, func(r rune) bool { return r == ',' }), nil
		}
	}
	return nil, nil
}
