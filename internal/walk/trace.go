// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Packet is what a host or one of its pods sends.
type Packet struct {
	// From is the name of the host.
	From string
	// Src in a pod CIDR of the host makes it a pod's packet. Zero leaves the
	// host the choice of one of its own.
	Src, Dst netip.Addr
}

func (p Packet) String() string {
	if !p.Src.IsValid() {
		return fmt.Sprintf("%s: from any to %s", p.From, p.Dst)
	}
	return fmt.Sprintf("%s: from %s to %s", p.From, p.Src, p.Dst)
}

// Place is where a packet arrived.
type Place struct {
	// Host is the name of the host, "" if a machine of Site, which runs no agent, got it.
	Host string
	Site string
	// Pod says that one of the host's pods got it, and not the host itself.
	Pod bool
}

func (p Place) String() string {
	switch {
	case p.Host == "":
		return "a machine in site " + p.Site
	case p.Pod:
		return "a pod on " + p.Host
	default:
		return p.Host
	}
}

// Hop is a way over the underlay.
type Hop struct{ From, To string }

// Trace is what became of a packet and, after Ping, of the answer.
type Trace struct {
	Packet
	// Sent is the source that the packet was sent with, Seen the one that arrived.
	Sent, Seen netip.Addr
	// At is where the packet arrived.
	At Place
	// Steps in order, those of the answer behind those of the packet.
	Steps []Step
	// Clear are the hops between different locations that the packet or its
	// answer went unencrypted.
	Clear []Hop
	// Sealed counts the hops through WireGuard.
	Sealed int
}

// Clone returns a Trace that outlives the next walk.
func (t Trace) Clone() Trace {
	t.Steps, t.Clear = slices.Clone(t.Steps), slices.Clone(t.Clear)
	return t
}

// mostSteps is how many are printed: a circle has many, and few that tell anything.
const mostSteps = 24

// String returns a line for each step.
func (t Trace) String() string {
	var b strings.Builder
	fmt.Fprintln(&b, t.Packet)
	for i, s := range t.Steps {
		if i == mostSteps {
			fmt.Fprintf(&b, "  and %d more\n", len(t.Steps)-i)
			break
		}
		fmt.Fprintf(&b, "  %s\n", s)
	}
	for _, h := range t.Clear {
		fmt.Fprintf(&b, "  in clear between locations: %s to %s\n", h.From, h.To)
	}
	return b.String()
}

// Step is one thing that happened to a packet, in the words of ip(8) and wg(8).
type Step struct {
	Host string
	// What happened: "route", "seal", "masquerade".
	What string
	// Dev is the link, Peer the other host.
	Dev, Peer string
	// Addr is the gateway, the endpoint's or the outer destination.
	Addr     netip.Addr
	Src, Dst netip.Addr
}

func (s Step) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", s.Host, s.What)
	if s.Addr.IsValid() {
		fmt.Fprintf(&b, " via %s", s.Addr)
	}
	if s.Dev != "" {
		fmt.Fprintf(&b, " dev %s", s.Dev)
	}
	if s.Peer != "" {
		fmt.Fprintf(&b, " to %s", s.Peer)
	}
	fmt.Fprintf(&b, " [%s > %s]", addrText(s.Src), addrText(s.Dst))
	return b.String()
}

func addrText(a netip.Addr) string {
	if !a.IsValid() {
		return "?"
	}
	return a.String()
}

// Cause says why a packet died.
type Cause string

// The causes of death.
const (
	CauseNoHost        Cause = "there is no such host"
	CauseNoRoute       Cause = "no route to the destination"
	CauseNoLink        Cause = "the route's link does not exist"
	CauseLinkDown      Cause = "the link is down"
	CauseNoSource      Cause = "the host has no address of the family to send from"
	CauseNotForwarding Cause = "the host does not forward packets of the family"
	CauseTTL           Cause = "the packet went in a circle"
	CauseMartian       Cause = "the source is an address of the receiving host"
	CauseNoPod         Cause = "no pod and no host has the address"
	CauseNextHop       Cause = "nobody on the segment has the next hop's address"
	CauseForeignSource Cause = "the underlay drops packets with a source that is not its own"
	CauseForeignDest   Cause = "the underlay drops packets to a destination that is not its own"
	CauseUnreachable   Cause = "nobody in reach of the site's router has the address"
	CauseNoNAT         Cause = "the site has no public address for the private source"

	CauseNoAllowedIP   Cause = "no peer's allowed IPs hold the destination"
	CauseNoPeer        Cause = "nobody has the peer's public key"
	CauseNotMutual     Cause = "the peer does not know the sender's public key"
	CausePresharedKey  Cause = "the preshared keys differ"
	CausePeerDown      Cause = "the peer's WireGuard link is down"
	CauseNoEndpoint    Cause = "neither has an endpoint of the other that works and a reason to speak first"
	CauseWrongEndpoint Cause = "the endpoint leads to somebody else"
	CausePort          Cause = "nobody listens on the endpoint's port"
	CauseTunnelLoop    Cause = "the outer packet is routed into the link that it comes from"
	CauseWrongSource   Cause = "the source is not among the allowed IPs of the sending peer"

	CauseNoTunnelLink Cause = "the receiver has no such tunnel link"
	CauseSealed       Cause = "the firewall drops what is sealed and goes by another link"
	CauseTunnelFrom   Cause = "the receiver's firewall drops tunnel packets from this source"
	CauseNoNeigh      Cause = "the gateway has no neighbour entry on the tunnel link"
	CauseWrongMAC     Cause = "the tunnel packet is for another MAC address"
	CauseOverlay      Cause = "the other pod network does not know the gateway or cannot reach it"

	CauseMisdelivered Cause = "somebody else got it"
	CauseClear        Cause = "it went unencrypted between locations"
	CauseNotSealed    Cause = "it never went through WireGuard"
	CauseSource       Cause = "it arrived with the wrong source"
)

// Death is the error of a packet that did not arrive as it should.
type Death struct {
	Cause Cause
	// Where is the host, or the site, that it happened at.
	Where string
	// Reply says that it was the answer that died.
	Reply bool
	// Src and Dst of the packet at that moment.
	Src, Dst netip.Addr
	// Trace up to there.
	Trace Trace
	// outer says what became of the tunnel's own packet.
	outer *Death
}

// Unwrap returns the death of the outer packet that was the reason.
func (d *Death) Unwrap() error {
	if d.outer == nil {
		return nil
	}
	return d.outer
}

// Error says how, where and why, with the trace.
func (d *Death) Error() string {
	what := "packet"
	if d.Reply {
		what = "answer"
	}
	s := fmt.Sprintf("%s died at %s: %s [%s > %s]", what, d.Where, d.Cause, addrText(d.Src), addrText(d.Dst))
	if d.outer != nil {
		s += "\n    outer " + d.outer.Error()
	}
	if d.Trace.From != "" {
		s += "\n" + d.Trace.String()
	}
	return s
}
