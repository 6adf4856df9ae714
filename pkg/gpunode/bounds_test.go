// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// definition returns the schema of a GPUNode as the chart installs it.
func definition(t *testing.T) apiextensionsv1.JSONSchemaProps {
	t.Helper()
	data, err := os.ReadFile("../../deployments/helm/tandem/files/tandem-gpu.dev_gpunodes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var parsed apiextensionsv1.CustomResourceDefinition
	if err := yaml.Unmarshal(data, &parsed); err != nil {
		t.Fatal(err)
	}
	return *parsed.Spec.Versions[0].Schema.OpenAPIV3Schema
}

// violations returns where a value exceeds its schema; with a nil value, what the schema leaves unbounded.
func violations(at string, of apiextensionsv1.JSONSchemaProps, value any) (found []string) {
	switch of.Type {
	case "object":
		fields, _ := value.(map[string]any)
		for name, field := range of.Properties {
			if v, ok := fields[name]; ok || value == nil {
				found = append(found, violations(at+"."+name, field, v)...)
			}
		}
	case "array":
		list, _ := value.([]any)
		if of.MaxItems == nil || len(list) > int(*of.MaxItems) {
			found = append(found, fmt.Sprintf("%s: %d entries", at, len(list)))
		}
		if value == nil {
			list = []any{nil}
		}
		for _, v := range list {
			found = append(found, violations(at+"[]", *of.Items.Schema, v)...)
		}
	case "string":
		text, _ := value.(string)
		if of.MaxLength == nil && of.Enum == nil && of.Format == "" || of.MaxLength != nil && utf8.RuneCountInString(text) > int(*of.MaxLength) {
			found = append(found, fmt.Sprintf("%s: %d characters", at, len(text)))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// A stolen token of an agent must not fill the memory of the controller: every list and text has a bound.
func TestEverythingIsBounded(t *testing.T) {
	whole := definition(t)
	for _, part := range []string{"spec", "status"} {
		if found := violations(part, whole.Properties[part], nil); len(found) > 0 {
			t.Errorf("unbounded: %s", strings.Join(found, ", "))
		}
	}
	for path, want := range map[string]int{
		"spec.claims": v1alpha1.MaxClaims, "spec.daemons": v1alpha1.MaxDaemons, "spec.maintenance": v1alpha1.MaxMaintenance,
		"spec.taints": v1alpha1.MaxTaints, "status.devices": v1alpha1.MaxDevices, "status.devices.taints": v1alpha1.MaxDeviceTaints,
		"status.devices.holders": v1alpha1.MaxHolders, "status.devices.holders.pods": v1alpha1.MaxPods,
		"status.conflicts": v1alpha1.MaxConflicts, "status.conflicts.pods": v1alpha1.MaxPods,
		"status.daemons": v1alpha1.MaxDaemons, "status.unknownDaemons": v1alpha1.MaxDaemons,
	} {
		of := whole
		for _, name := range strings.Split(path, ".") {
			if of.Items != nil {
				of = *of.Items.Schema
			}
			of = of.Properties[name]
		}
		if of.MaxItems == nil || *of.MaxItems != int64(want) {
			t.Errorf("%s: %v in the definition, %d in Go", path, of.MaxItems, want)
		}
	}
}

// grotesque is a status of which every part is too long.
func grotesque() v1alpha1.GPUNodeStatus {
	const many = 3000
	long := strings.Repeat("ü", v1alpha1.MaxLine)
	status := v1alpha1.GPUNodeStatus{Mode: "Dual", Holders: long + long}
	pods := make([]v1alpha1.PodReference, many)
	uids := make([]types.UID, many)
	for i := range many {
		pods[i].UID, uids[i] = types.UID(fmt.Sprint(i)), types.UID(fmt.Sprint(i))
		status.UnknownDaemons = append(status.UnknownDaemons, fmt.Sprint("u", i))
		status.Daemons = append(status.Daemons, v1alpha1.MPSDaemon{Name: fmt.Sprint("d", i)})
		status.Conflicts = append(status.Conflicts, v1alpha1.ConflictingClaim{UID: uids[i]})
		status.Devices = append(status.Devices, v1alpha1.DeviceStatus{Name: fmt.Sprint("gpu-", i)})
	}
	status.Devices[0].UnhealthyReason, status.Devices[0].Holders = long, make([]v1alpha1.DeviceHolder, many)
	status.Devices[0].Holders[0].Pods = pods
	status.Conflicts[0].Message, status.Conflicts[0].Pods = long, uids
	return status
}

// The agent writes as much as the API server accepts, and how much it left out.
func TestBounded(t *testing.T) {
	check := func(status v1alpha1.GPUNodeStatus) []string {
		t.Helper()
		data, err := json.Marshal(status)
		if err != nil {
			t.Fatal(err)
		}
		var value any
		if err := json.Unmarshal(data, &value); err != nil {
			t.Fatal(err)
		}
		return violations("status", definition(t).Properties["status"], value)
	}
	if found := check(grotesque()); len(found) != 10 {
		t.Fatalf("the check finds only %v", found)
	}
	got := bounded(grotesque())
	if found := check(got); len(found) > 0 {
		t.Errorf("too long: %v", found)
	}
	const many = 3000
	want := 2*many - v1alpha1.MaxDevices - v1alpha1.MaxConflicts + 2*(many-v1alpha1.MaxDaemons) + many - v1alpha1.MaxHolders +
		2*(many-v1alpha1.MaxPods)
	if int(got.Omitted) != want {
		t.Errorf("%d omitted, want %d", got.Omitted, want)
	}
	if c := got.Conflicts[0]; !utf8.ValidString(c.Message) || len(c.Message) > v1alpha1.MaxMessage || !strings.HasSuffix(c.Message, "ü …") {
		t.Errorf("message of %d bytes", len(c.Message))
	}
	small := v1alpha1.GPUNodeStatus{Holders: "gpu-0=a/b(pod)", UnknownDaemons: []string{"a"}}
	if got := bounded(small); got.Omitted != 0 || got.Holders != small.Holders || len(got.UnknownDaemons) != 1 {
		t.Errorf("%+v", got)
	}
}

// TestSizeOfTaints: with the longest taints on all devices, etcd accepts what rules put into the spec and into the status, and each device
// has its worst taint. etcd refuses 1.5 MB, and managed fields add at most as much again.
func TestSizeOfTaints(t *testing.T) {
	long := func(n int) string { return strings.Repeat("x", n) }
	taint := v1alpha1.Taint{Key: long(317), Value: long(63), Effect: v1alpha1.TaintNoSchedule, Since: &metav1.Time{Time: time.Unix(1700000000, 0)}}
	size := func(value any) int {
		t.Helper()
		data, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		return len(data)
	}
	const most = 400_000
	spec := make([]v1alpha1.RuleTaint, v1alpha1.MaxTaints)
	for i := range spec {
		spec[i] = v1alpha1.RuleTaint{Rule: long(253), Pool: long(253), Device: long(128), Taint: taint}
	}
	if got := size(spec); got > most {
		t.Errorf("spec.taints has %d bytes", got)
	}
	for devices, each := range map[int]int{64: 8, 128: 4, 300: 1, v1alpha1.MaxDevices: 1} {
		status := v1alpha1.GPUNodeStatus{Devices: make([]v1alpha1.DeviceStatus, devices)}
		plain := size(status)
		for i := range status.Devices {
			worst := v1alpha1.DeviceTaint{Rule: "worst", Taint: taint}
			status.Devices[i].Taints = append([]v1alpha1.DeviceTaint{worst}, slices.Repeat([]v1alpha1.DeviceTaint{{Rule: long(253), Taint: taint}}, 20)...)
		}
		got := bounded(status)
		if added := size(got) - plain; added > most || got.Omitted > 0 {
			t.Errorf("%d devices: the taints have %d bytes, %d entries are omitted", devices, added, got.Omitted)
		}
		for _, d := range got.Devices {
			if len(d.Taints) != each || d.Taints[0].Rule != "worst" {
				t.Fatalf("%d devices: one has %d taints, want %d", devices, len(d.Taints), each)
			}
		}
	}
}
