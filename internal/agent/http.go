// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// index is the page at "/".
const index = `<!DOCTYPE html>
<html><head><title>Internal Kilo API</title></head><body><h1>Internal Kilo API</h1><ul>
<li><a href="/healthz">/healthz</a>: the process lives</li>
<li><a href="/readyz">/readyz</a>: the last pass was applied whole; problems of inputs</li>
<li><a href="/metrics">/metrics</a>: for Prometheus</li>
<li><a href="/state">/state</a>: what this node's kernel should hold</li>
</ul></body></html>
`

// Handler serves health, metrics and the desired state. It may be used before
// Run and never waits for the loop.
func (a *Agent) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		fmt.Fprint(w, index)
	})
	alive := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }
	mux.HandleFunc("GET /health", alive) // the existing Kilo's path
	mux.HandleFunc("GET /healthz", alive)
	mux.HandleFunc("GET /readyz", a.readyz)
	mux.HandleFunc("GET /state", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprint(w, a.status.Load().state)
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{}))
	return mux
}

// readyz fails while the last pass failed in part. Problems of inputs are
// listed, but do not make the node unready: it works around them.
func (a *Agent) readyz(w http.ResponseWriter, _ *http.Request) {
	s := a.status.Load()
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if s.err != nil {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintf(w, "not ready: %v\n", s.err)
	} else {
		fmt.Fprintln(w, "ready")
	}
	for _, p := range s.problems {
		fmt.Fprintf(w, "problem: %v\n", p)
	}
}
