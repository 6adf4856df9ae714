// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/deviceclass/extendedresourcecache"
	"k8s.io/klog/v2"
)

// The scheduler and quota read the DeviceClasses by one cache, in any order. Quota finds the resource of gpu.nvidia.com, and the scheduler
// the class for limits, also where both were created in the same second.
func TestClassesOfLimits(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args     []string
		resource string
		selects  bool
	}{
		"default":                   {nil, "", false},
		"quotas that count claims":  {[]string{"--set", "deviceClasses.countInQuota=true"}, "nvidia.com/gpu", false},
		"another resource":          {[]string{"--set", "resourceName=example.com/gpu", "--set", "deviceClasses.countInQuota=true"}, "example.com/gpu", false},
		"limits that become claims": {[]string{"--set", "deviceClasses.extendedResourceName=nvidia.com/gpu"}, "nvidia.com/gpu", true},
	} {
		t.Run(name, func(t *testing.T) {
			found := map[string]*resourceapi.DeviceClass{}
			for _, o := range decode(t, renderWith(t, append([]string{"-f", valuesFile("default")}, c.args...)...)) {
				if class, ok := o.(*resourceapi.DeviceClass); ok {
					found[class.Name] = class
				}
			}
			gpu, limits := found["gpu.nvidia.com"], found["extended-resource.nvidia.com"]
			if gpu == nil || (limits == nil) != (c.resource == "") {
				t.Fatalf("rendered are %v", found)
			}
			if limits == nil {
				if gpu.Spec.ExtendedResourceName != nil {
					t.Errorf("gpu.nvidia.com has the extended resource %s", *gpu.Spec.ExtendedResourceName)
				}
				return
			}
			if selects := limits.Spec.Selectors[0].CEL.Expression == gpu.Spec.Selectors[0].CEL.Expression; selects != c.selects {
				t.Errorf("the class for limits selects GPUs: %t, want %t", selects, c.selects)
			}
			created := time.Now()
			for _, later := range []time.Duration{0, time.Second} {
				gpu.CreationTimestamp, limits.CreationTimestamp = metav1.NewTime(created), metav1.NewTime(created.Add(later))
				for _, order := range [][]*resourceapi.DeviceClass{{gpu, limits}, {limits, gpu}} {
					cache := extendedresourcecache.NewExtendedResourceCache(klog.Background())
					for _, class := range order {
						cache.OnAdd(class, true)
					}
					if got := cache.GetExtendedResource("gpu.nvidia.com"); got != c.resource {
						t.Errorf("quota counts gpu.nvidia.com as %q, want %q", got, c.resource)
					}
					if got := cache.GetDeviceClass(corev1.ResourceName(c.resource)); got == nil || got.Name != limits.Name {
						t.Errorf("the class for limits is %v, %s first, created %s later", got, order[0].Name, later)
					}
				}
			}
		})
	}
}
