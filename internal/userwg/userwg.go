// SPDX-License-Identifier: Apache-2.0

//go:build linux

package userwg

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

// Alias is the link alias of a TUN device that Run made.
const Alias = "kilo-userspace"

// socketDir is where wg(8) and wgctrl look for control sockets.
const socketDir = "/var/run/wireguard"

// checkEvery is how soon a control socket that somebody deleted is back.
const checkEvery = 5 * time.Second

var (
	errDied  = errors.New("the device stopped")
	errInUse = errors.New("another process serves it")
)

// Config of Run.
type Config struct {
	// Interface is the name of the link.
	Interface string
	// MTU of the link at first, 1420 if 0. It may be changed through netlink later.
	MTU int
	// Log gets the messages of the device. Nil discards them.
	Log *slog.Logger
}

// Run makes a TUN device with WireGuard behind it, down and without peers, and
// serves its control socket until ctx is done, then removes both and returns
// nil. It returns an error if it cannot start, or if the device stops by
// itself, for example because somebody deleted the link.
//
// A socket file that a killed process left is replaced, one that is being
// served is an error.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.MTU == 0 {
		cfg.MTU = device.DefaultMTU
	}
	log := cfg.Log.With("interface", cfg.Interface)
	path := filepath.Join(socketDir, cfg.Interface+".sock")
	link, err := tun.CreateTUN(cfg.Interface, cfg.MTU)
	if err != nil {
		return fmt.Errorf("create TUN link %s: %w", cfg.Interface, explain(err))
	}
	dev := device.NewDevice(link, conn.NewDefaultBind(), logger(log))
	defer dev.Close()
	if err := setAlias(cfg.Interface); err != nil {
		return fmt.Errorf("ip link set %s alias %s: %w", cfg.Interface, Alias, err)
	}
	uapi, err := serve(path, dev)
	if err != nil {
		return fmt.Errorf("control socket %s: %w", path, err)
	}
	log.InfoContext(ctx, "userspace wireguard started", "socket", path, "mtu", cfg.MTU)

	check := time.NewTicker(checkEvery)
	defer check.Stop()
	for {
		select {
		case <-ctx.Done():
			log.InfoContext(ctx, "userspace wireguard stopped")
			return uapi.close()
		case <-dev.Wait():
			return errors.Join(fmt.Errorf("link %s: %w", cfg.Interface, errDied), uapi.close())
		case <-check.C:
			// Without its socket nobody could configure the device any more, but a restart would cut traffic.
			if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
				_ = uapi.close() // the file is gone, and that was all of it
				if uapi, err = serve(path, dev); err != nil {
					return fmt.Errorf("control socket %s: %w", path, err)
				}
				log.WarnContext(ctx, "control socket was deleted and is back", "socket", path)
			}
		}
	}
}

// listen opens the control socket, which only root may use.
func listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	if c, err := net.Dial("unix", path); err == nil {
		_ = c.Close()
		return nil, errInUse
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// server answers configuration requests on a control socket.
type server struct {
	listener net.Listener
	running  sync.WaitGroup
	mu       sync.Mutex
	conns    map[net.Conn]bool // nil once closed
}

// serve starts a server, which runs until it is closed.
func serve(path string, dev *device.Device) (*server, error) {
	l, err := listen(path)
	if err != nil {
		return nil, err
	}
	s := &server{listener: l, conns: map[net.Conn]bool{}}
	s.running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if !s.keep(c) {
				return
			}
			s.running.Go(func() {
				dev.IpcHandle(c) // closes it, too
				s.mu.Lock()
				defer s.mu.Unlock()
				delete(s.conns, c)
			})
		}
	})
	return s, nil
}

// keep remembers an open connection; if the server is closed it closes it and returns false.
func (s *server) keep(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns == nil {
		_ = c.Close() // nobody will ask on it
		return false
	}
	s.conns[c] = true
	return true
}

// close ends the server, hangs up on everybody and waits for the end of it.
func (s *server) close() error {
	err := s.listener.Close()
	s.mu.Lock()
	for c := range s.conns {
		_ = c.Close() // whoever is on it reads the end of the file
	}
	s.conns = nil
	s.mu.Unlock()
	s.running.Wait()
	return err
}

// setAlias marks the link, so that people and programs see whose it is.
func setAlias(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetAlias(l, Alias)
}

func explain(err error) error {
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%w: %w", errInUse, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("there is a link of that name that is no TUN: %w", err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("want CAP_NET_ADMIN: %w", err)
	default:
		return err
	}
}

// logger hands the messages of the device on. They are formatted texts, and hold no keys but public ones.
func logger(log *slog.Logger) *device.Logger {
	return &device.Logger{
		Verbosef: func(format string, args ...any) {
			if log.Enabled(context.Background(), slog.LevelDebug) {
				log.Debug("device", "text", fmt.Sprintf(format, args...))
			}
		},
		Errorf: func(format string, args ...any) { log.Error("device", "text", fmt.Sprintf(format, args...)) },
	}
}
