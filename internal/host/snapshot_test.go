// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/base64"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kilomesh/kilo/internal/mesh"
)

// savedCluster has every kind of value.
func savedCluster() mesh.Snapshot {
	node := mesh.Node{
		Name: "a", Location: "x", WantsLead: true, ListenPort: 51820, Key: mesh.PublicKey{7}, PersistentKeepalive: 25,
		Endpoint:    mesh.Endpoint{DNS: "a.example.org", Resolved: netip.MustParseAddr("192.0.2.1"), Port: 51820},
		InternalIPs: []netip.Prefix{netip.MustParsePrefix("192.168.1.1/24"), netip.MustParsePrefix("fd01::1/64")},
		PodCIDRs:    []netip.Prefix{netip.MustParsePrefix("10.2.1.0/24")}, Granularity: mesh.GranularityLocation,
		WireGuardIPs: []netip.Addr{netip.MustParseAddr("10.4.0.1")}, LocationIPs: []netip.Addr{netip.MustParseAddr("10.4.0.2")},
	}
	return mesh.Snapshot{
		Nodes: []mesh.Node{node, {Name: "b, which has nothing yet"}},
		Peers: []mesh.Peer{
			{Name: "p", Key: mesh.PublicKey{8}, AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.5.0.1/32")}, PresharedKey: mesh.NewSecretKey([mesh.KeySize]byte{9})},
			{Name: "q", Key: mesh.PublicKey{9}, Endpoint: mesh.Endpoint{IP: netip.MustParseAddr("2001:db8::1"), Port: 1}},
		},
		Self: &mesh.Declared{Node: node, ForceEndpoint: node.Endpoint},
	}
}

func TestASavedClusterComesBackAsItWas(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kilo", "snapshot.json")
	if _, err := (&SnapshotFile{Path: path}).Load(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a file: %v, want that there is none", err)
	}
	f, want := &SnapshotFile{Path: path}, savedCluster()
	problems := want
	problems.Problems = []mesh.Problem{{Object: "node/c", Err: fs.ErrInvalid}}
	if err := f.Save(problems); err != nil {
		t.Fatal(err)
	}
	first, err := os.Stat(path)
	if err != nil || first.Mode().Perm() != 0o600 {
		t.Fatalf("%v, error %v: want a file that only root can read", first, err)
	}
	next := &SnapshotFile{Path: path}
	got, err := next.Load()
	if err != nil {
		t.Fatal(err)
	}
	compare := cmp.Options{cmp.AllowUnexported(mesh.SecretKey{}), cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})}
	if diff := cmp.Diff(want, got, compare); diff != "" {
		t.Errorf("(-saved +loaded)\n%s", diff)
	}
	if err := next.Save(got); err != nil {
		t.Fatal(err)
	}
	if second, err := os.Stat(path); err != nil || !os.SameFile(first, second) {
		t.Errorf("what is there was written again (error %v)", err)
	}
	got.Nodes = got.Nodes[:1]
	if err := next.Save(got); err != nil {
		t.Fatal(err)
	}
	if again, err := f.Load(); err != nil || len(again.Nodes) != 1 {
		t.Errorf("%d nodes after a change (error %v), want 1", len(again.Nodes), err)
	}
	for range 2 {
		if err := f.Forget(); err != nil {
			t.Error(err)
		}
	}
	if _, err := f.Load(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Forget: %v, want that there is none", err)
	}
}

func TestASavedClusterThatIsNoneSaysSo(t *testing.T) {
	raw := [mesh.KeySize]byte{9}
	secret := base64.StdEncoding.EncodeToString(raw[:])
	for content, want := range map[string]string{
		"":              "unexpected end",
		"{}":            "version 0",
		`{"Version":2}`: "version 2",
		`{"Version":1,"Peers":[{"Name":"p","PresharedKey":"` + secret[1:] + `"}]}`: "peer/p",
	} {
		path := filepath.Join(t.TempDir(), "snapshot.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := (&SnapshotFile{Path: path}).Load()
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), secret[1:]) {
			t.Errorf("%q: error %v, want one that names %s and %q", content, err, path, want)
		}
	}
}
