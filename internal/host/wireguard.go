// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"go4.org/netipx"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/kilomesh/kilo/internal/mesh"
)

// wgClient is what Host needs of wgctrl.Client.
type wgClient interface {
	Device(name string) (*wgtypes.Device, error)
	ConfigureDevice(name string, cfg wgtypes.Config) error
	Close() error
}

// PeerStatus is what the WireGuard device knows about one peer.
type PeerStatus struct {
	Key mesh.PublicKey
	// Endpoint is where the last valid packet came from, or the configured one; zero if neither.
	Endpoint netip.AddrPort
	// LastHandshake is the zero Time before the first one.
	LastHandshake time.Time
	// RxBytes and TxBytes since the peer was added.
	RxBytes, TxBytes uint64
}

// Peers returns the peers of the WireGuard device by key. The error is
// os.ErrNotExist if there is no device.
func (h *Host) Peers(ctx context.Context) ([]PeerStatus, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	d, err := h.wgDevice(h.cfg.WireGuardDev)
	if err != nil {
		return nil, fmt.Errorf("wg show %s: %w", h.cfg.WireGuardDev, err)
	}
	byKey := make(map[mesh.PublicKey]PeerStatus, len(d.Peers))
	for _, p := range d.Peers {
		key := mesh.PublicKey(p.PublicKey)
		byKey[key] = PeerStatus{
			Key: key, Endpoint: addrPortOf(p.Endpoint), LastHandshake: handshakeOf(p.LastHandshakeTime),
			RxBytes: uint64(max(p.ReceiveBytes, 0)), TxBytes: uint64(max(p.TransmitBytes, 0)),
		}
	}
	out := make([]PeerStatus, 0, len(byKey))
	for _, key := range sortedKeys(byKey, mesh.PublicKey.Compare) {
		out = append(out, byKey[key])
	}
	return out, nil
}

// wgDevice reads a device. wgctrl looks for the kernel's WireGuard once, when
// it is opened, but the module may have been loaded since.
func (h *Host) wgDevice(name string) (*wgtypes.Device, error) {
	d, err := h.wg.Device(name)
	if !errors.Is(err, os.ErrNotExist) {
		return d, err
	}
	wg, dialErr := h.dialWG()
	if dialErr != nil {
		return nil, errors.Join(err, dialErr)
	}
	_ = h.wg.Close()
	h.wg = wg
	return h.wg.Device(name)
}

// devicePass is the second half of the work on one device.
type devicePass struct {
	p    *pass
	name string
	plan devicePlan
}

// deviceGrow configures the WireGuard device but for what it must lose, which
// is the returned pass's work.
func (p *pass) deviceGrow() devicePass {
	name, desired := p.h.cfg.WireGuardDev, p.want.Device
	wanted := false
	for _, l := range p.want.Links {
		if l.Kind == mesh.KindWireGuard {
			name, wanted = l.Name, true
		}
	}
	if !wanted {
		desired = mesh.Device{}
		if _, ok := p.links[name]; !ok {
			return devicePass{}
		}
	} else if _, ok := p.link(name); !ok {
		return devicePass{}
	}
	now := p.h.now()
	want, have, err := p.readDevice(name, desired, now)
	if err != nil {
		if wanted || !errors.Is(err, os.ErrNotExist) {
			p.errs = append(p.errs, fmt.Errorf("wg show %s: %w", name, explainDevice(name, err)))
		}
		return devicePass{}
	}
	dp := devicePass{p, name, diffDevice(want, have, p.h.desired, now)}
	p.errs = append(p.errs, dp.plan.errs...)
	dp.interfaceSection()
	failed := dp.configure(dp.plan.grow)
	p.h.remember(desired, failed)
	return dp
}

// readDevice returns what the device has, beside as much of what is desired as may differ from that.
func (p *pass) readDevice(name string, desired mesh.Device, now time.Time) (mesh.Device, device, error) {
	if p.base != nil {
		want, have := since(desired, p.base.Device, now)
		return want, have, nil
	}
	d, err := p.h.wgDevice(name)
	if err != nil {
		return mesh.Device{}, device{}, err
	}
	return desired, observedDevice(d), nil
}

// peerAddrs returns where the device sends to its peers, nothing without a
// device: the configured endpoint, or where a valid packet came from last. One
// that began a handshake counts, though its time is known only when it is done:
// it never is if answers go astray.
func (h *Host) peerAddrs() map[mesh.PublicKey]netip.Addr {
	d, err := h.wgDevice(h.cfg.WireGuardDev)
	if err != nil {
		return nil // Apply says what is wrong with it
	}
	out := make(map[mesh.PublicKey]netip.Addr, len(d.Peers))
	for _, p := range d.Peers {
		if ap := addrPortOf(p.Endpoint); ap.IsValid() {
			out[mesh.PublicKey(p.PublicKey)] = ap.Addr()
		}
	}
	return out
}

// remember keeps the desired endpoints, but the old one of a peer whose change failed.
func (h *Host) remember(want mesh.Device, failed map[mesh.PublicKey]bool) {
	next := desired{device: want}
	for key := range failed {
		if next.failed == nil {
			next.failed = map[mesh.PublicKey]netip.AddrPort{}
		}
		next.failed[key] = h.desired.endpoint(key)
	}
	h.desired = next
}

// shrink removes the prefixes and peers, and the private key, that are not desired.
func (d devicePass) shrink() {
	if d.p == nil {
		return
	}
	d.configure(d.plan.shrink)
	if k := d.plan.privateKey; k != nil && k.IsZero() {
		d.setPrivateKey(*k)
	}
}

func (d devicePass) setPrivateKey(k mesh.SecretKey) {
	raw := wgtypes.Key(k.Reveal())
	d.p.write(Change{OpReplace, KindDevice, fmt.Sprintf("%s private-key %v", d.name, k)}, func() error {
		return d.p.h.wg.ConfigureDevice(d.name, wgtypes.Config{PrivateKey: &raw})
	})
}

// interfaceSection sets private key and port, apart from the peers: a port in
// use must not keep them from being configured.
func (d devicePass) interfaceSection() {
	if k := d.plan.privateKey; k != nil && !k.IsZero() {
		d.setPrivateKey(*k)
	}
	if port := d.plan.listenPort; port != nil {
		n := int(*port)
		d.p.write(Change{OpReplace, KindDevice, fmt.Sprintf("%s listen-port %d", d.name, n)}, func() error {
			return explainPort(*port, d.p.h.wg.ConfigureDevice(d.name, wgtypes.Config{ListenPort: &n}))
		})
	}
}

// configure makes changes to peers, all in one message; if that fails, one by
// one, so that only the bad ones are missing. It returns those.
func (d devicePass) configure(changes []peerChange) (failed map[mesh.PublicKey]bool) {
	failed = map[mesh.PublicKey]bool{}
	if len(changes) == 0 || d.p.ctx.Err() != nil {
		return failed
	}
	var all wgtypes.Config
	for _, c := range changes {
		all.Peers = append(all.Peers, c.config())
	}
	err := d.p.h.countWrite()
	if err == nil {
		err = d.p.h.wg.ConfigureDevice(d.name, all)
	}
	for i, c := range changes {
		change := Change{c.op, KindPeer, d.name + " " + c.text()}
		switch {
		case err == nil:
			d.p.did(change, "name", c.name)
		case len(changes) == 1:
			d.p.fail(change, err)
			failed[c.key] = true
		default:
			one := wgtypes.Config{Peers: all.Peers[i : i+1]}
			failed[c.key] = !d.p.write(change, func() error { return d.p.h.wg.ConfigureDevice(d.name, one) }, "name", c.name)
		}
	}
	maps.DeleteFunc(failed, func(_ mesh.PublicKey, bad bool) bool { return !bad })
	return failed
}

func (c peerChange) config() wgtypes.PeerConfig {
	cfg := wgtypes.PeerConfig{PublicKey: wgtypes.Key(c.key), Remove: c.op == OpDelete, UpdateOnly: c.op == OpReplace, ReplaceAllowedIPs: c.replaceIPs}
	if c.endpoint.IsValid() {
		cfg.Endpoint = net.UDPAddrFromAddrPort(c.endpoint)
	}
	if c.presharedKey != nil {
		k := wgtypes.Key(c.presharedKey.Reveal())
		cfg.PresharedKey = &k
	}
	if c.keepalive != nil {
		every := time.Duration(*c.keepalive) * time.Second
		cfg.PersistentKeepaliveInterval = &every
	}
	for _, p := range c.allowedIPs {
		cfg.AllowedIPs = append(cfg.AllowedIPs, *ipNet(p))
	}
	return cfg
}

// text is what wg-set(8) would be told.
func (c peerChange) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "peer %s", c.key)
	if c.op == OpDelete {
		b.WriteString(" remove")
		return b.String()
	}
	if c.endpoint.IsValid() {
		fmt.Fprintf(&b, " endpoint %s", c.endpoint)
	}
	if c.keepalive != nil {
		fmt.Fprintf(&b, " persistent-keepalive %d", *c.keepalive)
	}
	if c.presharedKey != nil {
		fmt.Fprintf(&b, " preshared-key %v", *c.presharedKey)
	}
	if len(c.allowedIPs) == 0 && !c.replaceIPs {
		return b.String()
	}
	texts := make([]string, len(c.allowedIPs))
	for i, p := range c.allowedIPs {
		texts[i] = p.String()
		if !c.replaceIPs {
			texts[i] = "+" + texts[i] // wg-set(8): add to those that are there
		}
	}
	fmt.Fprintf(&b, " allowed-ips %s", strings.Join(texts, ","))
	return b.String()
}

func observedDevice(d *wgtypes.Device) device {
	out := device{privateKey: mesh.NewSecretKey(d.PrivateKey), listenPort: uint16(d.ListenPort), peers: make([]devicePeer, 0, len(d.Peers))}
	for _, p := range d.Peers {
		o := devicePeer{
			key: mesh.PublicKey(p.PublicKey), endpoint: addrPortOf(p.Endpoint), presharedKey: mesh.NewSecretKey(p.PresharedKey),
			keepalive:     uint16(p.PersistentKeepaliveInterval / time.Second),
			lastHandshake: handshakeOf(p.LastHandshakeTime),
			allowedIPs:    make([]netip.Prefix, 0, len(p.AllowedIPs)),
		}
		for i := range p.AllowedIPs {
			if prefix, ok := netipx.FromStdIPNet(&p.AllowedIPs[i]); ok {
				o.allowedIPs = append(o.allowedIPs, prefix)
			}
		}
		mesh.SortPrefixes(o.allowedIPs)
		out.peers = append(out.peers, o)
	}
	slices.SortFunc(out.peers, func(a, b devicePeer) int { return a.key.Compare(b.key) })
	return out
}

func addrPortOf(a *net.UDPAddr) netip.AddrPort {
	if a == nil {
		return netip.AddrPort{}
	}
	return unmap(a.AddrPort())
}

// handshakeOf maps the kernel's "never", the Unix epoch, to the zero Time.
func handshakeOf(t time.Time) time.Time {
	if t.Unix() <= 0 {
		return time.Time{}
	}
	return t
}

// explainDevice says what a link without a WireGuard device behind it needs.
func explainDevice(name string, err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("the link is no WireGuard link of the kernel and nothing serves /var/run/wireguard/%s.sock: start `kg userspace-wireguard`, or delete the link: %w", name, err)
	}
	return err
}

// explainPort says why a UDP port cannot be had.
func explainPort(port uint16, err error) error {
	// wgctrl turns the errno of the UAPI into text.
	if err != nil && (errors.Is(err, unix.EADDRINUSE) || strings.Contains(err.Error(), fmt.Sprintf("errno=-%d", int(unix.EADDRINUSE)))) {
		return fmt.Errorf("another program, perhaps another WireGuard, has UDP port %d; choose another one with --port: %w", port, err)
	}
	return err
}
