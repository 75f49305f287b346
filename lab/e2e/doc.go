// SPDX-License-Identifier: Apache-2.0

// Package e2e has the tests of whole meshes, run in labs. They need root and
// the binaries in bin/; see package labtest for what happens without.
package e2e
