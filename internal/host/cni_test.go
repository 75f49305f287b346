// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

const bridge4 = `{"cniVersion":"0.4.0","name":"kilo","plugins":[{"bridge":"kube-bridge","forceAddress":true,"ipam":{"ranges":[[{"subnet":"10.2.1.0/24"}]],"type":"host-local"},"isDefaultGateway":true,"mtu":1420,"name":"kubernetes","type":"bridge"},{"capabilities":{"portMappings":true},"snat":true,"type":"portmap"}]}` + "\n"

func TestEditCNI(t *testing.T) {
	v4, dual := []netip.Prefix{pfx("10.2.1.0/24")}, []netip.Prefix{pfx("10.2.1.0/24"), pfx("fd00:2:1::/64")}
	for _, c := range []struct {
		name, old string
		podCIDRs  []netip.Prefix
		mtu       int
		want      string // "" for the same as old
	}{
		{name: "as it is", old: bridge4, podCIDRs: v4, mtu: 1420},
		{name: "MTU not ours", old: bridge4, podCIDRs: v4},
		{name: "any layout", old: "{\n \"plugins\": [ {\"ipam\": {\"ranges\": [ [ {\"subnet\": \"10.2.1.0/24\"} ] ]}} ]\n}", podCIDRs: v4},
		{name: "more said of the range", old: `{"plugins":[{"ipam":{"ranges":[[{"gateway":"10.2.1.7","subnet":"10.2.1.0/24"}]]}}]}`, podCIDRs: v4},
		{name: "new MTU", old: bridge4, podCIDRs: v4, mtu: 1380, want: strings.Replace(bridge4, "1420", "1380", 1)},
		{name: "new pod CIDR", old: strings.Replace(bridge4, "10.2.1", "10.2.9", 1), podCIDRs: v4, mtu: 1420, want: bridge4},
		{
			name: "second family", old: bridge4, podCIDRs: dual, mtu: 1420,
			want: strings.Replace(bridge4, `[[{"subnet":"10.2.1.0/24"}]]`, `[[{"subnet":"10.2.1.0/24"}],[{"subnet":"fd00:2:1::/64"}]]`, 1),
		},
		{
			name: "no ranges yet, and what we do not know", podCIDRs: v4,
			old:  `{"x":1e400,"y":12345678901234567890,"z":"<&>","plugins":[{"type":"tuning"},{"ipam":{"type":"host-local","routes":[{"dst":"0.0.0.0/0"}]}},{"ipam":{}}]}`,
			want: `{"plugins":[{"type":"tuning"},{"ipam":{"ranges":[[{"subnet":"10.2.1.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}],"type":"host-local"}},{"ipam":{"ranges":[[{"subnet":"10.2.1.0/24"}]]}}],"x":1e400,"y":12345678901234567890,"z":"<&>"}` + "\n",
		},
		{
			name: "the form before ranges", podCIDRs: v4,
			old:  `{"plugins":[{"ipam":{"subnet":"10.2.9.0/24","gateway":"10.2.9.1"}}]}`,
			want: `{"plugins":[{"ipam":{"ranges":[[{"subnet":"10.2.1.0/24"}]]}}]}` + "\n",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.want == "" {
				c.want = c.old
			}
			got, err := EditCNI([]byte(c.old), c.podCIDRs, c.mtu)
			must(t, err)
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
			again, err := EditCNI(got, c.podCIDRs, c.mtu)
			must(t, err)
			if string(again) != string(got) {
				t.Errorf("not idempotent: %s", again)
			}
		})
	}
}

func TestDefaultCNI(t *testing.T) {
	if diff := cmp.Diff(bridge4, string(DefaultCNI([]netip.Prefix{pfx("10.2.1.0/24")}, 1420))); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestWriteCNI(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cni", "net.d")
	path := filepath.Join(dir, "10-kilo.conflist")
	podCIDRs := []netip.Prefix{pfx("10.2.1.0/24")}
	for i, want := range []bool{true, false, false} {
		changed, err := WriteCNI(path, podCIDRs, 1420)
		if err != nil || changed != want {
			t.Errorf("time %d: changed %t, error %v", i, changed, err)
		}
	}
	if got := nettest.Must(os.Stat(path))(t).Mode().Perm(); got != 0o644 {
		t.Errorf("mode %o", got)
	}
	if files := nettest.Must(os.ReadDir(dir))(t); len(files) != 1 {
		t.Errorf("files %v", files)
	}
	if changed, err := WriteCNI(path, podCIDRs, 1380); err != nil || !changed {
		t.Errorf("new MTU: changed %t, error %v", changed, err)
	}
}

func TestWriteCNILeavesABadFileAlone(t *testing.T) {
	good := []netip.Prefix{pfx("10.2.1.0/24")}
	for _, c := range []struct {
		content, field, says string
		podCIDRs             []netip.Prefix
	}{
		{`{"plugins":[`, "", "unexpected EOF", good},
		{``, "", "EOF", good},
		{`[]`, "", "[]", good},
		{`{} {}`, "", "after the end", good},
		{`{"name":"kilo"}`, "plugins", "null", good},
		{`{"plugins":{}}`, "plugins", "want a list", good},
		{`{"plugins":[7]}`, "plugins[0]", `"7"`, good},
		{`{"plugins":[{},{"ipam":"host-local"}]}`, "plugins[1].ipam", "host-local", good},
		{`{"plugins":[{"type":"bridge"}]}`, "plugins", "no plugin has ipam", good},
		{bridge4, "ipam.ranges", "no pod CIDR", nil},
	} {
		path := filepath.Join(t.TempDir(), "10-kilo.conflist")
		must(t, os.WriteFile(path, []byte(c.content), 0o644))
		changed, err := WriteCNI(path, c.podCIDRs, 1420)
		var p mesh.Problem
		if !errors.As(err, &p) || changed {
			t.Errorf("%s: changed %t, error %v, want a Problem", c.content, changed, err)
			continue
		}
		if p.Object != "file/"+path || p.Field != c.field || !strings.Contains(p.Err.Error(), c.says) {
			t.Errorf("%s: problem %v, want one of field %q that says %q", c.content, p, c.field, c.says)
		}
		if got := nettest.Must(os.ReadFile(path))(t); string(got) != c.content {
			t.Errorf("%s: file is %s now", c.content, got)
		}
	}
}
