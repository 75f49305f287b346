// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// labsDir has a directory for each lab.
const labsDir = "/run/kilolab"

// state is what other processes need to know of a lab.
type state struct {
	ID   string `json:"id"`
	Spec Spec   `json:"spec"`
	Plan *plan  `json:"plan"`
	Bin  string `json:"bin"`
	// Detached labs have no owner; others are stale when nobody holds their lock.
	Detached bool        `json:"detached"`
	Hosts    []hostState `json:"hosts"`
}

type hostState struct {
	Spec         HostSpec   `json:"spec"`
	AgentPID     int        `json:"agentPID"`
	WireGuardPID int        `json:"wireGuardPID"`
	Pods         []podState `json:"pods"`
}

// claim makes the lab's directory and locks it, after sweeping stale labs away.
func (l *Lab) claim() error {
	unlock, err := lockLabs()
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := sweepStale(); err != nil {
		return err
	}
	if l.ID = l.options.ID; l.ID == "" {
		b := make([]byte, 2)
		_, _ = rand.Read(b) // never fails
		l.ID = "kl" + hex.EncodeToString(b)
	}
	if !nameRE.MatchString(l.ID) || strings.Contains(l.ID, "-") {
		return fmt.Errorf("lab %q: want an ID of 1 to 12 lower-case letters and digits", l.ID)
	}
	l.Dir = filepath.Join(labsDir, l.ID)
	if err := os.Mkdir(l.Dir, 0o755); err != nil {
		return fmt.Errorf("lab %s is there already: %w; \"lab down %s\" ends it", l.ID, err, l.ID)
	}
	l.lock, err = tryLock(filepath.Join(l.Dir, "lock"))
	return err
}

// lockLabs keeps other processes from making and sweeping labs.
func lockLabs() (unlock func(), err error) {
	for {
		if err := os.MkdirAll(labsDir, 0o755); err != nil {
			return nil, err
		}
		f, err := os.OpenFile(labsDir, os.O_RDONLY, 0)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", labsDir, err), f.Close())
		}
		// Whoever had the lock before may have removed the directory.
		now, errNow := os.Stat(labsDir)
		mine, errMine := f.Stat()
		if errNow == nil && errMine == nil && os.SameFile(now, mine) {
			return func() { discard(f) }, nil
		}
		discard(f)
	}
}

// tryLock returns an error if another process has the lock, which ends with its holder.
func tryLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// save writes the state file.
func (l *Lab) save(detached bool) error {
	l.mu.Lock()
	s := state{ID: l.ID, Spec: l.spec, Plan: l.plan, Bin: l.options.Bin, Detached: detached}
	hosts := slices.Clone(l.hosts)
	l.mu.Unlock()
	for _, h := range hosts {
		s.Hosts = append(s.Hosts, h.state())
	}
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(l.Dir, "state.json")
	if err := os.WriteFile(path+".new", b, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Open returns a running lab that another process started; "" is the only one
// there is. It can be looked at, entered and closed. Its programs cannot be
// stopped and started, for they are another process's children.
func Open(id string) (*Lab, error) {
	if id == "" {
		ids, err := IDs()
		if err != nil {
			return nil, err
		}
		if len(ids) != 1 {
			return nil, fmt.Errorf("%d labs are running %v: want exactly one, or its ID", len(ids), ids)
		}
		id = ids[0]
	}
	l := &Lab{ID: id, Dir: filepath.Join(labsDir, id), start: time.Now()}
	b, err := os.ReadFile(filepath.Join(l.Dir, "state.json"))
	if err != nil {
		return nil, fmt.Errorf("lab %s is not running: %w", id, err)
	}
	var s state
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("lab %s: %s/state.json: %w", id, l.Dir, err)
	}
	l.spec, l.plan, l.options.Bin = s.Spec, s.Plan, s.Bin
	for _, hs := range s.Hosts {
		h := &Host{lab: l, spec: hs.Spec, plan: s.Plan.Hosts[hs.Spec.Name], agentPID: hs.AgentPID, wireGuardPID: hs.WireGuardPID}
		for _, ps := range hs.Pods {
			h.pods = append(h.pods, &Pod{host: h, podState: ps})
		}
		l.hosts = append(l.hosts, h)
	}
	cp := &ControlPlane{
		Kubeconfig: filepath.Join(l.Dir, ControlPlaneName, "admin.conf"),
		netns:      l.netnsPath(ControlPlaneName),
	}
	l.Kube, l.Dynamic, err = cp.Clients()
	return l, err
}

// IDs lists the labs that are there, running or left over.
func IDs() ([]string, error) {
	entries, err := os.ReadDir(labsDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		if e.IsDir() {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// SweepStale ends what is left of labs whose owner died, and returns their IDs.
func SweepStale() ([]string, error) {
	unlock, err := lockLabs()
	if err != nil {
		return nil, err
	}
	defer unlock()
	return sweepStale()
}

func sweepStale() ([]string, error) {
	ids, err := IDs()
	if err != nil {
		return nil, err
	}
	var swept []string
	var errs []error
	for _, id := range ids {
		var s state
		if b, err := os.ReadFile(filepath.Join(labsDir, id, "state.json")); err == nil && json.Unmarshal(b, &s) == nil && s.Detached {
			continue
		}
		lock, err := tryLock(filepath.Join(labsDir, id, "lock"))
		if err != nil {
			continue // its owner lives
		}
		errs = append(errs, sweep(id), lock.Close())
		swept = append(swept, id)
	}
	return swept, errors.Join(errs...)
}

// Down ends a lab, whoever started it, in whatever state it is.
func Down(id string) error {
	if _, err := os.Stat(filepath.Join(labsDir, id)); err != nil || id == "" {
		return fmt.Errorf("no lab %q: want one of those that \"lab list\" shows", id)
	}
	unlock, err := lockLabs()
	if err != nil {
		return err
	}
	defer unlock()
	return sweep(id)
}

// sweep kills every process in the namespaces of lab id and deletes these and
// the lab's directory, whatever state they are in.
func sweep(id string) error {
	paths, err := filepath.Glob(filepath.Join(netnsDir, id+"-*"))
	if err != nil {
		return err
	}
	inodes := map[uint64]bool{}
	for _, p := range paths {
		if ino, err := netnsInode(p); err == nil {
			inodes[ino] = true
		}
	}
	errs := []error{killAll(inodes)}
	for _, p := range paths {
		errs = append(errs, deleteNetns(filepath.Base(p)))
	}
	errs = append(errs, os.RemoveAll(filepath.Join(labsDir, id)))
	// Gone with the last lab; not empty while there are others.
	_ = os.Remove(labsDir)
	return errors.Join(errs...)
}

// killAll kills the processes in these network namespaces until there are none.
func killAll(inodes map[uint64]bool) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		pids, err := processesIn(inodes)
		if err != nil || len(pids) == 0 {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("processes %v did not die within 10s", pids)
		}
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have just ended
		}
	}
}

// processesIn lists the processes in these network namespaces, without this
// one and without zombies, which have no namespaces any more.
func processesIn(inodes map[uint64]bool) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if ino, err := netnsInode(filepath.Join("/proc", e.Name(), "ns/net")); err == nil && inodes[ino] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
