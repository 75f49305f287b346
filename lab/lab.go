// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
)

// Options are what does not belong to the mesh itself.
type Options struct {
	// Bin is the directory of the binaries, "" to look for it; see FindBin.
	Bin string
	// CRDs is the YAML file of the CustomResourceDefinitions, "" for manifests/crds.yaml beside Bin.
	CRDs string
	// ID of the lab, the beginning of its namespaces' names; "" for a fresh one.
	ID string
	// Detached labs go on when the process that started them ends.
	Detached bool
	// KeepFailed leaves a detached lab as it is when it fails to come up.
	KeepFailed bool
	// FailureLogs is where logs go if the lab fails to come up, "" for nowhere.
	FailureLogs string
	// Progress gets a line for each step, with the seconds since the start; nil for none.
	Progress io.Writer
}

// Lab is a running lab. Its methods may be called from several goroutines.
type Lab struct {
	// ID is the beginning of the names of the lab's network namespaces.
	ID string
	// Dir has everything that the lab wrote, with all logs.
	Dir string
	// Kube and Dynamic are the administrator's clients.
	Kube    kubernetes.Interface
	Dynamic dynamic.Interface
	// ControlPlane is nil in a lab from Open.
	ControlPlane *ControlPlane

	options Options
	start   time.Time
	lock    *os.File

	mu    sync.Mutex
	spec  Spec
	plan  *plan
	hosts []*Host
}

// Start builds and starts everything that spec describes, and waits until every
// agent is ready and every pod is attached. After an error nothing is left.
func Start(ctx context.Context, spec Spec, o Options) (*Lab, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	p, err := newPlan(spec)
	if err != nil {
		return nil, err
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	l := &Lab{options: o, start: time.Now(), spec: spec, plan: p}
	if err := l.claim(); err != nil {
		return nil, err
	}
	if err := l.bringUp(ctx); err != nil {
		err = fmt.Errorf("lab %s: %w", l.ID, err)
		if o.Detached && o.KeepFailed && ctx.Err() == nil {
			return nil, errors.Join(fmt.Errorf("%w; it is left as it is, \"lab down %s\" ends it", err, l.ID), l.Detach())
		}
		if o.FailureLogs != "" {
			err = errors.Join(err, l.SaveLogs(o.FailureLogs))
		}
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

func (l *Lab) bringUp(ctx context.Context) error {
	if err := l.buildInternet(); err != nil {
		return err
	}
	if err := l.startControl(); err != nil {
		return err
	}
	var g errgroup.Group // beside the API server, which takes longest
	g.Go(func() error { return l.buildHosts(l.spec.Hosts) })
	g.Go(func() error {
		if err := l.ControlPlane.Ready(ctx, l.options.CRDs); err != nil {
			return err
		}
		l.Progress("API server ready")
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	if err := l.each(l.hosts, func(h *Host) error { return h.join(ctx) }); err != nil {
		return err
	}
	l.Progress("%d agents ready, pods attached", len(l.hosts))
	return l.save(l.options.Detached)
}

func (l *Lab) startControl() (err error) {
	if err := l.buildMachine(ControlPlaneName, "", hostPlan{Public: l.plan.Control}); err != nil {
		return err
	}
	l.ControlPlane, err = startControlPlane(controlPlaneConfig{
		bin: l.options.Bin, dir: filepath.Join(l.Dir, ControlPlaneName), netns: l.netnsPath(ControlPlaneName),
		stack: l.spec.Stack, address: l.plan.Control[0].Addr(), detached: l.options.Detached,
	})
	if err != nil {
		return err
	}
	l.Progress("etcd and kube-apiserver started")
	l.Kube, l.Dynamic, err = l.ControlPlane.Clients()
	return err
}

// buildHosts makes the clouds and hosts up to the point where they need the API server.
func (l *Lab) buildHosts(specs []HostSpec) error {
	for _, c := range l.spec.Clouds {
		if c.Network {
			if err := l.buildCloud(c); err != nil {
				return fmt.Errorf("cloud %q: %w", c.Name, err)
			}
		}
	}
	for _, s := range specs {
		h, err := l.newHost(s)
		if err != nil {
			return err
		}
		if err := h.startWireGuard(); err != nil {
			return err
		}
	}
	l.Progress("%d clouds, %d hosts", len(l.spec.Clouds), len(specs))
	return nil
}

// AddHost builds a further host, lets it join and waits until it has.
func (l *Lab) AddHost(ctx context.Context, s HostSpec) (*Host, error) {
	l.mu.Lock()
	spec := l.spec
	spec.Hosts = append(slices.Clone(spec.Hosts), s)
	if err := spec.Validate(); err != nil {
		l.mu.Unlock()
		return nil, err
	}
	if err := l.plan.add(s); err != nil {
		l.mu.Unlock()
		return nil, err
	}
	l.spec = spec
	l.mu.Unlock()
	h, err := l.newHost(s)
	if err != nil {
		return nil, err
	}
	if err := h.startWireGuard(); err != nil {
		return nil, err
	}
	if err := h.join(ctx); err != nil {
		return nil, err
	}
	return h, l.save(false)
}

// Host returns the host of that name, which must be there.
func (l *Lab) Host(name string) *Host {
	h, err := l.FindHost(name)
	if err != nil {
		panic(err)
	}
	return h
}

// FindHost returns the host of that name.
func (l *Lab) FindHost(name string) (*Host, error) {
	var names []string
	for _, h := range l.Hosts() {
		if h.Name() == name {
			return h, nil
		}
		names = append(names, h.Name())
	}
	return nil, fmt.Errorf("no host %q in lab %s: want one of %v", name, l.ID, names)
}

// Hosts returns the hosts in the order in which they came.
func (l *Lab) Hosts() []*Host {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.hosts)
}

// Pods returns all pods, by host.
func (l *Lab) Pods() []*Pod {
	var out []*Pod
	for _, h := range l.Hosts() {
		out = append(out, h.Pods()...)
	}
	return out
}

// Spec returns what the lab was made from, with the hosts that were added.
func (l *Lab) Spec() Spec {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.spec
}

// Close ends every process in the lab's namespaces and deletes all of it.
func (l *Lab) Close() error {
	for _, h := range l.Hosts() {
		h.stopThread()
	}
	err := sweep(l.ID)
	if l.ControlPlane != nil {
		err = errors.Join(err, l.ControlPlane.Stop())
	}
	if l.lock != nil {
		err = errors.Join(err, l.lock.Close())
	}
	return err
}

// Detach lets go of a detached lab: it goes on without this process.
func (l *Lab) Detach() error {
	if !l.options.Detached {
		return fmt.Errorf("lab %s is not detached", l.ID)
	}
	if err := l.save(true); err != nil {
		return err
	}
	return l.lock.Close()
}

// each runs f for all hosts at once.
func (l *Lab) each(hosts []*Host, f func(*Host) error) error {
	errs := make([]error, len(hosts))
	var wg sync.WaitGroup
	for i, h := range hosts {
		wg.Go(func() { errs[i] = f(h) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (l *Lab) netns(name string) string     { return l.ID + "-" + name }
func (l *Lab) netnsPath(name string) string { return filepath.Join(netnsDir, l.netns(name)) }

// Progress prints a line with the seconds since the start.
func (l *Lab) Progress(format string, args ...any) {
	if l.options.Progress != nil {
		fmt.Fprintf(l.options.Progress, "%5.1f s  %s\n", time.Since(l.start).Seconds(), fmt.Sprintf(format, args...))
	}
}
