// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"maps"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// awaitEvent waits for the next event and compares it.
func (f *fixture) awaitEvent(want string) {
	f.Helper()
	select {
	case got := <-f.recorder.Events:
		if got != want {
			f.Errorf("event %q, want %q", got, want)
		}
	case <-time.After(patience):
		f.Fatalf("no event %q", want)
	}
}

// A GPU that an administrator takes out of service is told to the front-ends, in the status, in one event and in a metric, also over a
// restart of the agent.
func TestMaintenance(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, stop := f.start()
	f.awaitStatus("a status", free(2))
	f.hold("c1", "GPU-1")
	since := metav1.NewTime(time.Unix(1700000000, 0))
	f.api.maintain("node-1", v1alpha1.GPUMaintenance{UUID: "GPU-1", Reason: "replace fan", Since: &since}, v1alpha1.GPUMaintenance{UUID: "GPU-9"})
	status := f.awaitStatus("the maintenance", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Maintenance == 1 }).Status
	switch d := status.Devices[1]; {
	case d.Maintenance == nil || d.Maintenance.Reason != "replace fan" || !d.Maintenance.Since.Equal(&since):
		t.Errorf("gpu-1 has the maintenance %+v", d.Maintenance)
	case len(d.Holders) != 1 || status.Counts.Claims != 0 || status.Counts.Free != 1 || status.Devices[0].Maintenance != nil:
		t.Errorf("status %+v", status)
	}
	if got := o.Maintenance(); !maps.Equal(got, map[string]bool{"GPU-1": true, "GPU-9": true}) {
		t.Errorf("under maintenance are %v", got)
	}
	f.awaitEvent("Normal GPUMaintenance gpu-1 (GPU-1) is under maintenance: replace fan. No new claim or pod gets it, and its holders keep it. " +
		"kubectl gpu undrain node-1/gpu-1 ends the maintenance")
	f.quiet()
	stop()
	o, _ = f.start()
	f.awaitStatus("the next agent", func(s v1alpha1.GPUNodeStatus) bool { return s.ExtendedResource != "" })
	if !o.AwaitSpec(t.Context()) || !o.Maintenance()["GPU-1"] {
		t.Error("the next agent does not know of the maintenance")
	}
	if got := f.metric("tandem_gpu_maintenance", "gpu-1", "GPU-1"); got != 1 {
		t.Errorf("the metric is %v, want 1", got)
	}
	f.api.maintain("node-1")
	f.awaitStatus("the end", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Maintenance == 0 && s.Counts.Claims == 1 })
	f.awaitEvent("Normal GPUInService gpu-1 (GPU-1) is in service again: its maintenance has ended")
	if got := f.metric("tandem_gpu_maintenance", "gpu-1", "GPU-1"); got != 0 {
		t.Errorf("the metric is %v, want 0", got)
	}
}

// A start waits for the spec while it may have entries, and for no longer.
func TestAwaitSpec(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set  func(*fakeAPI)
		want bool
	}{
		"no object":         {func(*fakeAPI) {}, true},
		"no such resource":  {func(f *fakeAPI) { f.absent = true }, true},
		"no right to it":    {func(f *fakeAPI) { f.refused = true }, true},
		"server has broken": {func(f *fakeAPI) { f.broken = true }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.api.set(func() { c.set(f.api) })
			o, _ := f.start()
			limit := patience
			if !c.want {
				limit = 200 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			if got := o.AwaitSpec(ctx); got != c.want {
				t.Errorf("the spec is known: %t", got)
			}
		})
	}
}

// Partitions follow their GPU. What a pod holds stays as kubelet has it, and the rest is withdrawn before kubelet says so.
func TestStatusOfMaintenance(t *testing.T) {
	f := partitioned()
	f.Maintenance = []v1alpha1.GPUMaintenance{{UUID: f.Inventory.GPUs[0].UUID, Reason: "x"}}
	for _, d := range Status(f).Devices {
		of := d.Parent
		if of == "" {
			of = d.Name
		}
		if (d.Maintenance != nil) != (of == f.Inventory.GPUs[0].Name()) {
			t.Errorf("%s: %+v", d.Name, d.Maintenance)
		}
	}
	for name, c := range map[string]struct {
		holds  []ledger.Hold
		listed []string
		want   v1alpha1.ExtendedResourceState
	}{
		"free, kubelet not told":   {nil, []string{"GPU-0"}, v1alpha1.ExtendedResourceWithdrawn},
		"free, kubelet told":       {nil, nil, v1alpha1.ExtendedResourceWithdrawn},
		"a pod holds it":           {[]ledger.Hold{limit("GPU-0", ledger.StateHeld)}, []string{"GPU-0"}, v1alpha1.ExtendedResourceAllocatable},
		"the pod has ended":        {[]ledger.Hold{limit("GPU-0", ledger.StateDraining)}, []string{"GPU-0"}, v1alpha1.ExtendedResourceWithdrawn},
		"a claim holds it, not it": {[]ledger.Hold{claim("c", "c", "GPU-0", ledger.StateHeld)}, []string{"GPU-0"}, v1alpha1.ExtendedResourceWithdrawn},
	} {
		t.Run(name, func(t *testing.T) {
			f := Facts{
				Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu"}, Inventory: device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0")}},
				Allocatable: map[string][]string{"nvidia.com/gpu": c.listed}, Holds: c.holds,
				Maintenance: []v1alpha1.GPUMaintenance{{UUID: "GPU-0", Reason: strings.Repeat("x", 256)}},
			}
			if got := Status(f).Devices[0].ExtendedResourceState; got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}
