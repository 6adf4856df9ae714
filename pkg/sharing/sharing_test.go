// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

func perDevice(pairs ...string) parametersv1beta1.MPS {
	m := parametersv1beta1.MPS{PerDevicePinnedMemoryLimit: map[string]resource.Quantity{}}
	for i := 0; i < len(pairs); i += 2 {
		m.PerDevicePinnedMemoryLimit[pairs[i]] = resource.MustParse(pairs[i+1])
	}
	return m
}

func TestCheck(t *testing.T) {
	old := gpuNamed("GPU-2")
	old.GPU.ComputeCapability, old.GPU.ProductName = "6.1", "Tesla P40"
	unsaid := gpuNamed("GPU-3")
	unsaid.GPU.ComputeCapability = ""
	gpus := []device.Device{gpuNamed("GPU-1"), gpuNamed("GPU-0")}
	for name, c := range map[string]struct {
		devices []device.Device
		mps     *parametersv1beta1.MPS
		want    []string
	}{
		"time-slicing":                 {devices: []device.Device{old}},
		"nothing said":                 {devices: []device.Device{old}, mps: &parametersv1beta1.MPS{}},
		"several users":                {devices: gpus, mps: &parametersv1beta1.MPS{MultiUser: true}},
		"several users of an old GPU":  {devices: []device.Device{gpus[0], old}, mps: &parametersv1beta1.MPS{MultiUser: true}, want: []string{`at.mpsConfig.multiUser: Invalid value: true: needs compute capability 7.0, and device gpu-2 (Tesla P40) has "6.1"`}},
		"several users of who knows":   {devices: []device.Device{unsaid}, mps: &parametersv1beta1.MPS{MultiUser: true}, want: []string{`has ""`}},
		"by index and UUID":            {devices: gpus, mps: ptr.To(perDevice("0", "1Gi", "GPU-1", "2Gi"))},
		"index too high":               {devices: gpus, mps: ptr.To(perDevice("2", "1Gi")), want: []string{`at.mpsConfig.defaultPerDevicePinnedMemoryLimit[2]: Invalid value: "2": there is no such device: the claim has 2 devices, counted from 0`}},
		"another's UUID":               {devices: gpus, mps: ptr.To(perDevice("GPU-7", "1Gi")), want: []string{`at.mpsConfig.defaultPerDevicePinnedMemoryLimit[GPU-7]: Invalid value: "GPU-7": the claim has no device with this UUID`}},
		"two mistakes, in order":       {devices: gpus, mps: ptr.To(perDevice("GPU-7", "1Gi", "3", "1Gi")), want: []string{"Limit[3]", "Limit[GPU-7]"}},
		"partition of a UUID":          {devices: []device.Device{partitionOf("GPU-0", "MIG-1", 0)}, mps: ptr.To(perDevice("MIG-1", "1Gi"))},
		"partition that is not made":   {devices: []device.Device{partitionOf("GPU-0", "", 0)}, mps: ptr.To(perDevice("0", "1Gi"))},
		"who would know the UUID then": {devices: []device.Device{partitionOf("GPU-0", "", 0)}, mps: ptr.To(perDevice("MIG-1", "1Gi")), want: []string{"use the device's index"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := Check(c.devices, parametersv1beta1.Sharing{MPS: c.mps}, field.NewPath("at"))
			if len(got) != len(c.want) {
				t.Fatalf("got %v, want %q", got, c.want)
			}
			for i, want := range c.want {
				if !strings.Contains(got[i].Error(), want) {
					t.Errorf("got  %v\nwant %s", got[i], want)
				}
			}
		})
	}
}

func TestSettings(t *testing.T) {
	gpus := []device.Device{gpuNamed("GPU-1"), gpuNamed("GPU-0")}
	uuids := []string{"GPU-0", "GPU-1"}
	limited := perDevice("GPU-0", "3Gi", "0", "1Gi")
	limited.PinnedMemoryLimit = ptr.To(resource.MustParse("10Gi"))
	for name, c := range map[string]struct {
		mps  parametersv1beta1.MPS
		want mps.Settings
	}{
		"nothing said":            {want: mps.Settings{Devices: uuids, DriverRoot: "/"}},
		"all but memory":          {mps: parametersv1beta1.MPS{ActiveThreadPercentage: ptr.To(0), MultiUser: true}, want: mps.Settings{Devices: uuids, DriverRoot: "/", ActiveThreadPercentage: ptr.To[int32](0), MultiUser: true}},
		"the same for all":        {mps: parametersv1beta1.MPS{PinnedMemoryLimit: ptr.To(resource.MustParse("1536Ki"))}, want: mps.Settings{Devices: uuids, DriverRoot: "/", PinnedMemoryMiB: []int64{1, 1}}},
		"for one, by sorted UUID": {mps: perDevice("1", "2Gi"), want: mps.Settings{Devices: uuids, DriverRoot: "/", PinnedMemoryMiB: []int64{0, 2048}}},
		"the UUID is closest":     {mps: limited, want: mps.Settings{Devices: uuids, DriverRoot: "/", PinnedMemoryMiB: []int64{3072, 10240}}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, Settings(gpus, c.mps, "/")); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestDaemonNames(t *testing.T) {
	uid := "0b8f4b8e-6a54-4c3b-9b0e-1f2a3b4c5d6e"
	name := func(g Group) string {
		t.Helper()
		name, err := daemonName(g)
		check(t, err)
		if len(name) > 52 || ownerOfDaemon(name) != g.owner() {
			t.Errorf("%q is too long (%d), or not about claim %s", name, len(name), g.Claim.UID)
		}
		return name
	}
	a, b := gpuNamed("GPU-0"), gpuNamed("GPU-1")
	first := name(group(uid, withMPS(), a, b))
	if first != name(group(uid, withMPS(), b, a)) {
		t.Error("the order of devices matters")
	}
	for what, other := range map[string]Group{
		"another claim":   group("0b8f4b8e-6a54-4c3b-9b0e-000000000000", withMPS(), a, b),
		"other devices":   group(uid, withMPS(), a),
		"shared in a way": group(uid, withMPS(func(m *parametersv1beta1.MPS) { m.MultiUser = true }), a, b),
	} {
		if name(other) == first {
			t.Errorf("%s has the same name", what)
		}
	}
	for _, bad := range []string{"", "../x", "UID", strings.Repeat("a", 44)} {
		if name, err := daemonName(group(bad, withMPS(), a)); err == nil {
			t.Errorf("claim UID %q gives %q", bad, name)
		}
	}
}
