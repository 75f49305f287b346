// SPDX-License-Identifier: Apache-2.0

//go:build linux

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"

	"github.com/kilomesh/kilo/internal/mesh"
)

// WireGuardMode says where the WireGuard link comes from.
type WireGuardMode string

// The modes.
const (
	// WireGuardAuto uses the link that is there and else makes a kernel one.
	WireGuardAuto WireGuardMode = "auto"
	// WireGuardKernel does the same; the link that is there should be the kernel's.
	WireGuardKernel WireGuardMode = "kernel"
	// WireGuardUserspace never makes a link: another process serves it.
	WireGuardUserspace WireGuardMode = "userspace"
)

// ParseWireGuardMode reads a WireGuardMode.
func ParseWireGuardMode(s string) (WireGuardMode, error) {
	switch m := WireGuardMode(s); m {
	case WireGuardAuto, WireGuardKernel, WireGuardUserspace:
		return m, nil
	default:
		return "", fmt.Errorf("wireguard mode %q: want one of auto, kernel, userspace", s)
	}
}

// The marks of ownership, see doc.go.
const (
	// RouteProtocol marks routes and rules, see rtnetlink(7). No program that
	// iproute2's rt_protos lists has it.
	RouteProtocol = 117
	// RulePriority is before that of table main, 32766.
	RulePriority = 1107

	// linkGroup marks links that we made, from the moment they are there, see
	// ip-link(8); aliasAdopted those that we only use.
	linkGroup    = 117
	aliasAdopted = "kilo-adopted"
	// aliasUserspace is on a link that `kg userspace-wireguard` made, and deletes.
	aliasUserspace = "kilo-userspace"
)

// Config of a Host.
type Config struct {
	// Log gets one line for each Change. Nil discards them.
	Log *slog.Logger
	// WireGuardDev and TunnelDev name the links that are Kilo's own.
	WireGuardDev, TunnelDev string
	// CreateWireGuard allows to make the WireGuard link when it is missing.
	CreateWireGuard bool
	// WireGuardMode is WireGuardAuto if empty.
	WireGuardMode WireGuardMode
	// UndoFile keeps what CleanUp must undo beside the marked objects: sysctls
	// and files. Without one these stay as they are.
	UndoFile string
	// CNIBridge is the bridge of the pods, "kube-bridge" if empty.
	CNIBridge string
}

// Host is the kernel of the network namespace that New was called in. Its
// methods may be called from several goroutines; they run one at a time.
type Host struct {
	cfg    Config
	log    *slog.Logger
	writes atomic.Uint64
	// applied is what the last Apply was for, nil before the first; see Watch.
	applied atomic.Pointer[mesh.State]
	settled settled
	// nftPort is the netlink address of our connection to nftables, see netlink(7).
	nftPort atomic.Uint32
	// legacy asks the next pass to look for what other releases left.
	legacy atomic.Bool

	mu     sync.Mutex // protects what follows
	nl     *netlink.Handle
	strict *netlink.Handle // for dumps that the kernel filters
	nft    *nftables.Conn
	// xtablesClean are those that have no rules of ours and are not to have any,
	// so that no program runs only to find none.
	xtablesClean map[iptables]bool
	wg           wgClient
	dialWG       func() (wgClient, error)
	now          func() time.Time
	// desired is what this process desired last, see diffDevice.
	desired desired
	// beforeWrite, if not nil, is told of each write, counted from 1; its error is the write's.
	beforeWrite func(n uint64) error
}

// New opens the sockets of a Host in the current network namespace. It changes
// nothing. The caller must Close it.
func New(cfg Config) (*Host, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.WireGuardMode == "" {
		cfg.WireGuardMode = WireGuardAuto
	}
	if cfg.CNIBridge == "" {
		cfg.CNIBridge = "kube-bridge"
	}
	h := &Host{
		cfg:    cfg,
		log:    cfg.Log,
		now:    time.Now, //nolint:forbidigo // handshakes are judged by the clock of the kernel that saw them
		dialWG: func() (wgClient, error) { return wgctrl.New() },
	}
	h.legacy.Store(true)
	var err error
	if h.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	if h.strict, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, errors.Join(fmt.Errorf("open rtnetlink: %w", err), h.Close())
	}
	// Before Linux 4.20 the kernel sends everything, and we filter alone.
	_ = h.strict.SetStrictCheck(true)
	for _, nl := range []*netlink.Handle{h.nl, h.strict} {
		// A dump of thousands of routes overruns the default buffer less often.
		_ = nl.SetSocketReceiveBufferSize(1<<20, true)
	}
	if h.wg, err = h.dialWG(); err != nil {
		return nil, errors.Join(fmt.Errorf("open WireGuard control: %w", err), h.Close())
	}
	return h, nil
}

// Close releases the sockets. It changes nothing else; the Host is of no use afterwards.
func (h *Host) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, nl := range []*netlink.Handle{h.nl, h.strict} {
		if nl != nil {
			nl.Close()
		}
	}
	h.closeNFT()
	if h.wg == nil {
		return nil
	}
	return h.wg.Close()
}

// Writes returns how many writes to the kernel were tried since New, failed
// ones included. A pass that changes nothing adds none.
func (h *Host) Writes() uint64 { return h.writes.Load() }

// countWrite comes before each write.
func (h *Host) countWrite() error {
	n := h.writes.Add(1)
	if h.beforeWrite == nil {
		return nil
	}
	return h.beforeWrite(n)
}

// Apply brings the kernel to the State s and returns what it changed. It may
// be called again at any time and then touches only what differs.
//
// One failure never stops the rest: the error joins all of them, and the
// Changes beside it are those that were made. What needs a link that does not
// exist is skipped, with one error about the link. A WireGuard link that s does
// not have loses its addresses, peers and key and is set down, but it is not
// deleted: see CleanUp.
//
// While Watch runs and tells of nothing, Apply does not read again what the last
// pass left, but for a short time only. So s must not be changed afterwards.
func (h *Host) Apply(ctx context.Context, s mesh.State) ([]Change, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.apply(ctx, s, false)
}

// CleanUp removes everything that Kilo has in the kernel, and undoes what the
// file of Config.UndoFile tells. The WireGuard link
// itself stays, empty and down, unless deleteLink is true and a Host made it.
func (h *Host) CleanUp(ctx context.Context, deleteLink bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, err := h.apply(ctx, mesh.State{}, deleteLink)
	return errors.Join(err, h.undo())
}

func (h *Host) apply(ctx context.Context, s mesh.State, deleteLink bool) ([]Change, error) {
	h.applied.Store(&s)
	p := &pass{h: h, ctx: ctx, want: s, deleteLink: deleteLink}
	if err := p.observeLinks(); err != nil {
		return nil, fmt.Errorf("ip link list: %w", err)
	}
	p.base = h.settled.begin(&s, h.now())
	p.makeLinks()
	p.emptyOthers()
	p.sysctls()
	p.forward()
	p.readAfterChanges()
	device := p.deviceGrow()
	if !p.wantsNoTable() {
		p.firewall()
	}
	p.addAddrs()
	p.setLinksUp()
	p.neighs()
	staleRoutes := p.addRoutes()
	staleRules := p.addRules()
	p.deleteRules(staleRules)
	p.deleteRoutes(staleRoutes)
	p.removeLegacy()
	if p.deleteAddrs() {
		p.base = nil
		// With an IPv4 address the kernel removes the routes that have it as source.
		p.deleteRoutes(p.addRoutes())
	}
	device.shrink()
	if p.setLinksDown() {
		// With a link that goes down the kernel removes its IPv6 addresses.
		p.addAddrs()
	}
	p.deleteLinks()
	if p.wantsNoTable() {
		p.firewall()
	}
	if err := ctx.Err(); err != nil {
		p.errs = append(p.errs, err)
	}
	if len(p.errs) == 0 {
		h.settled.state = &s
	}
	return p.changes, errors.Join(p.errs...)
}

// readAfterChanges drops the base of a pass that had something to do for the
// links: routes and addresses may have gone with them.
func (p *pass) readAfterChanges() {
	if len(p.changes)+len(p.errs) > 0 {
		p.base = nil
	}
}

// pass is one Apply under way.
type pass struct {
	h          *Host
	ctx        context.Context
	want       mesh.State
	deleteLink bool
	// base is what routes, firewall and device are like, nil if they must be read.
	base *mesh.State

	changes []Change
	errs    []error

	links   map[string]netlink.Link // by name
	names   map[int]string          // of links, by index
	missing map[string]bool         // links that were reported missing
	failed  map[Kind]bool           // what a Change was not made to
	foreign map[routeTable]map[routeKey]*ownRoute
}

// write makes one Change and reports whether it succeeded.
func (p *pass) write(c Change, f func() error, attrs ...any) bool {
	if p.ctx.Err() != nil {
		return false
	}
	err := p.h.countWrite()
	if err == nil {
		err = f()
	}
	if err != nil {
		p.fail(c, err)
		return false
	}
	p.did(c, attrs...)
	return true
}

// fail keeps the error of a Change that was not made.
func (p *pass) fail(c Change, err error) {
	p.errs = append(p.errs, fmt.Errorf("%s: %w", c, err))
	if p.failed == nil {
		p.failed = map[Kind]bool{}
	}
	p.failed[c.Kind] = true
}

// did keeps and logs a Change that was made.
func (p *pass) did(c Change, attrs ...any) {
	p.changes = append(p.changes, c)
	args := append([]any{"kind", string(c.Kind), "object", c.Text}, attrs...)
	switch c.Op {
	case OpAdd:
		p.h.log.InfoContext(p.ctx, "added", args...)
	case OpReplace:
		p.h.log.InfoContext(p.ctx, "replaced", args...)
	case OpDelete:
		p.h.log.InfoContext(p.ctx, "deleted", args...)
	}
}

// link returns the link of that name. It reports a missing one once.
func (p *pass) link(name string) (netlink.Link, bool) {
	if l, ok := p.links[name]; ok {
		return l, true
	}
	if !p.missing[name] {
		if p.missing == nil {
			p.missing = map[string]bool{}
		}
		p.missing[name] = true
		p.errs = append(p.errs, fmt.Errorf("ip link show %s: %w", name, errNoLink))
	}
	return nil, false
}

var errNoLink = errors.New("no such link")

// dump reads from the kernel again when what it read changed under its hands,
// which netlink(7) calls NLM_F_DUMP_INTR.
func dump[T any](read func() ([]T, error)) ([]T, error) {
	const tries = 10
	for i := 1; ; i++ {
		got, err := read()
		if err == nil || i == tries || !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, unix.ENOBUFS) {
			return got, err
		}
	}
}

// sortedKeys returns the keys of m in the order of compare.
func sortedKeys[K comparable, V any](m map[K]V, compare func(a, b K) int) []K {
	return slices.SortedFunc(maps.Keys(m), compare)
}
