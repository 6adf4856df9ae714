// SPDX-License-Identifier: Apache-2.0

package helm_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
)

const parametersSuffix = "-parameters"

// TestParametersPolicy: the agent rejects everything that the policy rejects, and the policy admits everything that the agent
// accepts. The agent finds the mistakes that the policy misses.
func TestParametersPolicy(t *testing.T) {
	t.Parallel()
	gpu := func(text string) string {
		return "{apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, " + text + "}"
	}
	mps := func(text string) string { return gpu("sharing: {strategy: MPS, mpsConfig: {" + text + "}}") }
	const (
		allowed   = ""
		nodeFinds = "the node finds it"
	)
	podState := parametersPolicy(t)
	for text, want := range map[string]string{
		gpu(""):                                   allowed,
		gpu("sharing: null"):                      allowed,
		gpu("sharing: {}"):                        allowed,
		gpu("sharing: {strategy: TimeSlicing}"):   allowed,
		gpu("sharing: {strategy: MPS}"):           allowed,
		mps("defaultActiveThreadPercentage: 100"): allowed,
		mps("defaultPinnedDeviceMemoryLimit: 10Gi, defaultPerDevicePinnedMemoryLimit: {'0': 5Gi}, multiUser: true"): allowed,
		gpu("sharing: {strategy: TimeSlicing, timeSlicingConfig: {}}"):                                              allowed,
		gpu("sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: null}}"):                                allowed,
		gpu("sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: Medium}, mpsConfig: null}"):             allowed,
		"{apiVersion: resource.nvidia.com/v1beta1, kind: MigDeviceConfig, sharing: {strategy: MPS}}":                allowed,
		"{apiVersion: resource.nvidia.com/v1beta1, kind: VfioDeviceConfig, iommu: {backendPolicy: LegacyOnly}}":     "kind: must be GpuConfig or MigDeviceConfig",
		"{}":              "apiVersion: must be resource.nvidia.com/v1beta1",
		"null":            nodeFinds,
		"[]":              nodeFinds,
		"{apiVersion: 1}": "apiVersion: must be",
		"{apiVersion: resource.nvidia.com/v1alpha1, kind: GpuConfig}":              "apiVersion: must be",
		"{apiVersion: resource.nvidia.com/v1beta1, kind: GPUConfig}":               "kind: must be GpuConfig or MigDeviceConfig",
		"{apiVersion: resource.nvidia.com/v1beta1}":                                "kind: must be",
		gpu("shearing: {strategy: MPS}"):                                           "config[*].opaque.parameters.shearing: unknown field",
		gpu("iommu: {}"):                                                           "parameters.iommu: unknown field",
		gpu("sharing: 7"):                                                          "sharing: must be an object",
		gpu("sharing: []"):                                                         "sharing: must be an object",
		gpu("sharing: {stratagy: MPS}"):                                            "parameters.sharing.stratagy: unknown field",
		gpu("sharing: {strategy: mps}"):                                            "sharing.strategy: mps is none of TimeSlicing and MPS",
		gpu("sharing: {strategy: 7}"):                                              "sharing.strategy: 7 is none of",
		gpu("sharing: {strategy: ''}"):                                             "sharing.strategy:  is none of",
		gpu("sharing: {strategy: [MPS]}"):                                          "sharing.strategy: must be TimeSlicing or MPS",
		gpu(`sharing: {strategy: "x\ny"}`):                                         "sharing.strategy: must be TimeSlicing or MPS",
		gpu(`"x\ny": 1`):                                                           "parameters: unknown field",
		gpu("sharing: {mpsConfig: {}}"):                                            "sharing.strategy: must be TimeSlicing or MPS if there are settings",
		gpu("sharing: {timeSlicingConfig: {}}"):                                    "sharing.strategy: must be",
		gpu("sharing: {strategy: MPS, timeSlicingConfig: {}}"):                     "sharing.timeSlicingConfig: may be set with strategy TimeSlicing only",
		gpu("sharing: {strategy: TimeSlicing, mpsConfig: {}}"):                     "sharing.mpsConfig: may be set with strategy MPS only",
		gpu("sharing: {strategy: TimeSlicing, timeSlicingConfig: []}"):             "must be objects",
		gpu("sharing: {strategy: MPS, mpsConfig: 1}"):                              "must be objects",
		gpu("sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: 2}}"):  "interval: must be Default, Short, Medium or Long",
		gpu("sharing: {strategy: TimeSlicing, timeSlicingConfig: {interval: ''}}"): "interval: must be",
		gpu("sharing: {strategy: TimeSlicing, timeSlicingConfig: {timeslice: 2}}"): "sharing.timeSlicingConfig.timeslice: unknown field",
		mps("multiuser: true, x: 1"):                                               "sharing.mpsConfig.multiuser",
		mps("defaultActiveThreadPercentage: 101"):                                  "defaultActiveThreadPercentage: must be a whole number between 0 and 100",
		mps("defaultActiveThreadPercentage: -1"):                                   "defaultActiveThreadPercentage: must be",
		mps("defaultActiveThreadPercentage: '50'"):                                 "defaultActiveThreadPercentage: must be",
		mps("defaultActiveThreadPercentage: 0.5"):                                  "defaultActiveThreadPercentage: must be",
		mps("defaultPinnedDeviceMemoryLimit: 10 Gi"):                               nodeFinds,
		mps("defaultPerDevicePinnedMemoryLimit: {gpu-0: 1Gi}"):                     nodeFinds,
		mps("multiUser: 'yes'"):                                                    nodeFinds,
		"{apiVersion: resource.nvidia.com/v1beta1, kind: MigDeviceConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {}}}": nodeFinds,
		"{apiVersion: resource.nvidia.com/v1beta1, kind: VfioDeviceConfig, sharing: {}}":                                            "kind: must be GpuConfig or MigDeviceConfig",
	} {
		raw, err := yaml.YAMLToJSON([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if _, wrong := parametersv1beta1.Admit(raw, field.NewPath("at")); (len(wrong) == 0) != (want == allowed) {
			t.Errorf("%s: the webhook says %v", text, wrong.ToAggregate())
		}
		if want == nodeFinds {
			want = allowed
		}
		for place, spec := range map[string]string{
			"claim":    `{"devices":{"requests":[],"config":[{"opaque":%s}]}}`,
			"template": `{"spec":{"devices":{"config":[{"opaque":{"driver":"nic.example.com","parameters":{"x":1}}},{"opaque":%s}]}}}`,
			"class":    `{"config":[{"opaque":%s}]}`,
		} {
			opaque := fmt.Sprintf(`{"driver":"gpu.nvidia.com","parameters":%s}`, raw)
			if got := podState("CREATE", fmt.Sprintf(spec, opaque), "null"); (want == "") != (got == "") || !strings.Contains(got, want) {
				t.Errorf("%s in a %s: %q, want %q", text, place, got, want)
			}
			others := strings.Replace(opaque, "gpu.nvidia.com", "gpu.example.com", 1)
			if got := podState("CREATE", fmt.Sprintf(spec, others), "null"); got != "" {
				t.Errorf("%s of another driver in a %s: %q", text, place, got)
			}
		}
	}
}

// Objects without parameters pass, and so do objects that are older than the policy.
func TestParametersPolicyLeavesAlone(t *testing.T) {
	t.Parallel()
	const wrong = `{"config":[{"opaque":{"driver":"gpu.nvidia.com","parameters":{}}}]}`
	podState := parametersPolicy(t)
	for _, c := range []struct{ operation, spec, before, want string }{
		{"CREATE", `{}`, "null", ""},
		{"CREATE", `{"devices":{}}`, "null", ""},
		{"CREATE", `{"spec":{"devices":{"requests":[]}}}`, "null", ""},
		{"CREATE", `{"config":[{}]}`, "null", ""},
		{"CREATE", `{"config":[{"opaque":{"driver":"gpu.nvidia.com"}}]}`, "null", ""},
		{"UPDATE", wrong, wrong, "-"},
		{"UPDATE", wrong, `{"config":[]}`, "apiVersion"},
	} {
		if got := podState(c.operation, c.spec, c.before); (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s %s: %q, want %q", c.operation, c.spec, got, c.want)
		}
	}
	policy := policyOf(t, "everything", parametersSuffix)
	if *policy.Spec.FailurePolicy != admissionv1.Ignore {
		t.Error("what cannot be evaluated is not left to the node")
	}
	binding := findNamed[*admissionv1.ValidatingAdmissionPolicyBinding](t, "everything", parametersSuffix)
	if binding.Spec.PolicyName != policy.Name || !slices.Equal(binding.Spec.ValidationActions, []admissionv1.ValidationAction{admissionv1.Deny}) {
		t.Errorf("binding %+v", binding.Spec)
	}
	if text := fmt.Sprint(policy.Spec.Variables); !strings.Contains(text, "'gpu.example.com'") {
		t.Errorf("not about the release's driver: %s", text)
	}
}

// parametersPolicy evaluates the policy for the spec of an object.
func parametersPolicy(t *testing.T) func(operation, spec, before string) string {
	t.Helper()
	policy := policyOf(t, "default", parametersSuffix)
	object := func(spec string) any {
		if spec == "null" {
			return nil
		}
		var o any
		if err := json.Unmarshal([]byte(`{"spec":`+spec+`}`), &o); err != nil {
			t.Fatal(err)
		}
		return wholeNumbers(o)
	}
	return func(operation, spec, before string) string {
		t.Helper()
		return decide(t, policy, map[string]any{
			"request": map[string]any{"operation": operation}, "object": object(spec), "oldObject": object(before),
		})
	}
}

// wholeNumbers are integers in the API server's objects.
func wholeNumbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key := range v {
			v[key] = wholeNumbers(v[key])
		}
	case []any:
		for i := range v {
			v[i] = wholeNumbers(v[i])
		}
	case float64:
		if v == float64(int64(v)) {
			return int64(v)
		}
	}
	return v
}
