// SPDX-License-Identifier: Apache-2.0

package wiring

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/legacy"
)

// hardware has a driver root, and nothing else.
type hardware struct{ Hardware }

func (hardware) DriverRoot() string { return "/" }

// The configuration reaches the device plugin.
func TestPluginConfig(t *testing.T) {
	c := config.Config{
		NodeName: "node-1", RunDir: t.TempDir(), KubeletDir: "/kubelet", Mode: config.ModeDual,
		ResourceName: "nvidia.com/gpu", MIGStrategy: device.MIGStrategyMixed, AllocationPolicy: "packed",
		DeviceListStrategies: []string{"envvar", "volume-mounts"}, DeviceIDStrategy: "index",
		CDIAnnotationPrefix: "cdi.example.com/", PassDeviceSpecs: true,
	}
	p, err := New(Options{Config: c, BootID: "boot", Registerer: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	p.Hardware = hardware{}
	if problems, err := p.Open(t.Context()); err != nil || len(problems) > 0 {
		t.Fatal(problems, err)
	}
	defer p.Ledger.Close()
	p.Connect(c)
	got := p.limitsConfig(Serving{Config: c})
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

// The namespace of the configuration counts only if the agent runs in a pod. Otherwise it is only assumed.
func TestMonitorNamespaces(t *testing.T) {
	c := config.Defaults()
	c.MonitorNamespaces, c.ExemptNamespaces = []string{"monitoring"}, []string{"gpu-operator"}
	if got, want := monitorNamespaces(c), []string{"kube-system", "gpu-operator", "monitoring"}; !slices.Equal(got, want) {
		t.Errorf("outside a pod: %q, want %q", got, want)
	}
	c.PodUID, c.Namespace = "own", "tandem-system"
	if got, want := monitorNamespaces(c), []string{"kube-system", "gpu-operator", "monitoring", "tandem-system"}; !slices.Equal(got, want) {
		t.Errorf("in a pod: %q, want %q", got, want)
	}
}
