// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/kilomesh/kilo/internal/mesh"
)

// metrics keeps the existing Kilo's names where it has one.
type metrics struct {
	registry   *prometheus.Registry
	errors     *prometheus.CounterVec
	leader     prometheus.Gauge
	nodes      prometheus.Gauge
	peers      prometheus.Gauge
	reconciles prometheus.Counter
	duration   prometheus.Histogram
	problems   prometheus.Gauge
	success    prometheus.Gauge
}

// eventApply is what kilo_errors_total counts passes that failed in part under.
const eventApply = "apply"

func newMetrics(kernel Kernel) *metrics {
	m := &metrics{
		registry:   prometheus.NewRegistry(),
		errors:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kilo_errors_total", Help: "Failures by event."}, []string{"event"}),
		leader:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "kilo_leader", Help: "Whether this node leads its location."}),
		nodes:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "kilo_nodes", Help: "Nodes in the mesh."}),
		peers:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "kilo_peers", Help: "Peers in the mesh."}),
		reconciles: prometheus.NewCounter(prometheus.CounterOpts{Name: "kilo_reconciles_total", Help: "Passes of the loop."}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kilo_reconcile_duration_seconds", Help: "How long a pass of the loop took.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}),
		problems: prometheus.NewGauge(prometheus.GaugeOpts{Name: "kilo_problems", Help: "Inputs that the mesh has to work around, see the log."}),
		success:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "kilo_last_success_timestamp_seconds", Help: "When a pass last succeeded, in Unix time."}),
	}
	// There at 0 from the start, so that the first failure shows as an increase.
	m.errors.WithLabelValues(eventApply)
	m.registry.MustRegister(m.errors, m.leader, m.nodes, m.peers, m.reconciles, m.duration, m.problems, m.success,
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kilo_kernel_writes_total", Help: "Writes to the kernel."},
			func() float64 { return float64(kernel.Writes()) }),
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) mesh(t *mesh.Topology, self string) {
	m.nodes.Set(float64(t.NodeCount()))
	m.peers.Set(float64(len(t.Peers)))
	m.leader.Set(0)
	if t.Leads(self) {
		m.leader.Set(1)
	}
}

func (m *metrics) pass(took time.Duration, s *status) {
	m.reconciles.Inc()
	m.duration.Observe(took.Seconds())
	m.problems.Set(float64(len(s.problems)))
	if s.err != nil {
		m.errors.WithLabelValues(eventApply).Inc()
	} else {
		m.success.SetToCurrentTime()
	}
}
