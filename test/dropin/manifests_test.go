// SPDX-License-Identifier: Apache-2.0

package dropin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/pkg/webhook"
)

// The equivalents of NVIDIA's published manifests, which TestPublishedManifests of test/e2e applies to a cluster, have no mistake that
// can be seen without one, and the story leaves none out.
func TestManifests(t *testing.T) {
	files, err := filepath.Glob("../e2e/testdata/nvidia/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d manifests: %v", len(files), err)
	}
	story, err := os.ReadFile("../e2e/published_test.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			if !bytes.Contains(story, fmt.Appendf(nil, "file: %q", name)) {
				t.Error("TestPublishedManifests does not apply it")
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.HasPrefix(text, []byte("# ")) {
				t.Error("no comment says which manifest it stands for")
			}
			for _, object := range strings.Split(string(text), "\n---\n") {
				checkObject(t, object)
			}
		})
	}
}

// checkObject checks the fields of an object, the parameters for Tandem in it and its CEL expressions.
func checkObject(t *testing.T, text string) {
	t.Helper()
	var meta struct{ Kind string }
	if err := yaml.Unmarshal([]byte(text), &meta); err != nil {
		t.Fatal(err)
	}
	object := map[string]any{
		"Pod": &corev1.Pod{}, "Deployment": &appsv1.Deployment{}, "Job": &batchv1.Job{}, "ResourceClaim": &resourceapi.ResourceClaim{},
		"ResourceClaimTemplate": &resourceapi.ResourceClaimTemplate{}, "DeviceClass": &resourceapi.DeviceClass{},
	}[meta.Kind]
	if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
		t.Fatalf("%s: %v", meta.Kind, err)
	}
	var selectors []resourceapi.DeviceSelector
	var requests []resourceapi.DeviceRequest
	switch o := object.(type) {
	case *resourceapi.DeviceClass:
		selectors = o.Spec.Selectors
	case *resourceapi.ResourceClaim:
		requests = o.Spec.Devices.Requests
	case *resourceapi.ResourceClaimTemplate:
		requests = o.Spec.Spec.Devices.Requests
	default:
		return
	}
	for _, r := range requests {
		if r.Exactly != nil {
			selectors = append(selectors, r.Exactly.Selectors...)
		}
	}
	for _, s := range selectors {
		if result := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true}).CompileCELExpression(s.CEL.Expression, cel.Options{}); result.Error != nil {
			t.Errorf("%s: %v", s.CEL.Expression, result.Error)
		}
	}
	raw, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	if wrong, err := webhook.Mistakes(meta.Kind, "gpu.nvidia.com", raw, nil); err != nil || len(wrong) > 0 {
		t.Errorf("%s: %v %v", meta.Kind, wrong, err)
	}
}
