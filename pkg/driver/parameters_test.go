// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

const (
	classSource = resourceapi.AllocationConfigSourceClass
	claimSource = resourceapi.AllocationConfigSourceClaim
	gpuPlain    = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	gpuSliced   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`
	migPlain    = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig"}`
	vfioPlain   = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig","iommu":{"backendPolicy":"LegacyOnly"}}`
)

func TestCheckParameters(t *testing.T) {
	foreign := parameters(claimSource, `not even JSON`)
	foreign.Opaque.Driver = "nic.example.com"
	tests := map[string]struct {
		configs []resourceapi.DeviceAllocationConfiguration
		request string
		want    string // empty: accepted
	}{
		"none":                          {request: "gpu"},
		"default":                       {configs: list(parameters(claimSource, gpuPlain)), request: "gpu"},
		"empty sharing":                 {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{}}`)), request: "gpu"},
		"null sharing":                  {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":null}`)), request: "gpu"},
		"another driver's":              {configs: list(foreign), request: "gpu"},
		"for another request":           {configs: list(parameters(claimSource, gpuSliced, "other")), request: "gpu"},
		"for a sibling subrequest":      {configs: list(parameters(claimSource, gpuSliced, "gpu/small")), request: "gpu/large"},
		"class, overridden by claim":    {configs: list(parameters(classSource, gpuSliced), parameters(claimSource, gpuPlain)), request: "gpu"},
		"MIG for all requests":          {configs: list(parameters(claimSource, migPlain)), request: "gpu"},
		"MIG after GPU":                 {configs: list(parameters(claimSource, gpuPlain), parameters(claimSource, migPlain)), request: "gpu"},
		"time-slicing":                  {configs: list(parameters(claimSource, gpuSliced)), request: "gpu", want: `config[0].opaque.parameters.sharing.strategy: "TimeSlicing" is not supported`},
		"from the class":                {configs: list(parameters(classSource, gpuSliced)), request: "gpu", want: `the device class's spec.config.opaque.parameters.sharing.strategy`},
		"claim overrides class":         {configs: list(parameters(classSource, gpuPlain), parameters(claimSource, gpuSliced)), request: "gpu", want: `spec.devices.config[0].opaque.parameters.sharing.strategy`},
		"main request covers its parts": {configs: list(parameters(claimSource, gpuSliced, "gpu")), request: "gpu/large", want: `sharing.strategy`},
		"this very subrequest":          {configs: list(parameters(claimSource, gpuSliced, "gpu/large")), request: "gpu/large", want: `sharing.strategy`},
		"MPS settings alone":            {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"mpsConfig":{"defaultActiveThreadPercentage":50}}}`)), request: "gpu", want: `sharing.strategy: Required value`},
		"interval alone":                {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"timeSlicingConfig":{}}}`)), request: "gpu", want: `sharing.strategy: Required value`},
		"overridden, of a wrong kind":   {configs: list(parameters(claimSource, migPlain, "gpu"), parameters(claimSource, gpuPlain, "gpu")), request: "gpu"},
		"class's mistake, overridden":   {configs: list(parameters(classSource, gpuSliced), parameters(classSource, `}`), parameters(claimSource, gpuPlain)), request: "gpu"},
		"for any choice, of all kinds":  {configs: list(parameters(claimSource, gpuPlain, "gpu"), parameters(claimSource, migPlain, "gpu")), request: "gpu/whole"},
		"for the other choice":          {configs: list(parameters(claimSource, migPlain, "gpu")), request: "gpu/whole"},
		"for this choice, wrong":        {configs: list(parameters(claimSource, migPlain, "gpu/whole")), request: "gpu/whole", want: `MigDeviceConfig is for request gpu/whole`},
		"the second of two":             {configs: list(parameters(claimSource, gpuPlain), parameters(claimSource, gpuSliced)), request: "gpu", want: `spec.devices.config[1].opaque`},
		"MIG for this request":          {configs: list(parameters(claimSource, migPlain, "gpu")), request: "gpu", want: `MigDeviceConfig is for request gpu, which got a whole GPU`},
		"VFIO for this request":         {configs: list(parameters(claimSource, vfioPlain, "gpu")), request: "gpu", want: `VfioDeviceConfig is for request gpu`},
		"unknown field":                 {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"stratagy":"MPS"}}`)), request: "gpu", want: `sharing.stratagy: Invalid value: unknown field`},
		"wrong case":                    {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","Sharing":{"strategy":"MPS"}}`)), request: "gpu", want: `parameters.Sharing: Invalid value: unknown field`},
		"field twice":                   {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"},"sharing":null}`)), request: "gpu", want: `parameters.sharing: Invalid value: duplicate field`},
		"unknown field, other kind":     {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig","iommu":{"x":1}}`)), request: "gpu", want: `iommu.x: Invalid value: unknown field`},
		"wrong type":                    {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":7}`)), request: "gpu", want: `config[0].opaque.parameters.sharing: Invalid value: must be an object, not number`},
		"unknown kind":                  {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"ComputeDomainChannelConfig"}`)), request: "gpu", want: `kind: Unsupported value: "ComputeDomainChannelConfig"`},
		"unknown version":               {configs: list(parameters(claimSource, `{"apiVersion":"resource.nvidia.com/v1","kind":"GpuConfig"}`)), request: "gpu", want: `apiVersion: Unsupported value: "resource.nvidia.com/v1"`},
		"no JSON":                       {configs: list(parameters(claimSource, `}`)), request: "gpu", want: `config[0].opaque.parameters: Invalid value: invalid character`},
		"empty":                         {configs: list(parameters(claimSource, ``)), request: "gpu", want: `config[0].opaque.parameters: Required value`},
		"null":                          {configs: list(parameters(claimSource, `null`)), request: "gpu", want: `apiVersion: Unsupported value: ""`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := checkParameters(saying(test.configs...), "gpu.nvidia.com", resourceapi.DeviceRequestAllocationResult{Request: test.request}, true)
			if (err == nil) != (test.want == "") || !strings.Contains(fmt.Sprint(err), test.want) && err != nil {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

func TestParametersOfPartitions(t *testing.T) {
	for raw, want := range map[string]string{
		migPlain: "",
		gpuPlain: "GpuConfig is for request mig, which got a partition: only MigDeviceConfig fits",
		`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS"}}`: "sharing.strategy",
	} {
		err := checkParameters(saying(parameters(claimSource, raw, "mig")), "gpu.nvidia.com", resourceapi.DeviceRequestAllocationResult{Request: "mig"}, false)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", raw, err, want)
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

func list(configs ...resourceapi.DeviceAllocationConfiguration) []resourceapi.DeviceAllocationConfiguration {
	return configs
}

// Claim authors write these bytes: none may crash the node's driver.
func FuzzCheckParameters(f *testing.F) {
	for _, seed := range []string{gpuPlain, gpuSliced, migPlain, vfioPlain, `null`, ``, `[]`, `{"kind":{}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		err := checkParameters(saying(parameters(claimSource, string(raw))), "gpu.nvidia.com", resourceapi.DeviceRequestAllocationResult{Request: "gpu"}, true)
		if err != nil && err.Error() == "" {
			t.Error("an error that says nothing")
		}
	})
}
