// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// Pod is a network namespace that the host's CNI configuration attached.
type Pod struct {
	host *Host
	podState
}

type podState struct {
	PodName string       `json:"name"`
	IPs     []netip.Addr `json:"ips"`
}

// loopbackConf is what a container runtime runs before the pod network's configuration.
const loopbackConf = `{"cniVersion": "1.0.0", "name": "loopback", "plugins": [{"type": "loopback"}]}`

// Name returns the pod's name.
func (p *Pod) Name() string { return p.PodName }

// Host returns where the pod is.
func (p *Pod) Host() *Host { return p.host }

// Addrs returns the pod's addresses, IPv4 first.
func (p *Pod) Addrs() []netip.Addr { return slices.Clone(p.IPs) }

// Netns returns the path of the pod's network namespace.
func (p *Pod) Netns() string { return p.host.lab.netnsPath(p.netnsName()) }

func (p *Pod) netnsName() string { return "pod-" + p.PodName }

// Pods returns the host's pods.
func (h *Host) Pods() []*Pod {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.pods)
}

// AddPod makes a pod and attaches it with the CNI configuration that kg wrote.
func (h *Host) AddPod(ctx context.Context, name string) (*Pod, error) {
	p := &Pod{host: h, podState: podState{PodName: name}}
	if err := createNetns(h.lab.netns(p.netnsName())); err != nil {
		return nil, err
	}
	if err := p.attach(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("attach pod %s: %w", name, err), p.discard())
	}
	h.mu.Lock()
	h.pods = append(h.pods, p)
	h.mu.Unlock()
	return p, nil
}

// Remove detaches the pod as a container runtime does, and deletes it.
func (p *Pod) Remove(ctx context.Context) error {
	err := p.withCNI(func(cni *libcni.CNIConfig, conf *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
		return cni.DelNetworkList(ctx, conf, rt)
	})
	if err != nil {
		err = fmt.Errorf("detach pod %s: %w", p.PodName, err)
	}
	p.host.mu.Lock()
	p.host.pods = slices.DeleteFunc(p.host.pods, func(o *Pod) bool { return o == p })
	p.host.mu.Unlock()
	return errors.Join(err, p.discard())
}

// Output runs a program in the pod's network namespace, with the machine's
// files, and returns what it printed. The error has its stderr.
func (p *Pod) Output(ctx context.Context, args ...string) (string, error) {
	t, err := newThread(func() error { return enterNetns(p.Netns()) })
	if err != nil {
		return "", err
	}
	defer t.stop()
	out, err := t.output(ctx, args)
	if err != nil {
		err = fmt.Errorf("%s: %w", p.PodName, err)
	}
	return out, err
}

// discard deletes the pod without telling the plugins.
func (p *Pod) discard() error { return deleteNetns(p.host.lab.netns(p.netnsName())) }

func (p *Pod) attach(ctx context.Context) error {
	return p.withCNI(func(cni *libcni.CNIConfig, conf *libcni.NetworkConfigList, rt *libcni.RuntimeConf) error {
		loopback, err := libcni.ConfListFromBytes([]byte(loopbackConf))
		if err != nil {
			return err
		}
		if _, err := cni.AddNetworkList(ctx, loopback, &libcni.RuntimeConf{ContainerID: rt.ContainerID, NetNS: rt.NetNS, IfName: "lo"}); err != nil {
			return err
		}
		raw, err := cni.AddNetworkList(ctx, conf, rt)
		if err != nil {
			return err
		}
		result, err := types100.NewResultFromResult(raw)
		if err != nil {
			return err
		}
		for _, ip := range result.IPs {
			if a, ok := netip.AddrFromSlice(ip.Address.IP); ok {
				p.IPs = append(p.IPs, a.Unmap())
			}
		}
		slices.SortFunc(p.IPs, netip.Addr.Compare)
		if len(p.IPs) == 0 {
			return errors.New("the plugins gave it no address")
		}
		return nil
	})
}

// withCNI runs f on the host's thread, where plugins see the host's network and
// its /var/lib/cni, with the configuration that a kubelet would take.
func (p *Pod) withCNI(f func(*libcni.CNIConfig, *libcni.NetworkConfigList, *libcni.RuntimeConf) error) error {
	// The pod's namespace was named after the host's mount namespace was made, so
	// it has no path in there but that of an open file.
	netns, err := os.Open(p.Netns())
	if err != nil {
		return err
	}
	defer discard(netns)
	bin := filepath.Join(p.host.lab.options.Bin, "cni")
	return p.host.Do(func() error {
		conf, err := libcni.LoadConfList("/etc/cni/net.d", "kilo")
		if err != nil {
			return err
		}
		return f(libcni.NewCNIConfig([]string{bin}, nil), conf, &libcni.RuntimeConf{
			ContainerID: p.host.lab.ID + "-" + p.PodName,
			NetNS:       "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(int(netns.Fd())),
			IfName:      "eth0",
		})
	})
}
