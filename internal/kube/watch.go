// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/kilomesh/kilo/api/v1alpha1"
	"github.com/kilomesh/kilo/internal/mesh"
)

// observed tells seen the outcome of each request of lw, nil for success.
func observed(lw *cache.ListWatch, seen func(ctx context.Context, err error)) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := lw.ListWithContext(ctx, o)
			seen(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := lw.WatchWithContext(ctx, o)
			seen(ctx, err)
			return w, err
		},
		DisableChunking: lw.DisableChunking,
	}
}

// reachability logs when the requests for a resource begin to fail, and when
// they work again.
type reachability struct {
	log      *slog.Logger
	resource string

	mu       sync.Mutex
	failures int
}

func (r *reachability) report(ctx context.Context, err error) {
	if ctx.Err() != nil || partOfProtocol(err) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil:
		if r.failures == 0 {
			r.log.Error("watch failed, retrying", "resource", r.resource, "err", err)
		}
		r.failures++
	case r.failures > 0:
		r.log.Info("watch works again", "resource", r.resource, "failures", r.failures)
		r.failures = 0
	}
}

// partOfProtocol reports whether err is how an API server says that a watch
// must begin anew, or that it does not know streaming lists.
func partOfProtocol(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsInvalid(err)
}

// warnings logs what an API server adds to an answer about the objects that a
// request concerns. Nobody here wrote what it complains about.
type warnings struct{ log *slog.Logger }

// HandleWarningHeaderWithContext implements rest.WarningHandlerWithContext.
func (w warnings) HandleWarningHeaderWithContext(ctx context.Context, _ int, _, text string) {
	w.log.DebugContext(ctx, "warning of the API server", "text", text)
}

// crdWatch knows whether the CustomResourceDefinition of Peers is missing.
type crdWatch struct {
	client rest.Interface
	log    *slog.Logger
	poke   func()
	absent atomic.Bool
}

func (w *crdWatch) missing() bool { return w.absent.Load() }

// report learns from the outcome of a request for Peers, and reports whether a
// missing CustomResourceDefinition explains it.
//
// Peers that cannot be found are no proof: a proxy answers so, and an API
// server that has not yet heard of a new definition. Without Peers the mesh
// would drop them all, so the definition itself must be gone.
func (w *crdWatch) report(ctx context.Context, err error) bool {
	absent := apierrors.IsNotFound(err)
	switch {
	case absent:
		if !w.lookUp(ctx) {
			return false
		}
	case err != nil:
		return false
	}
	if w.absent.Swap(absent) != absent {
		if absent {
			w.log.Warn("no peers until their definition exists", "crd", v1alpha1.PeerCRD)
		} else {
			w.log.Info("definition of peers found", "crd", v1alpha1.PeerCRD)
		}
		w.poke()
	}
	return absent
}

// lookUp reports whether the API server itself says that the definition is not there.
func (w *crdWatch) lookUp(ctx context.Context) (absent bool) {
	err := w.client.Get().AbsPath("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", v1alpha1.PeerCRD).Do(ctx).Error()
	var status apierrors.APIStatus
	if !apierrors.IsNotFound(err) || !errors.As(err, &status) {
		if err != nil {
			w.log.Debug("definition of peers not readable", "crd", v1alpha1.PeerCRD, "err", err)
		}
		return false
	}
	// Made up by the client from a bare 404, the status would name nothing.
	details := status.Status().Details
	return details != nil && details.Name == v1alpha1.PeerCRD
}

func crdProblem() mesh.Problem {
	return mesh.Problem{
		Object: "customresourcedefinition/" + v1alpha1.PeerCRD,
		Err:    errors.New("not found, so there are no peers: apply Kilo's crds.yaml"),
	}
}
