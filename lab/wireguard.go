// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The annotations that kg writes and the lab reads.
const (
	annotationKey         = "kilo.squat.ai/key"
	annotationWireGuardIP = "kilo.squat.ai/wireguard-ip"
	annotationLocation    = "kilo.squat.ai/location"
)

// Leader is a node that carries its location's traffic.
type Leader struct {
	Location string `json:"location"`
	Node     string `json:"node"`
	// WireGuardIPs as published, one for each family.
	WireGuardIPs []string `json:"wireGuardIPs"`
}

// Leaders returns who leads, according to the annotations of the Nodes.
func (l *Lab) Leaders(ctx context.Context) ([]Leader, error) {
	nodes, err := l.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	var out []Leader
	for _, n := range nodes.Items {
		var ips []string
		for _, a := range []string{annotationWireGuardIP, "kilo.squat.ai/wireguard-ipv6"} {
			if ip := n.Annotations[a]; ip != "" {
				ips = append(ips, ip)
			}
		}
		if len(ips) > 0 {
			out = append(out, Leader{location(n), n.Name, ips})
		}
	}
	return out, nil
}

func location(n corev1.Node) string {
	if l, ok := n.Annotations[annotationLocation]; ok {
		return l
	}
	return n.Labels[corev1.LabelTopologyRegion]
}

// Link is one peer of a host's WireGuard device.
type Link struct {
	From string `json:"from"`
	// To is the node that has the peer's key, else the key itself.
	To       string `json:"to"`
	Endpoint string `json:"endpoint"`
	// Handshake is the age of the last one, negative if there was none.
	Handshake  time.Duration `json:"handshakeNanoseconds"`
	Received   int64         `json:"received"`
	Sent       int64         `json:"sent"`
	AllowedIPs []string      `json:"allowedIPs"`
}

// Links reads the WireGuard devices of all hosts.
func (l *Lab) Links(ctx context.Context) ([]Link, error) {
	nodes, err := l.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	names := map[string]string{}
	for _, n := range nodes.Items {
		if key := n.Annotations[annotationKey]; key != "" {
			names[key] = n.Name
		}
	}
	var out []Link
	var errs []error
	for _, h := range l.Hosts() {
		links, err := h.Links()
		for _, k := range links {
			if name, ok := names[k.To]; ok {
				k.To = name
			}
			out = append(out, k)
		}
		errs = append(errs, err)
	}
	return out, errors.Join(errs...)
}

// Links reads the host's WireGuard device. To is the peer's key.
func (h *Host) Links() ([]Link, error) {
	var device *wgtypes.Device
	err := h.Do(func() error {
		c, err := wgctrl.New()
		if err != nil {
			return err
		}
		device, err = c.Device(agentLink)
		return errors.Join(err, c.Close())
	})
	if err != nil {
		return nil, fmt.Errorf("WireGuard of %s: %w", h.Name(), err)
	}
	now := time.Now()
	links := make([]Link, len(device.Peers))
	for i, p := range device.Peers {
		k := Link{From: h.Name(), To: p.PublicKey.String(), Handshake: -1, Received: p.ReceiveBytes, Sent: p.TransmitBytes}
		if p.Endpoint != nil {
			k.Endpoint = p.Endpoint.String()
		}
		if !p.LastHandshakeTime.IsZero() {
			k.Handshake = now.Sub(p.LastHandshakeTime)
		}
		for _, a := range p.AllowedIPs {
			k.AllowedIPs = append(k.AllowedIPs, a.String())
		}
		links[i] = k
	}
	slices.SortFunc(links, func(a, b Link) int { return strings.Compare(a.To, b.To) })
	return links, nil
}
