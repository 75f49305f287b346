// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
)

// Host is a running host.
type Host struct {
	lab  *Lab
	spec HostSpec
	plan hostPlan

	mu           sync.Mutex
	thread       *thread
	agent        *Process
	wireGuard    *Process
	agentPID     int
	wireGuardPID int
	pods         []*Pod
}

// newHost builds the host's namespace and directory.
func (l *Lab) newHost(s HostSpec) (*Host, error) {
	l.mu.Lock()
	h := &Host{lab: l, spec: s, plan: l.plan.Hosts[s.Name]}
	l.hosts = append(l.hosts, h)
	l.mu.Unlock()
	if err := mkdirs(h.dir()); err != nil {
		return nil, err
	}
	if err := l.buildMachine(s.Name, s.Cloud, h.plan); err != nil {
		return nil, fmt.Errorf("host %s: %w", s.Name, err)
	}
	return h, nil
}

// Name returns the host's name, which is its Node's.
func (h *Host) Name() string { return h.spec.Name }

// Spec returns what the host was made from.
func (h *Host) Spec() HostSpec { return h.spec }

// Netns returns the path of the host's network namespace.
func (h *Host) Netns() string { return h.lab.netnsPath(h.spec.Name) }

// Dir returns the host's directory: below it are its logs, and what the host
// sees as /run/wireguard (wireguard), /var/lib/kilo (kilo), /etc/cni/net.d (cni).
func (h *Host) Dir() string { return h.dir() }

func (h *Host) dir() string { return filepath.Join(h.lab.Dir, h.spec.Name) }

// Addrs returns the host's addresses on the underlay, private ones first.
func (h *Host) Addrs() []netip.Addr { return addrs(slices.Concat(h.plan.Private, h.plan.Public)) }

// PodCIDRs returns the ranges of the host's pods.
func (h *Host) PodCIDRs() []netip.Prefix { return slices.Clone(h.plan.PodCIDRs) }

// Do runs f on the host's thread: in its network namespace and with its files.
// Netlink sockets that f opens are the host's.
func (h *Host) Do(f func() error) error {
	t, err := h.hostThread()
	if err != nil {
		return err
	}
	return t.do(f)
}

func (h *Host) hostThread() (*thread, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.thread != nil {
		return h.thread, nil
	}
	t, err := newThread(func() error { return enterHost(h.Netns(), h.dir()) })
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", h.Name(), err)
	}
	h.thread = t
	return t, nil
}

func (h *Host) stopThread() {
	h.mu.Lock()
	t := h.thread
	h.thread = nil
	h.mu.Unlock()
	if t != nil {
		t.stop()
	}
}

// Exec runs a program on the host with the caller's terminal and returns its exit status.
func (h *Host) Exec(ctx context.Context, args ...string) (int, error) {
	t, err := h.hostThread()
	if err != nil {
		return 0, err
	}
	return t.run(ctx, args, nil)
}

// join makes the host a part of the cluster: Node, kg, pods.
func (h *Host) join(ctx context.Context) error {
	if err := h.lab.createNode(ctx, h.spec, h.plan); err != nil {
		return err
	}
	if err := h.StartAgent(); err != nil {
		return err
	}
	if err := h.WaitReady(ctx); err != nil {
		return err
	}
	n := h.spec.Pods
	if n == 0 {
		n = 1
	}
	for i := range max(n, 0) {
		if _, err := h.AddPod(ctx, h.Name()+"-"+strconv.Itoa(i)); err != nil {
			return err
		}
	}
	return nil
}

// Output runs a program on the host and returns what it printed. The error has its stderr.
func (h *Host) Output(ctx context.Context, args ...string) (string, error) {
	t, err := h.hostThread()
	if err != nil {
		return "", err
	}
	out, err := t.output(ctx, args)
	if err != nil {
		err = fmt.Errorf("%s: %w", h.Name(), err)
	}
	return out, err
}

// Dial connects from the host; address must not need a name server.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return dialer(h.Netns())(ctx, network, address)
}

// Remove takes the host off the network and ends everything on it. Its Node stays.
func (h *Host) Remove() error {
	ino, err := netnsInode(h.Netns())
	if err != nil {
		return err
	}
	inodes := map[uint64]bool{ino: true}
	for _, p := range h.Pods() {
		if ino, err = netnsInode(p.Netns()); err != nil {
			return err
		}
		inodes[ino] = true
	}
	h.stopThread()
	errs := []error{killAll(inodes)}
	for _, p := range h.Pods() {
		errs = append(errs, p.discard())
	}
	bridges := []string{internetName}
	if h.spec.Private {
		bridges = append(bridges, routerName(h.spec.Cloud))
	}
	for _, b := range bridges {
		errs = append(errs, inNetns(h.lab.netnsPath(b), func() error { return linkDelete(vethName(h.Name())) }))
	}
	errs = append(errs, deleteNetns(h.lab.netns(h.Name())))
	h.lab.mu.Lock()
	h.lab.hosts = slices.DeleteFunc(h.lab.hosts, func(o *Host) bool { return o == h })
	h.lab.mu.Unlock()
	return errors.Join(append(errs, h.lab.save(false))...)
}

func (h *Host) state() hostState {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := hostState{Spec: h.spec, AgentPID: h.agentPID, WireGuardPID: h.wireGuardPID}
	for _, p := range h.pods {
		s.Pods = append(s.Pods, p.podState)
	}
	return s
}
