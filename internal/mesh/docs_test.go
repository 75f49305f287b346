// SPDX-License-Identifier: Apache-2.0

package mesh

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite what is generated in docs/topology.md")

// docsMesh is the mesh of docs/topology.md: a public node, a location with a
// private network over two subnets, one behind NAT, and a laptop.
func docsMesh() ([]Node, []Peer) {
	node := func(name, location, pods, endpoint string, k byte, internal ...string) Node {
		return Node{Name: name, Location: location, Endpoint: at(endpoint), ListenPort: 51820, InternalIPs: prefixes(internal...), PodCIDRs: prefixes(pods), Key: key(k)}
	}
	b1 := node("b1", "b", "10.42.2.0/24", "203.0.113.2", 2, "10.100.0.1/24")
	b1.WantsLead = true
	c1 := node("c1", "c", "10.42.5.0/24", "10.101.0.1", 5, "10.101.0.1/24")
	c1.PersistentKeepalive = 25
	return []Node{
		node("a1", "a", "10.42.1.0/24", "203.0.113.1", 1),
		b1, node("b2", "b", "10.42.3.0/24", "10.100.0.2", 3, "10.100.0.2/24"), node("b3", "b", "10.42.4.0/24", "10.100.1.3", 4, "10.100.1.3/24"),
		c1, node("c2", "c", "10.42.6.0/24", "10.101.0.2", 6, "10.101.0.2/24"),
	}, []Peer{{Name: "laptop", Key: key(9), AllowedIPs: prefixes("10.5.0.1/32")}}
}

// picture draws a topology in Mermaid: thick lines are tunnels, dotted ones
// what members of a location send each other, through its tunnel link or plainly.
func picture(t *Topology, states map[string]State) string {
	var b strings.Builder
	b.WriteString("```mermaid\ngraph LR\n")
	sites := map[string][]*Node{}
	names := map[PublicKey]string{}
	for _, l := range t.Locations {
		sites[l.Site()] = append(sites[l.Site()], l.Nodes...)
		for _, n := range l.Nodes {
			names[n.Key] = n.Name
		}
	}
	order := make([]string, 0, len(sites))
	for site := range sites {
		order = append(order, site)
	}
	slices.Sort(order)
	for _, site := range order {
		fmt.Fprintf(&b, "  subgraph %q\n", site)
		for _, n := range sites[site] {
			if t.Leads(n.Name) {
				p, _ := t.Publication(n.Name)
				fmt.Fprintf(&b, "    %s([%q])\n", n.Name, n.Name+" leads "+p.WireGuardIPs[0].Addr().String())
			} else {
				fmt.Fprintf(&b, "    %s[%q]\n", n.Name, n.Name)
			}
		}
		b.WriteString("  end\n")
	}
	for _, p := range t.Peers {
		fmt.Fprintf(&b, "  %s{{%q}}\n", p.Name, p.Name)
		names[p.Key] = p.Name
	}
	b.WriteString(lines(states, names))
	b.WriteString("```\n")
	return b.String()
}

// lines draws who sends to whom, read from what the kernels are to hold.
func lines(states map[string]State, names map[PublicKey]string) string {
	owners := map[string]string{} // of internal IPs
	nodes, _ := docsMesh()
	for _, n := range nodes {
		for _, ip := range n.InternalIPs {
			owners[ip.Addr().String()] = n.Name
		}
	}
	seen := map[string]bool{}
	var out []string
	line := func(from, arrow, to string) {
		if from > to && !strings.Contains(arrow, "laptop") {
			from, to = to, from
		}
		if s := "  " + from + " " + arrow + " " + to + "\n"; !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	for name, s := range states {
		for _, peer := range s.Device.Peers {
			line(name, "==>", names[peer.Key])
		}
		for _, r := range s.Routes {
			to := owners[r.Via.String()]
			switch {
			case to == "" || r.Table == TableTunnel:
			case r.Dev == "eth0":
				line(name, "-.-", to)
			case r.Dev != "kilo0":
				line(name, "-. "+r.Dev+" .-", to)
			}
		}
	}
	slices.Sort(out)
	return strings.ReplaceAll(strings.Join(out, ""), "==>", "<==>")
}

// docsBlock is what docs/topology.md shows of a mode.
func docsBlock(t *testing.T, cfg Config) string {
	t.Helper()
	nodes, peers := docsMesh()
	topology, problems := computed(t, cfg, nodes, peers)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	states := map[string]State{}
	for _, n := range nodes {
		ip := n.Endpoint.IP.String() + "/24"
		if len(n.InternalIPs) > 0 {
			ip = n.InternalIPs[0].String()
		}
		states[n.Name] = stateOf(t, topology, n.Name, oneLink(ip))
	}
	out := picture(topology, states)
	for _, name := range []string{"b1", "b2"} {
		var routes strings.Builder
		for _, r := range states[name].Routes {
			fmt.Fprintln(&routes, r)
		}
		for _, r := range states[name].Rules {
			fmt.Fprintln(&routes, r)
		}
		out += fmt.Sprintf("\nWhat `%s` gets:\n\n```\n%s```\n", name, routes.String())
	}
	return out
}

// The pictures and routes of docs/topology.md are those that the code plans.
func TestTopologyIsDocumented(t *testing.T) {
	const file = "../../docs/topology.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(text)
	for name, change := range map[string]func(*Config){
		"location": func(c *Config) { c.Encapsulation = EncapsulateCrossSubnet },
		"full":     func(c *Config) { c.Granularity, c.Encapsulation = GranularityFull, EncapsulateNever },
		"cross":    func(c *Config) { c.Granularity, c.Encapsulation = GranularityCross, EncapsulateNever },
		"vxlan":    func(c *Config) { c.Tunnel, c.VXLANDev = KindVXLAN, "kilo-vxlan" },
	} {
		cfg := testConfig()
		change(&cfg)
		begin, end := "<!-- generated: "+name+" -->\n", "<!-- end: "+name+" -->\n"
		before, rest, ok1 := strings.Cut(doc, begin)
		_, after, ok2 := strings.Cut(rest, end)
		if !ok1 || !ok2 {
			t.Fatalf("%s lacks %q or %q", file, begin, end)
		}
		doc = before + begin + docsBlock(t, cfg) + end + after
	}
	if *update {
		if err := os.WriteFile(file, []byte(doc), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(doc, string(text)); diff != "" {
		t.Errorf("%s is not what the code plans; run go test ./internal/mesh -update (-want +got):\n%s", file, diff)
	}
}
