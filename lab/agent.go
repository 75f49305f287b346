// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// The places that kg has on every host.
const (
	agentPort   = 1107
	agentLink   = "kilo0"
	cniFileName = "10-kilo.conflist"
)

// startWireGuard starts kg userspace-wireguard, unless the kernel's is wanted.
func (h *Host) startWireGuard() error {
	if h.lab.Spec().KernelWireGuard {
		return nil
	}
	p, err := h.startKg("wireguard", "userspace-wireguard", "--interface="+agentLink)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wireGuard, h.wireGuardPID = p, p.PID
	return nil
}

// StartAgent starts kg; extra arguments come last, so they win.
func (h *Host) StartAgent(extra ...string) error {
	args := h.agentArgs()
	args = append(args, h.lab.Spec().KgArgs...)
	args = append(args, h.spec.KgArgs...)
	p, err := h.startKg("kg", append(args, extra...)...)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.agent, h.agentPID = p, p.PID
	return nil
}

func (h *Host) agentArgs() []string {
	spec := h.lab.Spec()
	resync := spec.Resync
	if resync == 0 {
		resync = 30 * time.Second
	}
	args := []string{
		"--kubeconfig=" + h.lab.ControlPlane.KiloKubeconfig, "--hostname=" + h.Name(),
		"--interface=" + agentLink, "--encapsulate=crosssubnet", "--listen=:" + strconv.Itoa(agentPort),
		"--clean-up=false", "--resync-period=" + resync.String(),
	}
	for _, s := range spec.Stack.families(wireguard) {
		args = append(args, "--subnet="+s.String())
	}
	for _, s := range spec.Stack.families(services) {
		args = append(args, "--service-cidr="+s.String())
	}
	return args
}

func (h *Host) startKg(name string, args ...string) (*Process, error) {
	t, err := h.hostThread()
	if err != nil {
		return nil, err
	}
	p, err := t.start(command{
		name: name, logPath: filepath.Join(h.dir(), name+".log"), detached: h.lab.options.Detached,
		args: append([]string{filepath.Join(h.lab.options.Bin, "kg")}, args...),
	})
	if err != nil {
		return nil, fmt.Errorf("host %s: %w", h.Name(), err)
	}
	return p, nil
}

// Agent returns the process of kg, WireGuard that of kg userspace-wireguard;
// nil in a lab from Open, before the start, and where WireGuard is the kernel's.
func (h *Host) Agent() *Process { h.mu.Lock(); defer h.mu.Unlock(); return h.agent }

// WireGuard returns the process of kg userspace-wireguard, see Agent.
func (h *Host) WireGuard() *Process { h.mu.Lock(); defer h.mu.Unlock(); return h.wireGuard }

// StopAgent ends kg with sig and waits until it is gone.
func (h *Host) StopAgent(sig syscall.Signal) error {
	if err := h.Agent().Stop(sig, 20*time.Second); err != nil {
		return fmt.Errorf("host %s: %w", h.Name(), err)
	}
	return nil
}

// RestartAgent ends kg with sig, starts it again and waits until it is ready.
func (h *Host) RestartAgent(ctx context.Context, sig syscall.Signal, extra ...string) error {
	if err := h.StopAgent(sig); err != nil {
		return err
	}
	if err := h.StartAgent(extra...); err != nil {
		return err
	}
	return h.WaitReady(ctx)
}

// WaitReady waits until kg says that its last pass was applied whole and has
// written the CNI configuration.
func (h *Host) WaitReady(ctx context.Context) error {
	cni := filepath.Join(h.dir(), "cni", cniFileName)
	return WaitFor(ctx, "kg on "+h.Name()+" to be ready; log "+filepath.Join(h.dir(), "kg.log"), 60*time.Second, func(ctx context.Context) error {
		for _, p := range []*Process{h.Agent(), h.WireGuard()} {
			if p == nil {
				continue
			}
			if err := p.alive(); err != nil {
				return Fatal(err)
			}
		}
		if _, err := h.Get(ctx, "/readyz"); err != nil {
			return err
		}
		_, err := os.Stat(cni)
		return err
	})
}

// Get reads a page of kg's listener.
func (h *Host) Get(ctx context.Context, path string) (string, error) {
	transport := &http.Transport{DialContext: dialer(h.Netns())}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 3 * time.Second}
	return httpRead(ctx, client, "http://127.0.0.1:"+strconv.Itoa(agentPort)+path)
}

// Metric returns the sum of all series of a metric of kg's.
func (h *Host) Metric(ctx context.Context, name string) (float64, error) {
	text, err := h.Get(ctx, "/metrics")
	if err != nil {
		return 0, fmt.Errorf("metric %s of %s: %w", name, h.Name(), err)
	}
	return sumMetric(text, name)
}

// sumMetric adds up the series of a metric in Prometheus' text format.
func sumMetric(text, name string) (float64, error) {
	sum, found := 0.0, false
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, name)
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		fields := strings.Fields(rest[strings.LastIndexByte(rest, '}')+1:])
		if len(fields) == 0 {
			return 0, fmt.Errorf("metric %s: no value in %q", name, line)
		}
		v, err := strconv.ParseFloat(fields[0], 64)
		if err != nil {
			return 0, fmt.Errorf("metric %s: %w", name, err)
		}
		sum += v
		found = true
	}
	if !found {
		return 0, fmt.Errorf("metric %s: not there", name)
	}
	return sum, nil
}

// Memory is the resident memory of a host's programs in bytes.
type Memory struct {
	Host             string
	Agent, WireGuard int64
}

// Memory reads it from the kernel.
func (h *Host) Memory() (Memory, error) {
	h.mu.Lock()
	agent, wg := h.agentPID, h.wireGuardPID
	h.mu.Unlock()
	a, err1 := residentMemory(agent)
	if wg == 0 {
		return Memory{h.Name(), a, 0}, err1
	}
	w, err2 := residentMemory(wg)
	return Memory{h.Name(), a, w}, errors.Join(err1, err2)
}

func residentMemory(pid int) (int64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("process %d has ended", pid)
}
