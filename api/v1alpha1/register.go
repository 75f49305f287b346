// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The names of the Peer resource.
const (
	// Group is the API group, and the prefix of Kilo's annotations.
	Group = "kilo.squat.ai"
	// Version is the API version.
	Version = "v1alpha1"
	// PeerKind is the kind of a Peer.
	PeerKind = "Peer"
	// PeerResource is the plural name under which the API serves Peers.
	PeerResource = "peers"
	// PeerCRD is the name of the CustomResourceDefinition.
	PeerCRD = PeerResource + "." + Group
)

// GroupVersion returns the group and the version of this package.
func GroupVersion() schema.GroupVersion {
	return schema.GroupVersion{Group: Group, Version: Version}
}

// AddToScheme adds the types of this package to s.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion(), &Peer{}, &PeerList{})
	metav1.AddToGroupVersion(s, GroupVersion())
	return nil
}
