// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

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
		links, err := h.Links(ctx)
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

// Links reads the host's WireGuard device through its socket. To is the peer's key.
func (h *Host) Links(ctx context.Context) ([]Link, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", filepath.Join(h.dir(), "wireguard", agentLink+".sock"))
	if err != nil {
		return nil, fmt.Errorf("WireGuard of %s: %w", h.Name(), err)
	}
	defer discard(conn)
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second)) // reading shows if it has passed
	if _, err := io.WriteString(conn, "get=1\n\n"); err != nil {
		return nil, fmt.Errorf("WireGuard of %s: %w", h.Name(), err)
	}
	links, err := parseUAPI(conn, time.Now())
	if err != nil {
		return nil, fmt.Errorf("WireGuard of %s: %w", h.Name(), err)
	}
	for i := range links {
		links[i].From = h.Name()
	}
	slices.SortFunc(links, func(a, b Link) int { return strings.Compare(a.To, b.To) })
	return links, nil
}

// parseUAPI reads the answer to get=1, see https://www.wireguard.com/xplatform/.
func parseUAPI(r io.Reader, now time.Time) ([]Link, error) {
	var links []Link
	var secs, nanos int64
	finish := func() {
		if len(links) > 0 && secs != 0 {
			links[len(links)-1].Handshake = now.Sub(time.Unix(secs, nanos))
		}
		secs, nanos = 0, 0
	}
	s := bufio.NewScanner(r)
	for s.Scan() {
		if s.Text() == "" { // the end of the answer
			finish()
			return links, nil
		}
		key, value, _ := strings.Cut(s.Text(), "=")
		if key == "errno" {
			if value != "0" {
				return nil, fmt.Errorf("errno %s", value)
			}
			continue
		}
		if key == "public_key" {
			finish()
			raw, err := hex.DecodeString(value)
			if err != nil {
				return nil, fmt.Errorf("public_key: %w", err)
			}
			links = append(links, Link{To: base64.StdEncoding.EncodeToString(raw), Handshake: -1})
			continue
		}
		if len(links) == 0 {
			continue // of the device
		}
		k := &links[len(links)-1]
		var err error
		switch key {
		case "endpoint":
			k.Endpoint = value
		case "allowed_ip":
			k.AllowedIPs = append(k.AllowedIPs, value)
		case "rx_bytes":
			k.Received, err = strconv.ParseInt(value, 10, 64)
		case "tx_bytes":
			k.Sent, err = strconv.ParseInt(value, 10, 64)
		case "last_handshake_time_sec":
			secs, err = strconv.ParseInt(value, 10, 64)
		case "last_handshake_time_nsec":
			nanos, err = strconv.ParseInt(value, 10, 64)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil, errors.Join(errors.New("the answer ended early"), s.Err())
}
