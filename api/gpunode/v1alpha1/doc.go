// SPDX-License-Identifier: Apache-2.0

// Package v1alpha1 is the API group tandem-gpu.dev/v1alpha1 with its kind GPUNode.
//
// +kubebuilder:object:generate=true
// +groupName=tandem-gpu.dev
package v1alpha1

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

//go:generate env GOWORK=off go tool -modfile=../../../hack/tools/go.mod controller-gen object crd paths=. output:crd:dir=../../../deployments/helm/tandem/files

var (
	// GroupVersion of everything in this package.
	GroupVersion = schema.GroupVersion{Group: "tandem-gpu.dev", Version: "v1alpha1"}
	// Resource is the plural name under which the API server serves GPUNodes.
	Resource = GroupVersion.WithResource("gpunodes")

	// SchemeBuilder registers the types of this package.
	SchemeBuilder = runtime.NewSchemeBuilder(func(s *runtime.Scheme) error {
		s.AddKnownTypes(GroupVersion, &GPUNode{}, &GPUNodeList{})
		metav1.AddToGroupVersion(s, GroupVersion)
		return nil
	})
	// AddToScheme registers the types of this package with a scheme.
	AddToScheme = SchemeBuilder.AddToScheme
)
