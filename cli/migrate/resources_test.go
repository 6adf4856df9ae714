// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/deployments/helm"
)

// Helm adds Tandem's default requests and limits to those of a user. No request may exceed its limit: the API server refuses such pods.
func TestRequestsWithinLimits(t *testing.T) {
	var defaults map[string]any
	if err := yaml.Unmarshal(helm.Values, &defaults); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]struct{ values, change string }{
		"{migStrategy: null, resources: {limits: {memory: 50Mi, cpu: 50m}}}": {
			"{limits: {memory: 50Mi, cpu: 50m}, requests: {memory: 50Mi}}",
			"resources.requests.memory: 50Mi, as the limit, because Tandem's default 64Mi exceeds it",
		},
		"{kubeletPlugin: {containers: {gpus: {resources: {limits: {memory: 50Mi}}}}}}": {
			"{limits: {memory: 50Mi}, requests: {memory: 50Mi}}", "resources.requests.memory: 50Mi",
		},
		"{kubeletPlugin: {containers: {gpus: {resources: {limits: {cpu: 5m}}}}}}": {
			"{limits: {cpu: 5m, memory: null}, requests: {cpu: 5m}}", "resources.requests.cpu: 5m",
		},
		"{toolkit: {}, mig: {}, devicePlugin: {resources: {limits: {cpu: 0.005, memory: 50Mi}}}}": {
			"{limits: {cpu: 0.005, memory: 50Mi}, requests: {cpu: 0.005, memory: 50Mi}}", "resources.requests.cpu: 0.005",
		},
		"{migStrategy: null, resources: {requests: {memory: 512Mi}}}": {
			"{requests: {memory: 512Mi}, limits: {memory: null}}",
			"resources.limits.memory: none, because the request 512Mi exceeds Tandem's default 256Mi",
		},
		"{migStrategy: null, resources: {requests: {memory: 128Mi}}}": {"{requests: {memory: 128Mi}}", ""},
		"{migStrategy: null, resources: {limits: {memory: 64Mi}}}":    {"{limits: {memory: 64Mi}}", ""},
		"{migStrategy: null, resources: {requests: {memory: much}}}":  {"{requests: {memory: much}}", ""},
		"{migStrategy: null, resources: {limits: {memory: 50Mi}}}\n---\n{kubeletPlugin: {containers: {gpus: {resources: {requests: {memory: 99Mi}}}}}}": {
			"{limits: {memory: null}, requests: {cpu: null, memory: 99Mi}}", "because the request 99Mi exceeds that of another source, 50Mi",
		},
	} {
		result := translated(t, "file", text)
		var values any
		if err := yaml.Unmarshal([]byte(want.values), &values); err != nil {
			t.Fatal(err)
		}
		wantValues(t, Result{Values: map[string]any{"resources": result.Values["resources"]}}, "{resources: "+want.values+"}", nil, nil)
		changes := strings.Join(result.Changes, "\n")
		if !strings.Contains(changes, want.change) || want.change == "" && strings.Contains(changes, "resources.") {
			t.Errorf("%s: changes\n%s", text, changes)
		}
		rendered := overlay(defaults, result.Values)
		for _, name := range []string{"cpu", "memory"} {
			if exceeds(at(rendered, "resources.requests."+name), at(rendered, "resources.limits."+name)) {
				t.Errorf("%s: renders %v", text, rendered["resources"])
			}
		}
	}
}
