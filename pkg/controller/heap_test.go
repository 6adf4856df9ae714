// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// BenchmarkHeap measures what a cached object occupies. The chart's README has these numbers.
func BenchmarkHeap(b *testing.B) {
	meta := func(i, labels int) metav1.ObjectMeta {
		m := metav1.ObjectMeta{Name: fmt.Sprintf("object-of-usual-length-%d", i), Namespace: "a-namespace", UID: types.UID(fmt.Sprintf("%036d", i)), Labels: map[string]string{}}
		for l := range labels {
			m.Labels[fmt.Sprintf("feature.node.kubernetes.io/cpu-%d-%d", l, i)] = strings.Repeat("x", 8+i%2)
		}
		return m
	}
	for name, make := range map[string]func(i int) client.Object{
		"claim": func(i int) client.Object {
			return &resourceapi.ResourceClaim{
				ObjectMeta: meta(i, 3),
				Spec:       resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: fmt.Sprint("gpu.nvidia.com", i)}}}}},
				Status: resourceapi.ResourceClaimStatus{
					ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: fmt.Sprint("pod-of-usual-length-", i), UID: types.UID(fmt.Sprintf("%036d", i))}},
					Allocation:  &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.nvidia.com", Pool: fmt.Sprint("node-", i), Device: fmt.Sprint("gpu-", i)}}}},
				},
			}
		},
		"node": func(i int) client.Object {
			n := &corev1.Node{ObjectMeta: meta(i, 90), Status: corev1.NodeStatus{Capacity: corev1.ResourceList{}, Allocatable: corev1.ResourceList{}}}
			for _, r := range []corev1.ResourceName{"cpu", "memory", "nvidia.com/gpu"} {
				n.Status.Capacity[r], n.Status.Allocatable[r] = resource.MustParse("8"), resource.MustParse("8")
			}
			for at := range 50 {
				n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.example.com/image-%d-%d", at, i)}})
			}
			return n
		},
		"pending pod": func(i int) client.Object {
			return &corev1.Pod{ObjectMeta: meta(i, 6), Spec: corev1.PodSpec{
				NodeName: fmt.Sprint("node-", i), ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu"}},
				Containers: []corev1.Container{{Name: "c", Image: fmt.Sprint("image-", i), Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("1"), "memory": resource.MustParse("1Gi")}}}},
			}}
		},
		"GPUNode": func(i int) client.Object {
			n := &v1alpha1.GPUNode{ObjectMeta: meta(i, 0)}
			for at := range 8 {
				n.Spec.Claims = append(n.Spec.Claims, v1alpha1.AllocatedClaim{UID: types.UID(fmt.Sprintf("%036d", at*i)), Namespace: "a-namespace", Name: fmt.Sprintf("claim-%d-%d", at, i), Devices: []string{fmt.Sprint("gpu-", at)}})
				n.Status.Devices = append(n.Status.Devices, filled[v1alpha1.DeviceStatus](i*8+at))
			}
			return n
		},
	} {
		b.Run(name, func(b *testing.B) {
			const n = 2000
			var transform func(any) (any, error)
			for kind, by := range cacheOptions(device.Resources{GPU: "nvidia.com/gpu"}).ByObject {
				if reflect.TypeOf(kind) == reflect.TypeOf(make(0)) {
					transform = by.Transform
				}
			}
			if transform == nil {
				transform = trim(func(c *resourceapi.ResourceClaim) { trimClaim(c, "gpu.nvidia.com") })
			}
			for b.Loop() {
				kept := [n]any{}
				before := heap()
				for i := range n {
					kept[i], _ = transform(make(i))
				}
				b.ReportMetric(float64(heap()-before)/n, "B/object")
				runtime.KeepAlive(kept)
			}
		})
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// filled returns a value whose strings, slices and pointers are set, so that it is as large as usual.
func filled[T any](i int) (v T) {
	fill(reflect.ValueOf(&v).Elem(), i, 0)
	return v
}

func fill(v reflect.Value, i, depth int) {
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("text-of-usual-length-%d", i))
	case reflect.Struct:
		for at := range v.NumField() {
			if v.Field(at).CanSet() {
				fill(v.Field(at), i, depth+1)
			}
		}
	case reflect.Slice:
		if depth < 4 {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
			fill(v.Index(0), i, depth+1)
		}
	case reflect.Pointer:
		if depth < 4 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), i, depth+1)
		}
	}
}
