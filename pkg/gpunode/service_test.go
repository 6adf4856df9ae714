// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
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

// rule is the entry of a DeviceTaintRule.
func rule(name, pool, device string, effect v1alpha1.TaintEffect) v1alpha1.RuleTaint {
	since := metav1.NewTime(time.Unix(1700000000, 0))
	return v1alpha1.RuleTaint{Rule: name, Pool: pool, Device: device, Taint: v1alpha1.Taint{Key: "example.com/repair", Value: "fan", Effect: effect, Since: &since}}
}

// A device that a rule taints is told to the device plugin, in the status, in one event for the rule and in a metric, also over a restart of
// the agent. What begins or ends while no agent runs, the next one reports. Other devices are not concerned, and no claim is.
func TestTaints(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, stop := f.start()
	o.Place(nil)
	f.awaitStatus("a status", free(2))
	f.hold("c1", "GPU-1")
	f.api.taint("node-1", rule("fans", "", "gpu-1", v1alpha1.TaintNoSchedule), rule("other", "node-1", "gpu-7", v1alpha1.TaintNoExecute))
	status := f.awaitStatus("the taint", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Tainted == 1 }).Status
	want := v1alpha1.DeviceTaint{Rule: "fans", Taint: rule("", "", "", v1alpha1.TaintNoSchedule).Taint}
	switch d := status.Devices[1]; {
	case len(d.Taints) != 1 || !apiequality.Semantic.DeepEqual(d.Taints[0], want):
		t.Errorf("gpu-1 has the taints %+v", d.Taints)
	case len(d.Holders) != 1 || status.Counts.Claims != 0 || status.Counts.Free != 1 || len(status.Devices[0].Taints) > 0:
		t.Errorf("status %+v", status)
	}
	why := func() []string {
		of := o.OutOfService()
		return []string{of(device.Device{GPU: gpu(0, "GPU-0")}), of(device.Device{GPU: gpu(1, "GPU-1")})}
	}
	const says = "it has the taint example.com/repair=fan:NoSchedule of DeviceTaintRule fans"
	if got := why(); !slices.Equal(got, []string{"", says}) || len(o.Maintenance()) > 0 {
		t.Errorf("out of service: %q, under maintenance: %v", got, o.Maintenance())
	}
	f.awaitEvent("Normal GPUTainted gpu-1: taint example.com/repair=fan:NoSchedule of DeviceTaintRule fans. No new pod with limits gets a device " +
		"with a taint, and no claim that does not tolerate it. The taint ends with the rule")
	f.quiet()
	stop()
	o, stop = f.start()
	f.awaitStatus("the next agent", func(s v1alpha1.GPUNodeStatus) bool { return s.ExtendedResource != "" })
	if !o.AwaitSpec(t.Context()) || why()[1] != says {
		t.Errorf("the next agent says %q", why())
	}
	labels := []string{"gpu-1", "NoSchedule", "example.com/repair", "fans", "GPU-1", "fan"}
	if got := f.metric("tandem_device_taint", labels...); got != 1 {
		t.Errorf("the metric is %v, want 1", got)
	}
	f.api.taint("node-1")
	f.awaitStatus("the end", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Tainted == 0 && s.Counts.Claims == 1 })
	f.awaitEvent("Normal GPUTaintEnded gpu-1: taint example.com/repair=fan:NoSchedule of DeviceTaintRule fans has ended")
	if got := f.metric("tandem_device_taint", labels...); got != 0 {
		t.Errorf("the metric is %v, want 0", got)
	}
	stop()
	f.api.taint("node-1", rule("fans", "", "gpu-0", v1alpha1.TaintNoSchedule))
	_, stop = f.start()
	f.awaitEvent("Normal GPUTainted gpu-0: taint example.com/repair=fan:NoSchedule of DeviceTaintRule fans. No new pod with limits gets a device " +
		"with a taint, and no claim that does not tolerate it. The taint ends with the rule")
	stop()
	f.api.taint("node-1")
	f.start()
	f.awaitEvent("Normal GPUTaintEnded gpu-0: taint example.com/repair=fan:NoSchedule of DeviceTaintRule fans has ended")
}

// While a device is gone, or the status has no room for all of its taints, its rules stay: no event says that they have ended or begun again.
func TestTaintEvents(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, _ := f.start()
	o.Place(nil)
	f.awaitStatus("a status", free(2))
	begins := func(of, rule, effect string) string {
		return "Normal GPUTainted " + of + ": taint example.com/repair=fan:" + effect + " of DeviceTaintRule " + rule + ". No new pod with limits gets a device " +
			"with a taint, and no claim that does not tolerate it. The taint ends with the rule"
	}
	ends := func(of, rule string) string {
		return "Normal GPUTaintEnded " + of + ": taint example.com/repair=fan:NoSchedule of DeviceTaintRule " + rule + " has ended"
	}
	both, one := f.inventory.get(), device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0")}}
	has := func(devices int) func(v1alpha1.GPUNodeStatus) bool {
		return func(s v1alpha1.GPUNodeStatus) bool { return len(s.Devices) == devices }
	}
	fans, other := rule("fans", "", "", v1alpha1.TaintNoSchedule), rule("other", "", "gpu-1", v1alpha1.TaintNoSchedule)
	f.api.taint("node-1", fans, other)
	f.awaitEvent(begins("gpu-0, gpu-1", "fans", "NoSchedule"))
	f.awaitEvent(begins("gpu-1", "other", "NoSchedule"))
	f.inventory.set(one)
	f.awaitStatus("one GPU", has(1))
	f.inventory.set(both)
	f.awaitStatus("both GPUs", has(2))
	f.inventory.set(one)
	f.awaitStatus("one GPU", has(1))
	f.api.taint("node-1")
	f.awaitEvent(ends("gpu-0", "fans"))
	f.inventory.set(both)
	f.awaitStatus("both GPUs", has(2))
	f.api.taint("node-1", other)
	f.awaitEvent(begins("gpu-1", "other", "NoSchedule"))

	var rules []v1alpha1.RuleTaint
	for i := range v1alpha1.MaxDeviceTaints {
		rules = append(rules, rule(fmt.Sprint("rule-", i), "", "gpu-0", v1alpha1.TaintNoSchedule))
	}
	f.api.taint("node-1", append(rules, other)...)
	for _, r := range rules {
		f.awaitEvent(begins("gpu-0", r.Rule, "NoSchedule"))
	}
	f.api.taint("node-1", append(rules, other, rule("worse", "", "gpu-0", v1alpha1.TaintNoExecute))...)
	f.awaitStatus("the worse one, instead of another", func(s v1alpha1.GPUNodeStatus) bool {
		return len(s.Devices[0].Taints) == v1alpha1.MaxDeviceTaints && s.Devices[0].Taints[0].Rule == "worse"
	})
	f.awaitEvent(begins("gpu-0", "worse", "NoExecute"))
	f.api.taint("node-1", rules...)
	f.awaitStatus("the other one again", func(s v1alpha1.GPUNodeStatus) bool { return s.Devices[0].Taints[0].Rule == "rule-0" })
	f.awaitEvent(ends("gpu-1", "other"))
	f.awaitEvent("Normal GPUTaintEnded gpu-0: taint example.com/repair=fan:NoExecute of DeviceTaintRule worse has ended")
}

// A rule selects a device by its own name and its pool, as the scheduler's. A rule that names the pool of the node for a dynamic GPU selects
// nothing, and an event says what to write instead.
func TestTaintsOfPools(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	o, _ := f.start()
	f.awaitStatus("a status", free(2))
	f.api.taint("node-1", rule("by-node", "node-1", "", v1alpha1.TaintNoSchedule), rule("elsewhere", "node-1", "gpu-1", v1alpha1.TaintNoExecute))
	f.awaitStatus("both GPUs", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Tainted == 2 })
	// Before the driver has placed the GPUs, each may be in either of its pools.
	f.api.taint("node-1", rule("by-pool", "node-1/gpu-01", "", v1alpha1.TaintNoSchedule))
	f.awaitStatus("one GPU", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Tainted == 1 && len(s.Devices[1].Taints) == 1 })
	f.api.taint("node-1", rule("by-node", "node-1", "", v1alpha1.TaintNoSchedule), rule("elsewhere", "node-1", "gpu-1", v1alpha1.TaintNoExecute))
	f.awaitStatus("both GPUs", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Tainted == 2 })
	o.Place(map[string]string{"GPU-1": "node-1/gpu-01"})
	f.awaitStatus("one GPU", func(s v1alpha1.GPUNodeStatus) bool { return s.Counts.Tainted == 1 && len(s.Devices[0].Taints) == 1 })
	misses := map[string]bool{}
	for len(misses) < 2 {
		select {
		case got := <-f.recorder.Events:
			if strings.Contains(got, "TaintRuleMisses") {
				misses[got] = true
			}
		case <-time.After(patience):
			t.Fatalf("events %v", misses)
		}
	}
	for _, name := range []string{"by-node", "elsewhere"} {
		if want := "Normal TaintRuleMisses DeviceTaintRule " + name + " has pool node-1 and so does not select gpu-1: write pool: node-1/gpu-01, one rule for " +
			"each pool. A dynamic GPU has a pool of its own. A rule without a pool selects devices of all nodes"; !misses[want] {
			t.Errorf("no event %q in %v", want, misses)
		}
	}
	f.hold("c1", "GPU-0")
	f.awaitStatus("a holder", func(s v1alpha1.GPUNodeStatus) bool { return s.Holders != "" })
	for len(f.recorder.Events) > 0 {
		if got := <-f.recorder.Events; strings.Contains(got, "TaintRuleMisses") {
			t.Errorf("again: %s", got)
		}
	}
	f.api.taint("node-1", rule("by-device", "", "gpu-1", v1alpha1.TaintNoSchedule), rule("by-pool", "node-1/gpu-01", "", v1alpha1.TaintNoExecute))
	f.awaitStatus("the other one, the worst taint first", func(s v1alpha1.GPUNodeStatus) bool {
		of := s.Devices[1].Taints
		return len(s.Devices[0].Taints) == 0 && len(of) == 2 && of[0].Rule == "by-pool" && of[1].Rule == "by-device"
	})
}

// A taint of a GPU is not one of its partitions, nor the other way round. A GPU with static partitions has none, unless pods get it as a whole.
// What a pod holds stays as kubelet has it, and the rest is withdrawn before kubelet says so.
func TestStatusOfTaints(t *testing.T) {
	f := partitioned()
	names := map[string]bool{}
	for _, d := range Status(f).Devices {
		names[d.Name] = true
	}
	for _, strategy := range []device.MIGStrategy{device.MIGStrategyMixed, device.MIGStrategyNone} {
		f.Limits.Strategy = strategy
		for tainted := range names {
			f.Taints = func(_ device.GPU, name string) []v1alpha1.DeviceTaint {
				return make([]v1alpha1.DeviceTaint, map[bool]int{true: 1}[name == tainted])
			}
			none := strategy == device.MIGStrategyMixed && slices.Contains([]string{"gpu-1", "gpu-2", "gpu-4"}, tainted)
			for _, d := range Status(f).Devices {
				if (len(d.Taints) > 0) != (d.Name == tainted && !none) {
					t.Errorf("strategy %s, %s is tainted; %s: %v", strategy, tainted, d.Name, d.Taints)
				}
			}
		}
	}
	f = partitioned()
	many := func(device.GPU, string) []v1alpha1.DeviceTaint { return make([]v1alpha1.DeviceTaint, 20) }
	f.Taints = many
	if s := bounded(Status(f)); len(s.Devices[0].Taints) != v1alpha1.MaxDeviceTaints || s.Omitted > 0 {
		t.Errorf("%d taints, %d entries omitted", len(s.Devices[0].Taints), s.Omitted)
	}
	f = Facts{
		Mode: "Dual", Limits: device.Resources{GPU: "nvidia.com/gpu"}, Inventory: device.Inventory{GPUs: []device.GPU{gpu(0, "GPU-0")}},
		Allocatable: map[string][]string{"nvidia.com/gpu": {"GPU-0"}}, Taints: many,
	}
	if got := Status(f).Devices[0].ExtendedResourceState; got != v1alpha1.ExtendedResourceWithdrawn {
		t.Errorf("a free GPU is %q", got)
	}
	f.Holds = []ledger.Hold{limit("GPU-0", ledger.StateHeld)}
	if got := Status(f).Devices[0].ExtendedResourceState; got != v1alpha1.ExtendedResourceAllocatable {
		t.Errorf("a GPU that a pod holds is %q", got)
	}
}

// Of rules that do not select what they seem to mean, an event says so. Others are no news.
func TestMissedBy(t *testing.T) {
	const own = "has pool node-1 and so does not select gpu-3: write pool: node-1/gpu-03, one rule for each pool. A dynamic GPU has a pool of its own. " +
		"A rule without a pool selects devices of all nodes"
	gpus := partitioned().Inventory.GPUs // gpu-2 has partitions, gpu-3 is dynamic
	pools := map[string]string{"GPU-3": "node-1/gpu-03"}
	for _, c := range []struct{ pool, device, want string }{
		{"", "", ""}, {"", "gpu-0", ""}, {"", "gpu-3", ""}, {"", "gpu-9", ""},
		{"node-1", "gpu-0", ""},
		{"node-1", "", own},
		{"node-1", "gpu-3", own},
		{"node-1", "gpu-3-mig-1g10gb-19-0", own},
		{"node-1/gpu-03", "", ""}, {"node-1/gpu-03", "gpu-3", ""},
		{"node-1/gpu-03", "gpu-0", "has pool node-1/gpu-03 and so does not select gpu-0: write pool: node-1, one rule for each pool. A dynamic GPU has a pool " +
			"of its own. A rule without a pool selects devices of all nodes"},
		{"node-1", "gpu-9", "selects no device: this node has no gpu-9"},
		{"", "gpu-2", "selects gpu-2 and not its partitions, which are devices of their own: write one rule for each partition, or use kubectl gpu drain node-1/gpu-2"},
	} {
		if got := missedBy(rule("r", c.pool, c.device, v1alpha1.TaintNoSchedule), "node-1", gpus, pools); got != c.want {
			t.Errorf("pool %q, device %q: %q, want %q", c.pool, c.device, got, c.want)
		}
	}
}
