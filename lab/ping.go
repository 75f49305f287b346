// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// Place is where pings come from and go to: a Host or a Pod.
type Place interface {
	Name() string
	// Netns is the path of its network namespace.
	Netns() string
	Addrs() []netip.Addr
}

var (
	_ Place = (*Host)(nil)
	_ Place = (*Pod)(nil)
)

// pinger sends echo requests of one family from one network namespace.
type pinger struct {
	conn *icmp.PacketConn
	v6   bool
	id   int
}

func newPinger(netns string, v6 bool) (*pinger, error) {
	p := &pinger{v6: v6, id: int(rand.Uint32() & 0xffff)}
	network, any4 := "ip4:icmp", "0.0.0.0"
	if v6 {
		network, any4 = "ip6:ipv6-icmp", "::"
	}
	err := inNetns(netns, func() (err error) {
		p.conn, err = icmp.ListenPacket(network, any4)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ping socket: %w", err)
	}
	return p, nil
}

func (p *pinger) close() { _ = p.conn.Close() }

func (p *pinger) send(to netip.Addr, seq uint16) error {
	var kind icmp.Type = ipv4.ICMPTypeEcho
	if p.v6 {
		kind = ipv6.ICMPTypeEchoRequest
	}
	m := icmp.Message{Type: kind, Body: &icmp.Echo{ID: p.id, Seq: int(seq), Data: []byte("kilolab ping")}}
	b, err := m.Marshal(nil) // the kernel fills in the checksum of ICMPv6
	if err != nil {
		return err
	}
	_, err = p.conn.WriteTo(b, &net.IPAddr{IP: to.AsSlice()})
	if op, ok := errors.AsType[*net.OpError](err); ok {
		err = op.Err
	}
	return err
}

// answer is what came back to an echo request. Err is set when a router
// refused the request.
type answer struct {
	seq uint16
	err error
}

// receive waits for the next answer to one of p's requests, until the deadline.
func (p *pinger) receive(deadline time.Time) (answer, error) {
	if err := p.conn.SetReadDeadline(deadline); err != nil {
		return answer{}, err
	}
	proto := ipv4.ICMPTypeEchoReply.Protocol()
	if p.v6 {
		proto = ipv6.ICMPTypeEchoReply.Protocol()
	}
	for b := make([]byte, 2048); ; {
		n, from, err := p.conn.ReadFrom(b)
		if err != nil {
			return answer{}, err
		}
		m, err := icmp.ParseMessage(proto, b[:n])
		if err != nil {
			continue // not for us
		}
		switch body := m.Body.(type) {
		case *icmp.Echo:
			if body.ID == p.id && (m.Type == ipv4.ICMPTypeEchoReply || m.Type == ipv6.ICMPTypeEchoReply) {
				return answer{seq: uint16(body.Seq)}, nil
			}
		case *icmp.DstUnreach:
			if seq, ok := p.quoted(body.Data); ok {
				return answer{seq, fmt.Errorf("%v says %v, code %d", from, m.Type, m.Code)}, nil
			}
		case *icmp.TimeExceeded:
			if seq, ok := p.quoted(body.Data); ok {
				return answer{seq, fmt.Errorf("%v says %v", from, m.Type)}, nil
			}
		}
	}
}

// quoted finds p's own request in an ICMP error, which quotes the IP packet (RFC 792, RFC 4443).
func (p *pinger) quoted(packet []byte) (seq uint16, ok bool) {
	header := 40
	if !p.v6 {
		if len(packet) == 0 {
			return 0, false
		}
		header = int(packet[0]&0xf) * 4
	}
	if len(packet) < header+8 {
		return 0, false
	}
	e := packet[header:]
	if int(e[4])<<8|int(e[5]) != p.id {
		return 0, false
	}
	return uint16(e[6])<<8 | uint16(e[7]), true
}

// Ping sends echo requests until one is answered or ctx ends, and returns the
// round-trip time.
func Ping(ctx context.Context, from Place, to netip.Addr) (time.Duration, error) {
	var last error
	for {
		r := sweepPings(ctx, from.Netns(), []netip.Addr{to}, time.Second)[0]
		if r.err == nil {
			return r.rtt, nil
		}
		if ctx.Err() == nil || last == nil {
			last = r.err
		}
		if ctx.Err() != nil {
			return 0, fmt.Errorf("ping from %s to %v: %w: %w", from.Name(), to, context.Cause(ctx), last)
		}
	}
}

type pingResult struct {
	rtt time.Duration
	err error
}

// sweepPings pings all targets of either family at once, with a second and a
// third try inside the timeout.
func sweepPings(ctx context.Context, netns string, targets []netip.Addr, timeout time.Duration) []pingResult {
	results := make([]pingResult, len(targets))
	var wg sync.WaitGroup
	for _, v6 := range []bool{false, true} {
		var indexes []int
		for i, t := range targets {
			if t.Is6() == v6 {
				indexes = append(indexes, i)
			}
		}
		if len(indexes) > 0 {
			wg.Go(func() { sweepFamily(ctx, netns, v6, targets, indexes, timeout, results) })
		}
	}
	wg.Wait()
	return results
}

func sweepFamily(ctx context.Context, netns string, v6 bool, targets []netip.Addr, indexes []int, timeout time.Duration, results []pingResult) {
	p, err := newPinger(netns, v6)
	if err != nil {
		for _, i := range indexes {
			results[i].err = err
		}
		return
	}
	defer p.close()
	const tries = 3
	open := map[int]bool{} // index of target
	for _, i := range indexes {
		open[i] = true
		results[i].err = fmt.Errorf("no reply within %v", timeout)
	}
	sent := map[uint16]time.Time{}
	target := map[uint16]int{}
	var seq uint16
	for range tries {
		if len(open) == 0 || ctx.Err() != nil {
			return
		}
		for _, i := range indexes {
			if !open[i] {
				continue
			}
			seq++
			sent[seq], target[seq] = time.Now(), i
			if err := p.send(targets[i], seq); err != nil {
				results[i].err = err
			}
		}
		deadline := time.Now().Add(timeout / tries)
		for len(open) > 0 {
			a, err := p.receive(deadline)
			if err != nil {
				break // the time for this try is over
			}
			i, ok := target[a.seq]
			if !ok || !open[i] {
				continue
			}
			if results[i].err = a.err; a.err == nil {
				results[i].rtt = time.Since(sent[a.seq])
				delete(open, i)
			}
		}
	}
}
