// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is Kilo's public API: the Peer resource of the group
// kilo.squat.ai, as the API server stores it.
//
// It holds text and numbers as users wrote them. What they mean, and which of
// them are good, says internal/kube.ParsePeer, the one parser of a Peer.
//
// zz_generated.deepcopy.go and manifests/crds.yaml are generated from these
// types. The schema accepts and refuses the same objects as the one that runs
// in clusters already; only additions are possible under this version's name.
//
// +kubebuilder:object:generate=true
// +groupName=kilo.squat.ai
package v1alpha1
