// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kilomesh/kilo/lab"
	"github.com/kilomesh/kilo/lab/labtest"
)

// TestBadInput: what cannot be read is reported with object, field and value,
// and stops nothing else.
func TestBadInput(t *testing.T) {
	spec := lab.Demo(lab.IPv4)
	spec.Resync = time.Second
	l := labtest.Start(t, spec)
	waitMatrix(t, l)

	annotate(t, l, "a1", "kilo.squat.ai/persistent-keepalive", "often")
	annotate(t, l, "c2", "kilo.squat.ai/force-endpoint", "203.0.113.9:99999")
	createPeer(t, l, "broken", map[string]any{"publicKey": "not a key", "allowedIPs": []any{"10.5.0.1/32"}})
	cni := filepath.Join(l.Host("b2").Dir(), "cni", "10-kilo.conflist")
	if err := os.WriteFile(cni, []byte(`{"plugins": 7}`), 0o644); err != nil {
		t.Fatal(err)
	}

	// Nodes and Peers are every agent's input, the CNI file only its own.
	for _, h := range l.Hosts() {
		wantReport(t, h, "node/a1", "persistent-keepalive", "often")
		wantReport(t, h, "node/c2", "force-endpoint", "203.0.113.9:99999")
		wantReport(t, h, "peer/broken", "publicKey", "not a key")
	}
	wantReport(t, l.Host("b2"), "file//etc/cni/net.d/10-kilo.conflist", "plugins", "7")

	if _, err := l.AddHost(t.Context(), newHost("b4")); err != nil {
		t.Fatal(err)
	}
	waitMatrix(t, l)

	t.Run("mended inputs are taken", func(t *testing.T) {
		annotate(t, l, "c2", "kilo.squat.ai/force-endpoint", "203.0.113.9:51820")
		for _, h := range l.Hosts() {
			wantCleared(t, h, "node/c2", "force-endpoint")
		}
		// A keepalive of a public node must not change how it reaches those behind NAT.
		annotate(t, l, "a1", "kilo.squat.ai/persistent-keepalive", "25")
		if err := os.Remove(cni); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "kg on b2 to write its CNI file again", 10*time.Second, func(context.Context) error {
			_, err := os.Stat(cni)
			return err
		})
		if _, err := l.Host("b2").AddPod(t.Context(), "b2-1"); err != nil {
			t.Fatal(err)
		}
		waitMatrix(t, l)
	})
}

// wantReport waits until kg's log has a record that says all of it.
func wantReport(t *testing.T, h *lab.Host, object, field, value string) {
	t.Helper()
	waitFor(t, "kg on "+h.Name()+" to report "+object+" "+field, 10*time.Second, func(context.Context) error {
		records, err := h.LogRecords()
		if err != nil {
			return err
		}
		var of []any
		for _, r := range records {
			if r["object"] != object {
				continue
			}
			of = append(of, r)
			if strings.Contains(fmt.Sprint(r["field"]), field) && strings.Contains(fmt.Sprint(r["error"], r["value"]), value) {
				return nil
			}
		}
		return fmt.Errorf("its records about %s are %v", object, of)
	})
}

// wantCleared waits until kg's log says that a problem is gone.
func wantCleared(t *testing.T, h *lab.Host, object, field string) {
	t.Helper()
	waitFor(t, "kg on "+h.Name()+" to report that "+object+" is mended", 10*time.Second, func(context.Context) error {
		records, err := h.LogRecords()
		if err != nil {
			return err
		}
		for _, r := range records {
			if r["msg"] == "problem cleared" && r["object"] == object && strings.Contains(fmt.Sprint(r["field"]), field) {
				return nil
			}
		}
		return fmt.Errorf("none of its %d records does", len(records))
	})
}

func annotate(t *testing.T, l *lab.Lab, node, key, value string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: %q}}}`, key, value)
	if _, err := l.Kube.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

func createPeer(t *testing.T, l *lab.Lab, name string, spec map[string]any) {
	t.Helper()
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
		"metadata": map[string]any{"name": name}, "spec": spec,
	}}
	if _, err := l.Dynamic.Resource(lab.PeerResource).Create(t.Context(), o, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}
