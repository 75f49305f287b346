// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/kilomesh/kilo/internal/mesh"
	"github.com/kilomesh/kilo/internal/nettest"
)

var update = flag.Bool("update", false, "rewrite docs/kg.md")

// kubeconfig returns the name of a kubeconfig that can be read.
func kubeconfig(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"apiVersion":"v1","kind":"Config","clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func parse(t *testing.T, args ...string) (settings, error) {
	t.Helper()
	var f agentFlags
	fs := pflag.NewFlagSet("kg", pflag.ContinueOnError)
	f.register(fs)
	if err := fs.Parse(append([]string{"--kubeconfig=" + kubeconfig(t), "--hostname=n"}, args...)); err != nil {
		t.Fatal(err)
	}
	return f.parse()
}

func TestBadFlagsNameFlagValueAndWhatIsAccepted(t *testing.T) {
	for _, tt := range []struct{ arg, want string }{
		{"--backend=etcd", `--backend "etcd": want kubernetes`},
		{"--encapsulate=sometimes", `--encapsulate: encapsulation "sometimes": want one of never, crosssubnet, always`},
		{"--mesh-granularity=hub", `--mesh-granularity: granularity "hub": want one of location, full, cross`},
		{"--tunnel=gre", `--tunnel: tunnel "gre": want one of ipip, vxlan`},
		{"--compatibility=calico", `--compatibility: add-on mode "calico": want one of none, flannel, cilium`},
		{"--compatibility=flannel", "want --cni=false"},
		{"--port=0", "--port 0: want a port of 1 to 65535"},
		{"--port=65536", "--port 65536: want a port of 1 to 65535"},
		{"--mtu=big", `--mtu "big": want auto or a number`},
		{"--mtu=1279", `--mtu "1279"`},
		{"--subnet=10.4.0.0", `--subnet "10.4.0.0": want an IPv4 or IPv6 CIDR`},
		{"--subnet=10.4.0.0/16,10.5.0.0/16", "want one CIDR, or one for each address family"},
		{"--subnet=10.4.0.0/16,fd00::/64,10.5.0.0/16", "want one CIDR, or one for each address family"},
		{"--service-cidr=10.43.0.0/33", `--service-cidr "10.43.0.0/33"`},
		{"--internal-cidr=x", `--internal-cidr "x"`},
		{"--wireguard=boringtun", `--wireguard: wireguard mode "boringtun": want one of auto, kernel, userspace`},
		{"--resync-period=0s", "--resync-period 0s: want more than 0"},
		{"--kubeconfig=/does/not/exist", `--kubeconfig "/does/not/exist"`},
	} {
		if _, err := parse(t, tt.arg); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("kg %s: error %v, want one with %q", tt.arg, err, tt.want)
		}
	}
}

func TestAddOnModesRefuseWhatCannotWork(t *testing.T) {
	if s, err := parse(t, "--compatibility=flannel", "--cni=false", "--local=false"); err != nil || s.agent.Mesh.AddOn != mesh.AddOnFlannel {
		t.Errorf("add-on mode %q, error %v", s.agent.Mesh.AddOn, err)
	}
	for arg, want := range map[string]string{"--encapsulate=never": "want encapsulation crosssubnet or always", "--tunnel=vxlan": "want tunnel ipip"} {
		if _, err := parse(t, "--compatibility=flannel", "--cni=false", arg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with %s: error %v, want one with %q", arg, err, want)
		}
	}
}

func TestCrossEncapsulatesNothing(t *testing.T) {
	s, err := parse(t, "--mesh-granularity=cross")
	if err != nil || s.agent.Mesh.Encapsulation != mesh.EncapsulateNever {
		t.Errorf("encapsulation %q, error %v; want never", s.agent.Mesh.Encapsulation, err)
	}
	if _, err := parse(t, "--mesh-granularity=cross", "--encapsulate=always"); err == nil || !strings.Contains(err.Error(), "want encapsulation never") {
		t.Errorf("with --encapsulate=always: error %v, want a refusal with the reason", err)
	}
}

func TestFlagsBecomeSettings(t *testing.T) {
	s, err := parse(t, "--subnet=10.4.0.9/16", "--subnet=fd00:4::/64", "--mtu=1400", "--port=4500", "--local=false", "--cni=false", "--interface=wg7", "--mesh-granularity=full", "--encapsulate=never", "--strict-encryption", "--iptables-forward-rules")
	if err != nil {
		t.Fatal(err)
	}
	want := mesh.Config{
		Granularity: mesh.GranularityFull, Encapsulation: mesh.EncapsulateNever,
		WireGuardCIDRs: []netip.Prefix{netip.MustParsePrefix("10.4.0.0/16"), netip.MustParsePrefix("fd00:4::/64")},
		Tunnel:         mesh.KindIPIP,
		WireGuardDev:   "wg7", TunnelDev: "tunl0", VXLANDev: "kilo-vxlan", MTU: 1400, StrictEncryption: true, ForwardRules: true,
	}
	if diff := cmp.Diff(want, s.agent.Mesh, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("mesh config (-want +got):\n%s", diff)
	}
	if s.agent.Detect.Port != 4500 || s.agent.NodeName != "n" || s.host.WireGuardDev != "wg7" || !s.agent.CleanUp {
		t.Errorf("settings = %+v", s.agent)
	}
}

// kg runs the command as main does.
func kg(args ...string) (status int, stdout, stderr string) {
	var out, err bytes.Buffer
	status = run(args, &out, &err)
	return status, out.String(), err.String()
}

func TestErrorsAreOneLineOnStderrAndStatus1(t *testing.T) {
	for _, args := range [][]string{{"--port=0", "--master=http://127.0.0.1:1"}, {"--no-such-flag"}, {"no-such-command"}, {"--log-level=loud"}, {"userspace-wireguard", "--mtu=7"}} {
		status, stdout, stderr := kg(args...)
		if status != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.HasPrefix(stderr, "error: ") {
			t.Errorf("kg %q: status %d, stdout %q, stderr %q", args, status, stdout, stderr)
		}
	}
}

func TestVersion(t *testing.T) {
	for _, args := range [][]string{{"version"}, {"--version"}, {"userspace-wireguard", "--version"}} {
		if status, stdout, _ := kg(args...); status != 0 || stdout != version+"\n" {
			t.Errorf("kg %q: status %d, %q", args, status, stdout)
		}
	}
}

func TestLogLinesKeepTheExistingKeys(t *testing.T) {
	var b bytes.Buffer
	var level logLevel
	newLogger(&b, &level).With("component", "kilo").Warn("x", "level_of", slog.LevelError, "n", 1)
	var line map[string]any
	if err := json.Unmarshal(b.Bytes(), &line); err != nil {
		t.Fatal(err)
	}
	if line["level"] != "warn" || line["msg"] != "x" || line["component"] != "kilo" || line["ts"] == nil || !strings.HasPrefix(line["caller"].(string), "main_test.go:") {
		t.Errorf("log line = %s", b.String())
	}
	for name, want := range map[string]int{"all": 2, "debug": 2, "info": 1, "warn": 0, "none": 0} {
		b.Reset()
		if err := level.Set(name); err != nil {
			t.Fatal(err)
		}
		log := newLogger(&b, &level)
		log.Debug("x")
		log.Info("x")
		if got := strings.Count(b.String(), "\n"); got != want {
			t.Errorf("level %s: %d lines of two, want %d", name, got, want)
		}
	}
}

func TestSignalsChangeTheLogLevel(t *testing.T) {
	var b bytes.Buffer
	var level logLevel
	if err := level.Set("error"); err != nil {
		t.Fatal(err)
	}
	log := newLogger(&b, &level)
	end := level.follow(log)
	for _, s := range []struct {
		signal syscall.Signal
		want   slog.Level
	}{{syscall.SIGUSR1, slog.LevelDebug}, {syscall.SIGUSR2, slog.LevelError}, {syscall.SIGUSR1, slog.LevelDebug}} {
		if err := syscall.Kill(os.Getpid(), s.signal); err != nil {
			t.Fatal(err)
		}
		nettest.Await(t, fmt.Sprintf("level %v after %v", s.want, s.signal), func() bool { return level.Level() == s.want })
	}
	end()
	log.Debug("seen")
	if got := b.String(); !strings.Contains(got, "seen") || !strings.Contains(got, `"level":"debug"`) {
		t.Errorf("log = %s", got)
	}
}

// docs/kg.md is what the command says of itself.
func TestHelpIsDocumented(t *testing.T) {
	var b strings.Builder
	b.WriteString("# kg\n\nWhat `kg --help` and `kg userspace-wireguard --help` say. Rewritten by `go test ./cmd/kg -update`.\n")
	for _, args := range [][]string{{"--help"}, {"userspace-wireguard", "--help"}} {
		_, stdout, _ := kg(args...)
		b.WriteString("\n```\n" + stdout + "```\n")
	}
	const name = "../../docs/kg.md"
	if *update {
		if err := os.WriteFile(name, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(b.String(), string(got)); diff != "" {
		t.Errorf("docs/kg.md is not what the command says; run go test ./cmd/kg -update (-want +got):\n%s", diff)
	}
}
