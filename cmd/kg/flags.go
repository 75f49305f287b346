// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/kilomesh/kilo/internal/agent"
	"github.com/kilomesh/kilo/internal/host"
	"github.com/kilomesh/kilo/internal/mesh"
)

// agentFlags are the flags of kg as given; parse checks them.
type agentFlags struct {
	backend, cniPath, compatibility, encapsulate, hostname, iface, kubeconfig, leaderElection, listen, master, granularity, mtu, privateKey, topologyLabel, tunnel, wireguard string
	subnets, serviceCIDRs, internalCIDRs                                                                                                                                      []string
	cleanUp, cleanUpInterface, createInterface, cni, local, prioritisePrivate, strict, forwardRules, heartbeat                                                                bool
	port                                                                                                                                                                      int
	resyncPeriod                                                                                                                                                              time.Duration
	// given reports whether a flag is on the command line.
	given func(name string) bool
}

func (f *agentFlags) register(fs *pflag.FlagSet) {
	f.given = fs.Changed
	fs.StringVar(&f.backend, "backend", "kubernetes", "where the mesh is described: kubernetes")
	fs.BoolVar(&f.cleanUp, "clean-up", true, "undo everything on exit; false leaves traffic flowing, for upgrades")
	fs.BoolVar(&f.cleanUpInterface, "clean-up-interface", false, "with --clean-up, delete the WireGuard link too")
	fs.BoolVar(&f.createInterface, "create-interface", true, "create the WireGuard link if it does not exist")
	fs.BoolVar(&f.cni, "cni", true, "be the pod network: manage the CNI configuration and masquerade what leaves it")
	fs.StringVar(&f.cniPath, "cni-path", "/etc/cni/net.d/10-kilo.conflist", "the CNI configuration `file`")
	fs.StringVar(&f.compatibility, "compatibility", "", "pod `network` that Kilo is added to: none, flannel or cilium")
	fs.BoolVar(&f.heartbeat, "compat-heartbeat", false, "tell agents of releases up to 0.7 every 30 s that this node lives; they leave it out else (default with --leader-election=static: true)")
	fs.StringVar(&f.encapsulate, "encapsulate", "always", "which packets inside a location go through a tunnel: never, crosssubnet or always (with --mesh-granularity=cross: never)")
	fs.StringVar(&f.hostname, "hostname", "", "`name` of this host's Node (default: the host name)")
	fs.StringVar(&f.iface, "interface", "kilo0", "`name` of the WireGuard link")
	fs.BoolVar(&f.forwardRules, "iptables-forward-rules", false, "with --cni, accept what is forwarded for pods in the chain FORWARD of iptables, for hosts that drop it there")
	fs.StringSliceVar(&f.internalCIDRs, "internal-cidr", nil, "`CIDR` that the internal IP must be in; may be repeated")
	fs.StringVar(&f.kubeconfig, "kubeconfig", "", "kubeconfig `file` (default: in-cluster)")
	fs.StringVar(&f.leaderElection, "leader-election", "sticky", "who leads a location: the node that does, unless there is a better one (sticky), or always the first of the best (static), which agents of releases up to 0.7 in the same cluster need")
	fs.StringVar(&f.listen, "listen", ":1107", "TCP `address` for health and metrics")
	fs.BoolVar(&f.local, "local", true, "manage the routes inside the location")
	fs.StringVar(&f.master, "master", "", "`URL` of the API server, overrides the kubeconfig's")
	fs.StringVar(&f.granularity, "mesh-granularity", "location", "who has tunnels: one leader of each location (location), every node to every other (full), or every node to those of other locations (cross)")
	fs.StringVar(&f.mtu, "mtu", "auto", "MTU of the WireGuard link in bytes, 1280 to 65535; auto: 80 less than that of the default route's link")
	fs.IntVar(&f.port, "port", 51820, "UDP port of WireGuard, 1 to 65535")
	fs.BoolVar(&f.prioritisePrivate, "prioritise-private-addresses", false, "advertise the internal IP as endpoint if there is one")
	fs.StringVar(&f.privateKey, "private-key", "/var/lib/kilo/key", "`file` of this node's private key, as wg genkey prints it; made if there is none")
	fs.DurationVar(&f.resyncPeriod, "resync-period", 30*time.Second, "how often everything is looked at again without any event")
	fs.StringSliceVar(&f.serviceCIDRs, "service-cidr", nil, "`CIDR` of Services, never masqueraded; may be repeated")
	fs.BoolVar(&f.strict, "strict-encryption", false, "drop packets to or from pods of other locations that would go, or came, past the tunnels")
	fs.StringSliceVar(&f.subnets, "subnet", []string{"10.4.0.0/16"}, "`CIDR` of WireGuard IPs; once for each address family")
	fs.StringVar(&f.topologyLabel, "topology-label", "topology.kubernetes.io/region", "`label` of the Node that names its location, unless the annotation kilo.squat.ai/location does")
	fs.StringVar(&f.tunnel, "tunnel", "ipip", "what --encapsulate encapsulates in: ipip, or vxlan, for networks that drop IP in IP")
	fs.StringVar(&f.wireguard, "wireguard", "auto", "who runs WireGuard: kernel, userspace (kg userspace-wireguard beside this), or auto, what is there")
}

// settings are the flags, checked.
type settings struct {
	agent agent.Config
	host  host.Config
	rest  *rest.Config
}

func (f *agentFlags) parse() (settings, error) {
	var s settings
	var err error
	if f.backend != "kubernetes" {
		return s, fmt.Errorf("--backend %q: want kubernetes", f.backend)
	}
	m := &s.agent.Mesh
	if m.WireGuardCIDRs, err = parseCIDRs("--subnet", f.subnets); err != nil {
		return s, err
	}
	if err := oneForEachFamily(m.WireGuardCIDRs); err != nil {
		return s, err
	}
	if s.agent.NodeName = f.hostname; s.agent.NodeName == "" {
		if s.agent.NodeName, err = os.Hostname(); err != nil {
			return s, fmt.Errorf("host name: %w; want --hostname", err)
		}
	}
	if m.AddOn, err = mesh.ParseAddOn(f.compatibility); err != nil {
		return s, fmt.Errorf("--compatibility: %w", err)
	}
	if m.Encapsulation, err = mesh.ParseEncapsulation(f.encapsulate); err != nil {
		return s, fmt.Errorf("--encapsulate: %w", err)
	}
	if m.Tunnel, err = mesh.ParseTunnel(f.tunnel); err != nil {
		return s, fmt.Errorf("--tunnel: %w", err)
	}
	if m.Granularity, err = mesh.ParseGranularity(f.granularity); err != nil {
		return s, fmt.Errorf("--mesh-granularity: %w", err)
	}
	if s.agent.LeaderElection, err = mesh.ParseLeaderElection(f.leaderElection); err != nil {
		return s, fmt.Errorf("--leader-election: %w", err)
	}
	if s.agent.LeaderElection == mesh.LeaderElectionStatic && !f.given("compat-heartbeat") {
		f.heartbeat = true
	}
	if m.Granularity == mesh.GranularityCross && !f.given("encapsulate") {
		m.Encapsulation = mesh.EncapsulateNever // the default of the other granularities cannot be meant
	}
	if s.rest, err = clientcmd.BuildConfigFromFlags(f.master, f.kubeconfig); err != nil {
		return s, fmt.Errorf("--kubeconfig %q, --master %q: %w", f.kubeconfig, f.master, err)
	}
	if f.port < 1 || f.port > 65535 {
		return s, fmt.Errorf("--port %d: want a port of 1 to 65535", f.port)
	}
	s.agent.Detect.Port = uint16(f.port)
	s.agent.Detect.PrioritisePrivate = f.prioritisePrivate
	if m.ServiceCIDRs, err = parseCIDRs("--service-cidr", f.serviceCIDRs); err != nil {
		return s, err
	}
	if s.agent.Detect.InternalCIDRs, err = parseCIDRs("--internal-cidr", f.internalCIDRs); err != nil {
		return s, err
	}
	if m.MTU, err = parseMTU(f.mtu); err != nil {
		return s, err
	}
	if s.host.WireGuardMode, err = host.ParseWireGuardMode(f.wireguard); err != nil {
		return s, fmt.Errorf("--wireguard: %w", err)
	}
	if f.resyncPeriod <= 0 {
		return s, fmt.Errorf("--resync-period %v: want more than 0", f.resyncPeriod)
	}
	m.ManageLocal, m.ManageCNI, m.StrictEncryption, m.ForwardRules = f.local, f.cni, f.strict, f.forwardRules
	m.WireGuardDev, m.TunnelDev, m.VXLANDev = f.iface, tunnelDev, vxlanDev
	if err := m.Validate(); err != nil {
		return s, err
	}
	s.host.WireGuardDev, s.host.TunnelDev, s.host.CreateWireGuard = f.iface, tunnelDev, f.createInterface
	s.agent.ResyncPeriod = f.resyncPeriod
	s.agent.CleanUp, s.agent.CleanUpLink = f.cleanUp, f.cleanUpInterface
	return s, nil
}

// tunnelDev is the IPIP link's name in running clusters, vxlanDev that of the link for --tunnel=vxlan.
const (
	tunnelDev = "tunl0"
	vxlanDev  = "kilo-vxlan"
)

func parseCIDRs(flag string, texts []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, t := range texts {
		p, err := netip.ParsePrefix(t)
		if err != nil {
			return nil, fmt.Errorf("%s %q: want an IPv4 or IPv6 CIDR like 10.4.0.0/16", flag, t)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

func oneForEachFamily(cidrs []netip.Prefix) error {
	switch {
	case len(cidrs) == 0:
		return errors.New("--subnet: want at least one CIDR")
	case len(cidrs) == 1:
		return nil
	case len(cidrs) == 2 && cidrs[0].Addr().Is4() != cidrs[1].Addr().Is4():
		return nil
	}
	return fmt.Errorf("--subnet %v: want one CIDR, or one for each address family", cidrs)
}

// parseMTU returns 0 for auto.
func parseMTU(s string) (int, error) {
	if s == "auto" {
		return 0, nil
	}
	mtu, err := strconv.Atoi(s)
	if err != nil || mtu < 1280 || mtu > 65535 {
		return 0, fmt.Errorf("--mtu %q: want auto or a number of bytes, 1280 to 65535", s)
	}
	return mtu, nil
}
