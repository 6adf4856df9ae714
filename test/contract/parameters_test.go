// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"fmt"
	"strings"
	"testing"
)

const (
	webhookName = "tandem-webhook"
	webhookPath = "parameters"
)

// TestParametersThatAreWrong are told when they are applied, wherever they stand; what is right, or not for us, is not in the
// way.
func TestParametersThatAreWrong(t *testing.T) {
	s := begin(t)
	const (
		typo   = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, shearing: {strategy: TimeSlicing}}`
		right  = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Long}}}`
		enough = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50}}}`
		much   = `{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 101}}}`
		exact  = `requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]`
		config = `config: [{opaque: {driver: %s, parameters: %s}}]`
	)
	for kind, object := range map[string]string{
		"ResourceClaim":         "spec: {devices: {" + exact + ", " + config + "}}",
		"ResourceClaimTemplate": "spec: {spec: {devices: {" + exact + ", " + config + "}}}",
		"DeviceClass":           "spec: {" + config + "}",
	} {
		object = "apiVersion: resource.k8s.io/v1\nkind: " + kind + "\nmetadata: {name: parameters}\n" + object
		const told = "config[*].opaque.parameters.shearing: unknown field"
		if err := s.apply(fmt.Sprintf(object, "gpu.nvidia.com", typo), "--dry-run=server"); err == nil || !strings.Contains(err.Error(), told) {
			t.Errorf("%s: %v, want %q", kind, err, told)
		}
		if err := s.apply(fmt.Sprintf(object, "gpu.nvidia.com", much), "--dry-run=server"); err == nil || !strings.Contains(err.Error(), "defaultActiveThreadPercentage: must be") {
			t.Errorf("%s: %v of too large a number", kind, err)
		}
		for parameters, driver := range map[string]string{right: "gpu.nvidia.com", enough: "gpu.nvidia.com", typo: "gpu.example.com"} {
			if err := s.apply(fmt.Sprintf(object, driver, parameters), "--dry-run=server"); err != nil {
				t.Errorf("%s for %s: %v", kind, driver, err)
			}
		}
	}
}
