// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/legacy"
	"github.com/tandem-gpu/tandem/pkg/nvml"
)

// The configuration reaches the device plugin.
func TestPluginConfig(t *testing.T) {
	c := config.Config{
		NodeName: "node-1", KubeletDir: "/kubelet", Mode: config.ModeDual,
		ResourceName: "nvidia.com/gpu", MIGStrategy: device.MIGStrategyMixed, AllocationPolicy: "packed",
		DeviceListStrategies: []string{"envvar", "volume-mounts"}, DeviceIDStrategy: "index",
		CDIAnnotationPrefix: "cdi.example.com/", PassDeviceSpecs: true,
	}
	got := (&agent{config: c}).pluginConfig(components{node: &nvml.Node{}}, new(gpunode.Object))
	for what, passed := range map[string]bool{
		"NodeName":         got.NodeName == "node-1",
		"Directory":        got.Directory == "/kubelet/device-plugins",
		"Resources":        got.Resources == device.Resources{GPU: "nvidia.com/gpu", Strategy: device.MIGStrategyMixed},
		"Packed":           got.Packed,
		"Strategies":       slices.Equal(got.Strategies, []legacy.Strategy{legacy.StrategyEnvVar, legacy.StrategyVolumeMounts}),
		"IndexIDs":         got.IndexIDs,
		"AnnotationPrefix": got.AnnotationPrefix == "cdi.example.com/",
		"PassDeviceSpecs":  got.PassDeviceSpecs,
		"Retiring":         !got.Retiring,
	} {
		if !passed {
			t.Errorf("%s is not as configured: %+v", what, got)
		}
	}
}

// Both APIs are served although a hung GPU keeps the first CDI specs from being written.
func TestSpecsAreAwaitedForAWhile(t *testing.T) {
	hung := cdi.New(cdi.Options{Dir: t.TempDir()}) // nothing runs it
	a := &agent{times: times{specsWait: time.Millisecond}}
	if !a.awaitSpecs(t.Context(), hung) {
		t.Error("a start ends because a GPU hangs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if a.awaitSpecs(ctx, hung) {
		t.Error("a start goes on after its end")
	}
}
