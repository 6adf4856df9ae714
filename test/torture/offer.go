// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// offer is what the node has to give when nothing is given out.
type offer struct {
	// claims are the devices without taints and the counters, each in its pool, sorted.
	claims []string
	// free is GPUNode's count; zero where there is no GPUNode.
	free int64
}

// awaitOffer answers what is offered once limits are offered what there is and nothing changes any more.
func (r *run) awaitOffer(ctx context.Context) (offer, error) {
	var before offer
	for deadline := time.Now().Add(settlePatience); ; broadcast.Sleep(ctx, 2*time.Second) {
		lines, _, err := r.auditor.offeredToPods(ctx)
		var now offer
		if err == nil {
			now, err = r.auditor.offer(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return offer{}, ctx.Err()
		case err == nil && len(lines) == 0 && len(now.claims) > 0 && reflect.DeepEqual(now, before):
			return now, nil
		case time.Now().After(deadline):
			return offer{}, fmt.Errorf("the node does not offer what it has: %v, claims %v: %w", lines, now.claims, err)
		}
		before = now
	}
}

func (a auditor) offer(ctx context.Context) (offer, error) {
	claims, err := a.claimsOffer(ctx)
	if err != nil {
		return offer{}, err
	}
	node, err := a.dynamic.Resource(gpuNodes).Get(ctx, a.node.Name(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return offer{claims: claims}, nil
	}
	if err != nil {
		return offer{}, fmt.Errorf("get GPUNode: %w", err)
	}
	free, _, _ := unstructured.NestedInt64(node.Object, "status", "counts", "free")
	return offer{claims, free}, nil
}

func (a auditor) claimsOffer(ctx context.Context) ([]string, error) {
	ofNode := metav1.ListOptions{FieldSelector: "spec.nodeName=" + a.node.Name()}
	list, err := a.client.ResourceV1().ResourceSlices().List(ctx, ofNode)
	if err != nil {
		return nil, fmt.Errorf("list ResourceSlices: %w", err)
	}
	var all []string
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			if len(device.Taints) > 0 {
				continue
			}
			name := slice.Spec.Pool.Name + "/" + device.Name
			if device.AllowMultipleAllocations != nil && *device.AllowMultipleAllocations {
				memory := device.Capacity[memoryCapacity]
				name += " with " + memory.Value.String()
				if shares, divided := device.Capacity[sharesCapacity]; divided {
					name += " in " + shares.Value.String() + " shares"
				}
			}
			all = append(all, name)
		}
		for _, set := range slice.Spec.SharedCounters {
			for name, counter := range set.Counters {
				all = append(all, fmt.Sprintf("%s/%s=%s", slice.Spec.Pool.Name, name, counter.Value.String()))
			}
		}
	}
	slices.Sort(all)
	return all, nil
}

// resources are what limits are to be offered when nothing is given out.
func (a auditor) resources() map[corev1.ResourceName]int {
	if a.sharing {
		all := map[corev1.ResourceName]int{}
		for gpu := range gpusANode {
			all[Workload{Renamed: policies[gpu].renamed}.resource()] += policies[gpu].limits()
		}
		return all
	}
	if a.hardware == nil {
		return map[corev1.ResourceName]int{resourceOf(""): gpusANode}
	}
	all := map[corev1.ResourceName]int{resourceOf(""): wholeGPUs}
	for _, i := range a.hardware.first {
		for _, p := range profiles {
			if p.id == i.Profile {
				all[resourceOf(p.name)]++
			}
		}
	}
	return all
}

func (a auditor) offeredToPods(ctx context.Context) ([]string, int, error) {
	node, err := a.client.CoreV1().Nodes().Get(ctx, a.node.Name(), metav1.GetOptions{})
	if err != nil {
		return nil, 0, fmt.Errorf("get node: %w", err)
	}
	var lines []string
	missing := 0
	wanted := a.resources()
	for name := range node.Status.Capacity {
		if _, known := wanted[name]; !known && strings.HasPrefix(string(name), "nvidia.com/") {
			wanted[name] = 0
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		count := wanted[name]
		capacity, allocatable := node.Status.Capacity[name], node.Status.Allocatable[name]
		// A partition that an administrator has removed counts as capacity for a while longer, and so does the device ID of a foreign plugin
		// that a pod had.
		lingers := strings.HasPrefix(string(name), "nvidia.com/mig-") || name == resourceOf("") && int(capacity.Value()) > count
		if int(allocatable.Value()) == count && (int(capacity.Value()) == count || lingers) {
			continue
		}
		lines = append(lines, fmt.Sprintf("limits: %s: allocatable %s of %s, there are %d", name, allocatable.String(), capacity.String(), count))
		missing += max(0, count-int(allocatable.Value()))
	}
	return lines, missing, nil
}

func (a auditor) offeredToClaims(ctx context.Context) ([]string, int, error) {
	now, err := a.claimsOffer(ctx)
	if err != nil || slices.Equal(now, a.offered.claims) {
		return nil, 0, err
	}
	without := func(all, others []string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(one string) bool { return slices.Contains(others, one) })
	}
	missing := without(a.offered.claims, now)
	return []string{fmt.Sprintf("claims: missing from the slices: %v, new: %v", missing, without(now, a.offered.claims))},
		min(len(missing), gpusANode), nil
}
