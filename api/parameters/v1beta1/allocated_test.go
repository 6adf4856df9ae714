// SPDX-License-Identifier: Apache-2.0

package v1beta1

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	classSource = resourceapi.AllocationConfigSourceClass
	claimSource = resourceapi.AllocationConfigSourceClaim
	gpuPlain    = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	gpuSliced   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`
	migPlain    = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"}`
	vfioPlain   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig","iommu":{"backendPolicy":"LegacyOnly"}}`
)

func TestAllocated(t *testing.T) {
	foreign := entry(claimSource, `not even JSON`)
	foreign.Opaque.Driver = "nic.example.com"
	tests := map[string]struct {
		configs []resourceapi.DeviceAllocationConfiguration
		request string
		want    string // part of the error, or of where the strategy is said and which; empty: nothing is said
	}{
		"none":                          {request: "gpu"},
		"default":                       {configs: list(entry(claimSource, gpuPlain)), request: "gpu"},
		"empty sharing":                 {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{}}`)), request: "gpu"},
		"null sharing":                  {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":null}`)), request: "gpu"},
		"another driver's":              {configs: list(foreign), request: "gpu"},
		"for another request":           {configs: list(entry(claimSource, gpuSliced, "other")), request: "gpu"},
		"for a sibling subrequest":      {configs: list(entry(claimSource, gpuSliced, "gpu/small")), request: "gpu/large"},
		"class, overridden by claim":    {configs: list(entry(classSource, gpuSliced), entry(claimSource, gpuPlain)), request: "gpu"},
		"MIG for all requests":          {configs: list(entry(claimSource, migPlain)), request: "gpu"},
		"MIG after GPU":                 {configs: list(entry(claimSource, gpuPlain), entry(claimSource, migPlain)), request: "gpu"},
		"time-slicing":                  {configs: list(entry(claimSource, gpuSliced)), request: "gpu", want: `spec.devices.config[0].opaque.parameters: TimeSlicing Long`},
		"from the class":                {configs: list(entry(classSource, gpuSliced)), request: "gpu", want: `the device class's spec.config.opaque.parameters: TimeSlicing`},
		"claim overrides class":         {configs: list(entry(classSource, gpuPlain), entry(claimSource, gpuSliced)), request: "gpu", want: `spec.devices.config[0].opaque.parameters: TimeSlicing`},
		"main request covers its parts": {configs: list(entry(claimSource, gpuSliced, "gpu")), request: "gpu/large", want: `parameters: TimeSlicing`},
		"this very subrequest":          {configs: list(entry(claimSource, gpuSliced, "gpu/large")), request: "gpu/large", want: `parameters: TimeSlicing`},
		"MPS settings alone":            {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"mpsConfig":{"defaultActiveThreadPercentage":50}}}`)), request: "gpu", want: `sharing.strategy: Required value`},
		"interval alone":                {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"timeSlicingConfig":{}}}`)), request: "gpu", want: `sharing.strategy: Required value`},
		"overridden, of a wrong kind":   {configs: list(entry(claimSource, migPlain, "gpu"), entry(claimSource, gpuPlain, "gpu")), request: "gpu"},
		"class's mistake, overridden":   {configs: list(entry(classSource, gpuSliced), entry(classSource, `}`), entry(claimSource, gpuPlain)), request: "gpu"},
		"for any choice, of all kinds":  {configs: list(entry(claimSource, gpuPlain, "gpu"), entry(claimSource, migPlain, "gpu")), request: "gpu/whole"},
		"for the other choice":          {configs: list(entry(claimSource, migPlain, "gpu")), request: "gpu/whole"},
		"for this choice, wrong":        {configs: list(entry(claimSource, migPlain, "gpu/whole")), request: "gpu/whole", want: `MigDeviceConfig is for request gpu/whole`},
		"the second of two":             {configs: list(entry(claimSource, gpuPlain), entry(claimSource, gpuSliced)), request: "gpu", want: `spec.devices.config[1].opaque`},
		"MIG for this request":          {configs: list(entry(claimSource, migPlain, "gpu")), request: "gpu", want: `MigDeviceConfig is for request gpu, which got a whole GPU`},
		"VFIO for this request":         {configs: list(entry(claimSource, vfioPlain, "gpu")), request: "gpu", want: `VfioDeviceConfig is for request gpu`},
		"unknown field":                 {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"stratagy":"MPS"}}`)), request: "gpu", want: `sharing.stratagy: Invalid value: unknown field`},
		"wrong case":                    {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","Sharing":{"strategy":"MPS"}}`)), request: "gpu", want: `parameters.Sharing: Invalid value: unknown field`},
		"field twice":                   {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"},"sharing":null}`)), request: "gpu", want: `parameters.sharing: Invalid value: duplicate field`},
		"unknown field, other kind":     {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig","iommu":{"x":1}}`)), request: "gpu", want: `iommu.x: Invalid value: unknown field`},
		"wrong type":                    {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":7}`)), request: "gpu", want: `config[0].opaque.parameters.sharing: Invalid value: must be an object, not number`},
		"unknown kind":                  {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"ComputeDomainChannelConfig"}`)), request: "gpu", want: `kind: Unsupported value: "ComputeDomainChannelConfig"`},
		"unknown version":               {configs: list(entry(claimSource, `{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`)), request: "gpu", want: `apiVersion: Unsupported value: "resource.nvidia.com/v1"`},
		"no JSON":                       {configs: list(entry(claimSource, `}`)), request: "gpu", want: `config[0].opaque.parameters: Invalid value: invalid character`},
		"empty":                         {configs: list(entry(claimSource, ``)), request: "gpu", want: `config[0].opaque.parameters: Required value`},
		"null":                          {configs: list(entry(claimSource, `null`)), request: "gpu", want: `apiVersion: Unsupported value: ""`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := describe(saying(test.configs...), test.request, true)
			if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
				t.Errorf("got %v, want %q", got, test.want)
			}
		})
	}
}

// describe is an error, or what is said and where.
func describe(claim *resourceapi.ResourceClaim, request string, whole bool) string {
	got, err := Allocated(claim, "gpu.nvidia.com", resourceapi.DeviceRequestAllocationResult{Request: request}, whole)
	switch {
	case err != nil:
		return "error: " + err.Error()
	case got.Sharing == nil:
		return ""
	}
	return fmt.Sprintf("%s: %s %s", got.Path, got.Sharing.Strategy, got.Sharing.Interval)
}

func TestAllocatedPartitions(t *testing.T) {
	for raw, want := range map[string]string{
		migPlain: "",
		gpuPlain: "GpuConfig is for request mig, which got a partition: only MigDeviceConfig fits",
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS"}}`: "parameters: MPS",
	} {
		got := describe(saying(entry(claimSource, raw, "mig")), "mig", false)
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: got %v, want %q", raw, got, want)
		}
	}
}

// saying is a claim with these entries, as a scheduler allocates it.
func saying(entries ...resourceapi.DeviceAllocationConfiguration) *resourceapi.ResourceClaim {
	claim := &resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}}}
	claim.Status.Allocation.Devices.Config = entries
	for _, e := range entries {
		if e.Source == claimSource {
			claim.Spec.Devices.Config = append(claim.Spec.Devices.Config, resourceapi.DeviceClaimConfiguration{Requests: e.Requests, DeviceConfiguration: e.DeviceConfiguration})
		}
	}
	return claim
}

func entry(source resourceapi.AllocationConfigSource, raw string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: "gpu.nvidia.com", Parameters: runtime.RawExtension{Raw: []byte(raw)},
		}},
	}
}

func list(configs ...resourceapi.DeviceAllocationConfiguration) []resourceapi.DeviceAllocationConfiguration {
	return configs
}

// Claim authors write these bytes: none may crash the node's driver.
func FuzzAllocated(f *testing.F) {
	for _, seed := range []string{gpuPlain, gpuSliced, migPlain, vfioPlain, `null`, ``, `[]`, `{"kind":{}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, err := Allocated(saying(entry(claimSource, string(raw))), "gpu.nvidia.com", resourceapi.DeviceRequestAllocationResult{Request: "gpu"}, true)
		if err != nil && err.Error() == "" {
			t.Error("an error that says nothing")
		}
	})
}
