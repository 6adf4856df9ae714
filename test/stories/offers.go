// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/install"
)

// OfferedToPods wants so many GPUs allocatable on the node.
func (s *Story) OfferedToPods(want int64) error { return s.Allocatable(install.ResourceName, want) }

// OfferedToClaims wants so many claimable devices, or any number if that is negative.
func (s *Story) OfferedToClaims(want int) error {
	offered, err := s.Claimable()
	if err == nil && want >= 0 && offered != want {
		err = fmt.Errorf("slices offer %d devices, not %d", offered, want)
	}
	return err
}

// Slices are the ResourceSlices of a node.
func (s *Story) Slices(nodeName string) ([]resourceapi.ResourceSlice, error) {
	list, err := s.Client.ResourceV1().ResourceSlices().List(s.Ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// untainted are the devices that the slices of the node offer to claims.
func (s *Story) untainted() (devices []resourceapi.Device, err error) {
	all, err := s.Slices(GPUNode)
	for _, slice := range all {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) == 0 {
				devices = append(devices, d)
			}
		}
	}
	return devices, err
}

// Claimable counts the devices of the node's slices without a taint.
func (s *Story) Claimable() (offered int, err error) {
	devices, err := s.untainted()
	return len(devices), err
}

// Allocatable wants so much of a resource on the node.
func (s *Story) Allocatable(resource string, want int64) error {
	n, err := s.Client.CoreV1().Nodes().Get(s.Ctx, GPUNode, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if got := n.Status.Allocatable[corev1.ResourceName(resource)]; got.Value() != want {
		return fmt.Errorf("allocatable %s is %s, not %d", resource, got.String(), want)
	}
	return nil
}

// Published waits until the slices offer seven GPUs and partitions of these profiles.
func (s *Story) Published(profiles ...string) {
	s.Helper()
	began := time.Now()
	s.Await(Soon, fmt.Sprintf("partitions %v to be published", profiles), func() error {
		devices, err := s.untainted()
		if err != nil {
			return err
		}
		var found []string
		for _, d := range devices {
			if profile := d.Attributes["profile"].StringValue; profile != nil {
				found = append(found, *profile)
			}
		}
		slices.Sort(found)
		if !slices.Equal(found, profiles) {
			return fmt.Errorf("%v are", found)
		}
		return s.OfferedToClaims(GPUsANode - 1 + len(profiles))
	})
	s.Logf("%v published %.1f s after the administrator was done", profiles, time.Since(began).Seconds())
}

// Withdrawn reports whether exactly these GPUs of the node are not offered to claims.
func (s *Story) Withdrawn(gpus ...int) error {
	want := map[string]bool{}
	for gpu := range GPUsANode {
		if !slices.Contains(gpus, gpu) {
			want[GPUName(gpu)] = true
		}
	}
	devices, err := s.untainted()
	if err != nil {
		return err
	}
	offered := map[string]bool{}
	for _, d := range devices {
		offered[d.Name] = true
	}
	if !maps.Equal(offered, want) {
		return fmt.Errorf("claims are offered %v, not %v", slices.Sorted(maps.Keys(offered)), slices.Sorted(maps.Keys(want)))
	}
	return nil
}

// SliceOf is one slice of a node.
func (s *Story) SliceOf(nodeName string) *resourceapi.ResourceSlice {
	s.Helper()
	all, err := s.Slices(nodeName)
	if err != nil {
		s.Fatal(err)
	}
	if len(all) == 0 {
		s.Fatalf("no slice of %s", nodeName)
	}
	return &all[0]
}

// CountersKept reports whether the API server keeps the counters of partitionable devices, as it does by default from 1.36 on.
func (s *Story) CountersKept() bool {
	s.Helper()
	return s.ExtendedResources()
}

// ExtendedResources reports whether the API server keeps a class's extended resource, as it does by default from 1.36 on.
func (s *Story) ExtendedResources() bool {
	s.Helper()
	version, err := s.Client.Discovery().ServerVersion()
	if err != nil {
		s.Fatal(err)
	}
	return version.Minor >= "36"
}

// GPUNodeObject is the node's current GPUNode.
func (s *Story) GPUNodeObject() (gpunode.GPUNode, error) { return s.GPUNodeOf(GPUNode) }

// GPUNodeOf is the current GPUNode of a node.
func (s *Story) GPUNodeOf(node string) (gpunode.GPUNode, error) {
	var object gpunode.GPUNode
	text, err := s.Client.Discovery().RESTClient().Get().
		AbsPath("/apis", gpunode.GroupVersion.Group, gpunode.GroupVersion.Version, gpunode.Resource.Resource, node).DoRaw(s.Ctx)
	if err == nil {
		err = json.Unmarshal(text, &object)
	}
	return object, err
}

// Shows waits until the node's GPUNode satisfies the condition, and returns it.
func (s *Story) Shows(what string, condition func(gpunode.GPUNode) bool) (shown gpunode.GPUNode) {
	s.Helper()
	s.Await(Soon, "GPUNode to show "+what, func() (err error) {
		if shown, err = s.GPUNodeObject(); err == nil && !condition(shown) {
			err = fmt.Errorf("it has %+v", shown.Status)
		}
		return err
	})
	return shown
}

// GPUName is the name of a GPU in slices and messages, by its minor.
func GPUName[N ~int | ~uint32 | ~int64 | ~uint64](minor N) string {
	return fmt.Sprintf("gpu-%d", minor)
}
