// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ControlPlane is an etcd and a kube-apiserver.
type ControlPlane struct {
	// Kubeconfig is that of the administrator; KiloKubeconfig is that of the
	// user "kilo", who may do just what kg needs.
	Kubeconfig, KiloKubeconfig string
	// URL of the API server.
	URL string

	netns     string // path, "" for the namespace of the caller
	thread    *thread
	processes []*Process
	removeDir string // deleted by Stop
}

// controlPlaneConfig says where a control plane runs.
type controlPlaneConfig struct {
	bin, dir string
	netns    string // path, "" for the caller's own, without root
	stack    Stack
	address  netip.Addr // of the API server
	detached bool
}

// startControlPlane starts the programs; ready waits for them.
func startControlPlane(c controlPlaneConfig) (*ControlPlane, error) {
	ports, err := controlPlanePorts(c.netns)
	if err != nil {
		return nil, err
	}
	cp := &ControlPlane{
		Kubeconfig:     filepath.Join(c.dir, "admin.conf"),
		KiloKubeconfig: filepath.Join(c.dir, "kilo.conf"),
		URL:            "https://" + netip.AddrPortFrom(c.address, uint16(ports[0])).String(),
		netns:          c.netns,
	}
	if err := cp.writePKI(c); err != nil {
		return nil, err
	}
	cp.thread, err = newThread(func() error {
		if c.netns == "" {
			return nil
		}
		return enterNetns(c.netns)
	})
	if err != nil {
		return nil, err
	}
	for _, cmd := range controlPlaneCommands(c, ports) {
		p, err := cp.thread.start(cmd)
		if err != nil {
			return nil, errors.Join(err, cp.Stop())
		}
		cp.processes = append(cp.processes, p)
	}
	return cp, nil
}

// controlPlanePorts returns the ports of the API server, etcd's clients and
// etcd's peers: the usual ones in a namespace, else free ones.
func controlPlanePorts(netns string) ([]int, error) {
	if netns != "" {
		return []int{6443, 2379, 2380}, nil
	}
	var ports []int
	for range 3 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer discard(l)
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

func (cp *ControlPlane) writePKI(c controlPlaneConfig) error {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return err
	}
	ca, err := newAuthority()
	if err != nil {
		return err
	}
	servers := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback(), c.address}
	for _, s := range c.stack.families(services) {
		servers = append(servers, addrAt(s, 1))
	}
	return errors.Join(
		ca.writeServer(c.dir, servers),
		ca.writeKubeconfig(cp.Kubeconfig, cp.URL, "admin", "system:masters"),
		ca.writeKubeconfig(cp.KiloKubeconfig, cp.URL, kiloUser, ""),
	)
}

func controlPlaneCommands(c controlPlaneConfig, ports []int) []command {
	loopback := func(port int) string { return "http://127.0.0.1:" + strconv.Itoa(port) }
	file := func(name string) string { return filepath.Join(c.dir, name) }
	var serviceRanges []string
	for _, s := range c.stack.families(services) {
		serviceRanges = append(serviceRanges, s.String())
	}
	return []command{{
		name: "etcd", logPath: file("etcd.log"), detached: c.detached,
		args: []string{
			filepath.Join(c.bin, "etcd"), "--data-dir=" + file("etcd"), "--unsafe-no-fsync", "--log-level=warn",
			"--listen-client-urls=" + loopback(ports[1]), "--advertise-client-urls=" + loopback(ports[1]),
			"--listen-peer-urls=" + loopback(ports[2]), "--initial-advertise-peer-urls=" + loopback(ports[2]),
			"--initial-cluster=default=" + loopback(ports[2]),
		},
	}, {
		name: "kube-apiserver", logPath: file("kube-apiserver.log"), detached: c.detached,
		args: []string{
			filepath.Join(c.bin, "kube-apiserver"), "--etcd-servers=" + loopback(ports[1]),
			"--bind-address=" + c.address.String(), "--secure-port=" + strconv.Itoa(ports[0]), "--advertise-address=" + advertised(c.address),
			"--service-cluster-ip-range=" + strings.Join(serviceRanges, ","),
			"--tls-cert-file=" + file("apiserver.crt"), "--tls-private-key-file=" + file("apiserver.key"), "--client-ca-file=" + file("ca.crt"),
			"--service-account-key-file=" + file("sa.key"), "--service-account-signing-key-file=" + file("sa.key"),
			"--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=RBAC",
			"--endpoint-reconciler-type=none", "--profiling=false",
		},
	}}
}

// advertised is what --advertise-address accepts: no loopback address.
func advertised(a netip.Addr) string {
	if a.IsLoopback() {
		return internet4.Addr().Next().String()
	}
	return a.String()
}

// Ready waits until the API server serves, and installs the CRDs of a file (""
// for none) and the rights of the user "kilo".
func (cp *ControlPlane) Ready(ctx context.Context, crds string) error {
	client, err := cp.httpClient()
	if err != nil {
		return err
	}
	err = WaitFor(ctx, "the API server to be ready", 90*time.Second, func(ctx context.Context) error {
		for _, p := range cp.processes {
			if err := p.alive(); err != nil {
				return Fatal(err)
			}
		}
		return httpGet(ctx, client, cp.URL+"/readyz")
	})
	if err != nil {
		return fmt.Errorf("%w; logs: %s", err, filepath.Dir(cp.Kubeconfig))
	}
	return errors.Join(cp.installRBAC(ctx), cp.installCRDs(ctx, crds))
}

// RESTConfig returns the administrator's, which reaches into the namespace.
func (cp *ControlPlane) RESTConfig() (*rest.Config, error) {
	c, err := clientcmd.BuildConfigFromFlags("", cp.Kubeconfig)
	if err != nil {
		return nil, err
	}
	c.QPS, c.Burst = -1, 0 // a lab is not to be slowed down by its client
	if cp.netns != "" {
		c.Dial = dialer(cp.netns)
	}
	return c, nil
}

// Clients returns the administrator's clients.
func (cp *ControlPlane) Clients() (kubernetes.Interface, dynamic.Interface, error) {
	c, err := cp.RESTConfig()
	if err != nil {
		return nil, nil, err
	}
	k, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, nil, err
	}
	d, err := dynamic.NewForConfig(c)
	return k, d, err
}

func (cp *ControlPlane) httpClient() (*http.Client, error) {
	c, err := cp.RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := rest.HTTPClientFor(c)
	if err != nil {
		return nil, err
	}
	client.Timeout = 3 * time.Second
	return client, nil
}

// Stop ends the programs.
func (cp *ControlPlane) Stop() error {
	var errs []error
	for _, p := range slices.Backward(cp.processes) { // nothing here is worth an orderly end
		errs = append(errs, p.Stop(syscall.SIGKILL, 10*time.Second))
	}
	if cp.thread != nil {
		cp.thread.stop()
	}
	if cp.removeDir != "" {
		errs = append(errs, os.RemoveAll(cp.removeDir))
	}
	return errors.Join(errs...)
}

// dialer connects from a network namespace.
func dialer(netns string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = inNetns(netns, func() error {
			var d net.Dialer
			// address is a literal, so the socket is made by this very thread.
			conn, err = d.DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}
