// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// kiloUser is whom kg's kubeconfig belongs to.
const kiloUser = "kilo"

// PeerResource is that of the Peer objects, for dynamic clients.
var PeerResource = schema.GroupVersionResource{Group: "kilo.squat.ai", Version: "v1alpha1", Resource: "peers"}

var crdResource = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// installRBAC gives the user "kilo" the rights that kg needs, and no other.
func (cp *ControlPlane) installRBAC(ctx context.Context) error {
	client, _, err := cp.Clients()
	if err != nil {
		return err
	}
	rule := func(group, resource string, verbs ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}
	}
	meta := metav1.ObjectMeta{Name: kiloUser}
	_, err = client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		rule("", "nodes", "get", "list", "watch", "patch"),
		rule(PeerResource.Group, PeerResource.Resource, "get", "list", "watch"),
		rule(crdResource.Group, crdResource.Resource, "get"),
		rule("", "events", "create", "patch"),
		rule("events.k8s.io", "events", "create", "patch"),
	}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create cluster role: %w", err)
	}
	_, err = client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: kiloUser},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: kiloUser}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create cluster role binding: %w", err)
	}
	return nil
}

// installCRDs creates the CustomResourceDefinitions of a YAML file and waits
// until the API server serves them.
func (cp *ControlPlane) installCRDs(ctx context.Context, path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("CRDs: %w", err)
	}
	defer discard(f)
	_, client, err := cp.Clients()
	if err != nil {
		return err
	}
	var names []string
	for d := yaml.NewYAMLOrJSONDecoder(f, 4096); ; {
		var o unstructured.Unstructured
		if err := d.Decode(&o.Object); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("CRDs: %s: %w", path, err)
		}
		if len(o.Object) == 0 {
			continue
		}
		if _, err := client.Resource(crdResource).Create(ctx, &o, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create CRD %s: %w", o.GetName(), err)
		}
		names = append(names, o.GetName())
	}
	for _, name := range names {
		err := WaitFor(ctx, "CRD "+name+" to be established", 30*time.Second, func(ctx context.Context) error {
			o, err := client.Resource(crdResource).Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			return established(o)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func established(crd *unstructured.Unstructured) error {
	conditions, _, err := unstructured.NestedSlice(crd.Object, "status", "conditions")
	if err != nil {
		return err
	}
	for _, c := range conditions {
		if m, ok := c.(map[string]any); ok && m["type"] == "Established" && m["status"] == "True" {
			return nil
		}
	}
	return fmt.Errorf("conditions: %v", conditions)
}

// createNode writes the Node of a host, as a kubelet and a controller manager would.
func (l *Lab) createNode(ctx context.Context, h HostSpec, p hostPlan) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name:        h.Name,
		Annotations: h.Annotations,
		Labels:      map[string]string{corev1.LabelTopologyRegion: h.Cloud, corev1.LabelHostname: h.Name, corev1.LabelOSStable: "linux"},
	}}
	maps.Copy(node.Labels, h.Labels)
	for _, c := range p.PodCIDRs {
		node.Spec.PodCIDRs = append(node.Spec.PodCIDRs, c.String())
	}
	node.Spec.PodCIDR = node.Spec.PodCIDRs[0]
	created, err := l.Kube.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create node %s: %w", h.Name, err)
	}
	created.Status.Addresses = nodeAddresses(h, p)
	// Not patched: there is no second writer of the status, and the first update of a new object cannot collide but with kg's annotations.
	for {
		_, err = l.Kube.CoreV1().Nodes().UpdateStatus(ctx, created, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) {
			break
		}
		latest, err := l.Kube.CoreV1().Nodes().Get(ctx, h.Name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("get node %s: %w", h.Name, err)
		}
		latest.Status.Addresses = created.Status.Addresses
		created = latest
	}
	if err != nil {
		return fmt.Errorf("set addresses of node %s: %w", h.Name, err)
	}
	return nil
}

// nodeAddresses are what a cloud's kubelet would report.
func nodeAddresses(h HostSpec, p hostPlan) []corev1.NodeAddress {
	internal, external := p.Private, p.Public
	if len(internal) == 0 {
		internal, external = p.Public, nil
	}
	out := []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: h.Name}}
	add := func(t corev1.NodeAddressType, ps []netip.Prefix) {
		for _, p := range ps {
			out = append(out, corev1.NodeAddress{Type: t, Address: p.Addr().String()})
		}
	}
	add(corev1.NodeInternalIP, internal)
	add(corev1.NodeExternalIP, external)
	return out
}

// httpGet returns nil if the answer is 200, else an error with its text.
func httpGet(ctx context.Context, client *http.Client, url string) error {
	_, err := httpRead(ctx, client, url)
	return err
}

func httpRead(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer discard(resp.Body)
	body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return "", fmt.Errorf("GET %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		text := strings.TrimSpace(string(body))
		return "", fmt.Errorf("GET %s: %s: %s", url, resp.Status, text[:min(len(text), 500)])
	}
	return string(body), nil
}
