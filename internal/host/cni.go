// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/kilomesh/kilo/internal/mesh"
)

// WriteCNI makes the CNI network configuration list at path hand out addresses
// of podCIDRs, and with mtu not 0 that MTU, and reports whether it changed the
// file. A missing file is made, see DefaultCNI; of an existing one everything
// else is kept, see EditCNI. A reader sees the old file or the new one, never a part.
//
// The error is a mesh.Problem if the file is not what it should be; it stays as it is then.
func WriteCNI(path string, podCIDRs []netip.Prefix, mtu int) (changed bool, err error) {
	old, err := os.ReadFile(path)
	var now []byte
	switch {
	case len(podCIDRs) == 0:
		return false, mesh.Problem{Object: "file/" + path, Field: "ipam.ranges", Err: errNoPodCIDR}
	case errors.Is(err, fs.ErrNotExist):
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return false, fmt.Errorf("CNI configuration: %w", err)
		}
		now = DefaultCNI(podCIDRs, mtu)
	case err != nil:
		return false, fmt.Errorf("CNI configuration: %w", err)
	default:
		now, err = EditCNI(old, podCIDRs, mtu)
		if bad, ok := errors.AsType[mesh.Problem](err); ok {
			bad.Object = "file/" + path
			return false, bad
		}
		if bytes.Equal(old, now) {
			return false, nil
		}
	}
	if err := writeFile(path, now, 0o644, os.Rename); err != nil {
		return false, fmt.Errorf("CNI configuration: %w", err)
	}
	return true, nil
}

// WriteCNI does what the function WriteCNI does, and logs if it changed the file.
func (h *Host) WriteCNI(path string, podCIDRs []netip.Prefix, mtu int) error {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) && len(podCIDRs) > 0 {
		if err := h.noteFile(path); err != nil {
			return err
		}
	}
	changed, err := WriteCNI(path, podCIDRs, mtu)
	if changed {
		h.log.Info("CNI configuration written", "file", path, "pod_cidrs", fmt.Sprint(podCIDRs), "mtu", mtu)
	}
	return err
}

var errNoPodCIDR = errors.New("the node has no pod CIDR; want one or two in spec.podCIDRs of the Node")

// EditCNI returns the network configuration list old with one range set for
// each pod CIDR in every plugin that has "ipam", and with mtu not 0 that
// "mtu" in those plugins. Everything else is preserved, but the order of keys.
// If old says all this already, it is returned as it is.
//
// The error is a mesh.Problem without the name of the file.
func EditCNI(old []byte, podCIDRs []netip.Prefix, mtu int) ([]byte, error) {
	bad := func(field, format string, args ...any) ([]byte, error) {
		return nil, mesh.Problem{Object: "file/", Field: field, Err: fmt.Errorf(format, args...)}
	}
	var conf map[string]any
	d := json.NewDecoder(bytes.NewReader(old))
	d.UseNumber() // a number is written back as it was read
	if err := d.Decode(&conf); err != nil {
		return bad("", "%s: %w; want a CNI network configuration list in JSON", excerpt(old), err)
	}
	if d.More() {
		return bad("", "text after the end of the JSON object; want one CNI network configuration list")
	}
	plugins, ok := conf["plugins"].([]any)
	if !ok {
		return bad("plugins", "%s: want a list of plugins", excerpt(encode(conf["plugins"])))
	}
	found, changed := false, false
	for i, p := range plugins {
		plugin, ok := p.(map[string]any)
		if !ok {
			return bad(fmt.Sprintf("plugins[%d]", i), "%s: want an object", excerpt(encode(p)))
		}
		if _, ok := plugin["ipam"]; !ok {
			continue
		}
		ipam, ok := plugin["ipam"].(map[string]any)
		if !ok {
			return bad(fmt.Sprintf("plugins[%d].ipam", i), "%s: want an object", excerpt(encode(plugin["ipam"])))
		}
		found = true
		changed = setRanges(ipam, podCIDRs) || changed
		changed = setMTU(plugin, mtu) || changed
	}
	if !found {
		return bad("plugins", "no plugin has ipam; want one that hands out the addresses of pods")
	}
	if !changed {
		return old, nil
	}
	return encode(conf), nil
}

// setRanges sets ipam.ranges, and reports whether it had to.
func setRanges(ipam map[string]any, podCIDRs []netip.Prefix) bool {
	changed := false
	// What host-local accepted before it had ranges would be one more range set.
	for _, legacy := range []string{"subnet", "rangeStart", "rangeEnd", "gateway"} {
		if _, ok := ipam[legacy]; ok {
			delete(ipam, legacy)
			changed = true
		}
	}
	if rangesSay(ipam["ranges"], podCIDRs) {
		return changed
	}
	sets := make([]any, len(podCIDRs))
	for i, p := range podCIDRs {
		sets[i] = []any{map[string]any{"subnet": p.String()}}
	}
	ipam["ranges"] = sets
	return true
}

// rangesSay reports whether ranges are exactly the pod CIDRs. What a range says
// beside its subnet, like a gateway, is the user's.
func rangesSay(ranges any, podCIDRs []netip.Prefix) bool {
	sets, ok := ranges.([]any)
	if !ok || len(sets) != len(podCIDRs) {
		return false
	}
	for i, s := range sets {
		set, ok := s.([]any)
		if !ok || len(set) != 1 {
			return false
		}
		r, ok := set[0].(map[string]any)
		if !ok {
			return false
		}
		text, _ := r["subnet"].(string)
		if p, err := netip.ParsePrefix(text); err != nil || p != podCIDRs[i] {
			return false
		}
	}
	return true
}

func setMTU(plugin map[string]any, mtu int) bool {
	if mtu == 0 {
		return false
	}
	n := json.Number(fmt.Sprint(mtu))
	if plugin["mtu"] == any(n) {
		return false
	}
	plugin["mtu"] = n
	return true
}

// DefaultCNI returns the network configuration list of a bridge that has the
// addresses of podCIDRs, with port mappings. An mtu of 0 leaves the MTU to the plugin.
func DefaultCNI(podCIDRs []netip.Prefix, mtu int) []byte {
	ipam := map[string]any{"type": "host-local"}
	setRanges(ipam, podCIDRs)
	bridge := map[string]any{
		"type": "bridge", "name": "kubernetes", "bridge": "kube-bridge",
		"isDefaultGateway": true, "forceAddress": true, "ipam": ipam,
	}
	setMTU(bridge, mtu)
	return encode(map[string]any{
		"cniVersion": "0.4.0",
		"name":       "kilo",
		"plugins": []any{
			bridge,
			map[string]any{"type": "portmap", "snat": true, "capabilities": map[string]any{"portMappings": true}},
		},
	})
}

// encode writes compact JSON with sorted keys. It is only given what was decoded from JSON.
func encode(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic("host: value from JSON does not go back: " + err.Error())
	}
	return b.Bytes()
}

// excerpt quotes the beginning of a text for a message.
func excerpt(b []byte) string {
	const most = 60
	if len(b) > most {
		return fmt.Sprintf("%q...", b[:most])
	}
	return fmt.Sprintf("%q", bytes.TrimSpace(b))
}
