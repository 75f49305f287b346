// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"strings"
	"testing"

	"github.com/kilomesh/kilo/lab"
	"github.com/kilomesh/kilo/lab/labtest"
)

// TestModes: everybody reaches everybody in each way to build a mesh, in both
// families.
func TestModes(t *testing.T) {
	for _, args := range [][]string{
		{"--mesh-granularity=full"},
		{"--mesh-granularity=cross", "--encapsulate=never"},
		{"--encapsulate=always", "--tunnel=vxlan"},
		{"--mesh-granularity=location", "--encapsulate=never"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			spec := lab.Demo(lab.Dual)
			spec.KgArgs = args
			for i := range spec.Hosts {
				// Where every node has tunnels, two behind different NATs would have
				// to punch holes, which the agent does not do yet.
				if h := &spec.Hosts[i]; h.Cloud == "b" {
					h.Public = true
				}
			}
			waitMatrix(t, labtest.Start(t, spec))
		})
	}
}
