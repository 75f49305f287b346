// SPDX-License-Identifier: Apache-2.0

package walk

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var (
	cases     = flag.Int("walk.cases", 3000, "how many random meshes to prove")
	firstSeed = flag.Uint64("walk.seed", 1, "the first seed")
	keepGoing = flag.Bool("walk.all", false, "do not stop at the first failure, count them by kind")
)

func seeded(seed uint64) source { return rand.New(rand.NewPCG(seed, 0x6b696c6f)) } //nolint:gosec // to be repeated

// tally counts failures by kind. The first of each kind is reported whole.
type tally struct {
	sync.Mutex
	kinds map[string]int
}

func (k *tally) add(t *testing.T, report string) {
	k.Lock()
	defer k.Unlock()
	kind := kindOf(report)
	if k.kinds[kind]++; k.kinds[kind] == 1 {
		t.Errorf("%s", report)
	}
}

// TestRandomMeshes walks every pair that should talk in many random meshes, each
// of its own seed: go test ./internal/walk -run RandomMeshes -walk.cases 1000000.
// A failure names the seed: -walk.cases 1 -walk.seed SEED shows it again.
func TestRandomMeshes(t *testing.T) {
	var next, done, pairs atomic.Uint64
	var failed atomic.Bool
	k := tally{kinds: map[string]int{}}
	start := time.Now()
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for !failed.Load() {
				i := next.Add(1) - 1
				if i >= uint64(*cases) {
					return
				}
				n, report := proveSeed(*firstSeed + i)
				pairs.Add(uint64(n))
				if report != "" {
					k.add(t, report)
					failed.Store(!*keepGoing)
				}
				if d := done.Add(1); d%50000 == 0 {
					fmt.Printf("walk: %d of %d meshes, %d pairs, %v\n", d, *cases, pairs.Load(), time.Since(start).Round(time.Second))
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d meshes, %d pairs in %v", done.Load(), pairs.Load(), time.Since(start).Round(time.Millisecond))
	for kind, n := range k.kinds {
		t.Logf("%d × %s", n, kind)
	}
}

// kindOf keeps what failures of one kind have in common: granularity and cause.
func kindOf(report string) string {
	lines := strings.SplitN(report, "\n", 4)
	cause := lines[2]
	if _, c, ok := strings.Cut(cause, "died at "); ok {
		_, c, _ = strings.Cut(c, ": ")
		cause, _, _ = strings.Cut(c, " [")
	}
	return strings.Fields(lines[1] + " ? ?")[1] + ": " + cause
}

// proveSeed returns how many pairs were walked, and what failed, "" if nothing did.
func proveSeed(seed uint64) (int, string) {
	s := generate(seeded(seed))
	c, err := s.compute()
	if err != nil {
		return 0, fmt.Sprintf("seed %d\n\n%v\n%v", seed, err, s)
	}
	n, failures, err := c.prove()
	if err != nil {
		return 0, fmt.Sprintf("seed %d\n\n%v\n%v", seed, err, s)
	}
	if len(failures) == 0 {
		return n, ""
	}
	mode, rest, _ := strings.Cut(s.String(), "\n")
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d\n%s\n%v\n%s\n%v\n", seed, mode, failures[0], rest, c.problems)
	for _, h := range c.hosts {
		fmt.Fprintf(&b, "--- %s (location %s, gate %s)\n%s", h.Name, h.Location, h.Gate, h.State)
	}
	return n, b.String()
}
