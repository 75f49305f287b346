// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"
)

// TestWhoFallsSilent: what other clocks say does not count, nor does time in
// which nobody could be heard.
func TestWhoFallsSilent(t *testing.T) {
	const s = time.Second
	// A step is something that happens at a time.
	type step struct {
		at          time.Duration
		name, value string // news about a node
		gone        bool
		lost, found bool // what becomes of the API server
	}
	for _, tt := range []struct {
		name  string
		steps []step
		want  []string
	}{
		{name: "nobody, at first", steps: []step{{name: "a", value: "1"}}},
		{name: "one whose value stays", steps: []step{{name: "a", value: "1"}, {at: 61 * s, name: "b", value: "1"}}, want: []string{"a"}},
		{name: "not for one minute", steps: []step{{name: "a", value: "1"}, {at: 60 * s, name: "b", value: "1"}}},
		{name: "one with a clock of tomorrow", steps: []step{{name: "a", value: "99999999999"}, {at: 61 * s, name: "b"}}, want: []string{"a"}},
		{name: "not one with a clock of yesterday", steps: []step{{name: "a", value: "1"}, {at: 50 * s, name: "a", value: "2"}, {at: 100 * s, name: "b"}}},
		{name: "not one whose clock is set back", steps: []step{{name: "a", value: "9"}, {at: 50 * s, name: "a", value: "2"}, {at: 100 * s, name: "b"}}},
		{name: "news of one whose value stays change nothing", steps: []step{{name: "a", value: "1"}, {at: 40 * s, name: "a", value: "1"}, {at: 61 * s, name: "a", value: "1"}}, want: []string{"a"}},
		{name: "one that spoke again is back", steps: []step{{name: "a", value: "1"}, {at: 61 * s, name: "b"}, {at: 62 * s, name: "a", value: "2"}}},
		{name: "not one without a heartbeat", steps: []step{{name: "a"}, {at: time.Hour, name: "b"}}},
		{name: "not one that has no heartbeat any more", steps: []step{{name: "a", value: "1"}, {at: s, name: "a"}, {at: time.Hour, name: "b"}}},
		{name: "not one that is gone", steps: []step{{name: "a", value: "1"}, {at: s, name: "a", gone: true}, {at: time.Hour, name: "b"}}},
		{name: "nobody while no news come", steps: []step{{name: "a", value: "1"}, {at: s, name: "b", value: "1"}}},
		{name: "nobody after the API server was away", steps: []step{{name: "a", value: "1"}, {at: s, lost: true}, {at: time.Hour, found: true}, {at: time.Hour, name: "b"}}},
		{name: "whoever is silent after it is back", steps: []step{{name: "a", value: "1"}, {at: s, lost: true}, {at: time.Hour, found: true}, {at: time.Hour + 61*s, name: "b"}}, want: []string{"a"}},
		{name: "the API server that answers again and again gives no time", steps: []step{{name: "a", value: "1"}, {at: 50 * s, found: true}, {at: 61 * s, name: "b"}}, want: []string{"a"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHeartbeats()
			begin := time.Now()
			for _, step := range tt.steps {
				h.now = func() time.Time { return begin.Add(step.at) }
				switch {
				case step.lost:
					h.heard(errors.New("refused"))
				case step.found:
					h.heard(nil)
				case step.gone:
					h.forget(step.name)
				default:
					h.saw(step.name, step.value)
				}
			}
			if got := slices.Sorted(maps.Keys(h.silent())); !slices.Equal(got, tt.want) {
				t.Errorf("silent: %q, want %q", got, tt.want)
			}
		})
	}
}

// TestASnapshotSaysWhoIsSilent, and that only.
func TestASnapshotSaysWhoIsSilent(t *testing.T) {
	c, s, deliver := newPublisher(t, annotations{annotationLastSeen: "1"})
	deliver()
	c.beats.now = func() time.Time { return time.Now().Add(time.Hour) }
	if c.Snapshot().Nodes[0].Silent {
		t.Error("silent without news")
	}
	s.touch(nil)
	deliver()
	if !c.Snapshot().Nodes[0].Silent {
		t.Error("not silent after an hour")
	}
	one := annotationLastSeen
	s.touch(map[string]*string{one: &one})
	deliver()
	if c.Snapshot().Nodes[0].Silent {
		t.Error("silent after a heartbeat")
	}
}

// TestLeftHeartbeatIsRemoved: else the node would soon count as dead for good.
func TestLeftHeartbeatIsRemoved(t *testing.T) {
	c, s, deliver := newPublisher(t, annotations{annotationLastSeen: "1", annotationDiscoveredEndpoints: "{}"})
	deliver()
	publish(t, c, leaderPublication(t), true)
	for _, key := range []string{annotationLastSeen, annotationDiscoveredEndpoints} {
		if v, ok := s.node.Annotations[key]; ok {
			t.Errorf("annotation %s is still there: %q", key, v)
		}
	}
	deliver()
	publish(t, c, leaderPublication(t), false)
}

// TestHeartbeatIsWrittenForAsLongAsTheNodeIsPublished, and only if asked for.
func TestHeartbeatIsWrittenForAsLongAsTheNodeIsPublished(t *testing.T) {
	for _, asked := range []bool{false, true} {
		c, s, deliver := newPublisher(t, annotations{})
		c.options.Heartbeat = asked
		c.beats.now = func() time.Time { return time.Unix(1000, 0) }
		deliver()
		beat := func() string {
			t.Helper()
			if err := c.beatOnce(t.Context()); err != nil {
				t.Fatal(err)
			}
			return s.node.Annotations[annotationLastSeen]
		}
		if got := beat(); got != "" {
			t.Errorf("heartbeat %q of a node that is not published", got)
		}
		publish(t, c, leaderPublication(t), true)
		want := ""
		if asked {
			want = "1000"
		}
		if got := s.node.Annotations[annotationLastSeen]; got != want {
			t.Errorf("asked %t: published with heartbeat %q, want %q", asked, got, want)
		}
		if !asked {
			continue
		}
		c.beats.now = func() time.Time { return time.Unix(1030, 0) }
		if got := beat(); got != strconv.Itoa(1030) {
			t.Errorf("heartbeat %q, want 1030", got)
		}
		deliver()
		publish(t, c, leaderPublication(t), false)
		if err := c.Withdraw(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := beat(); got != "" {
			t.Errorf("heartbeat %q after the node was withdrawn", got)
		}
	}
}
