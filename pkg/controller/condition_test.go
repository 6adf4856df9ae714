// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func TestGPUsHealthy(t *testing.T) {
	gpu := func(name, reason string) v1alpha1.DeviceStatus {
		return v1alpha1.DeviceStatus{Name: name, UnhealthyReason: reason}
	}
	part := func(name, parent, reason string) v1alpha1.DeviceStatus {
		return v1alpha1.DeviceStatus{Name: name, Parent: parent, UnhealthyReason: reason}
	}
	excluded := gpu("gpu-0", "Lost: it has fallen off the bus")
	excluded.Excluded = true
	for name, test := range map[string]struct {
		devices         []v1alpha1.DeviceStatus
		status, message string
		served          bool
	}{
		"no GPU":                  {nil, "True/AllHealthy", "all GPUs", false},
		"all healthy":             {[]v1alpha1.DeviceStatus{gpu("gpu-0", "")}, "True/AllHealthy", "all GPUs", true},
		"a GPU and its partition": {[]v1alpha1.DeviceStatus{gpu("gpu-0", "Lost: x"), part("gpu-0-mig-1", "gpu-0", "Lost: x")}, "False/Lost", "gpu-0: Lost: x", true},
		"a partition":             {[]v1alpha1.DeviceStatus{gpu("gpu-0", ""), part("gpu-0-mig-1", "gpu-0", "XID: 94")}, "False/XID", "gpu-0-mig-1: XID: 94", true},
		"two faults":              {[]v1alpha1.DeviceStatus{gpu("gpu-0", "Lost: x"), gpu("gpu-1", "XID: y")}, "False/SeveralFaults", "gpu-0: Lost: x; gpu-1: XID: y", true},
		"an excluded GPU":         {[]v1alpha1.DeviceStatus{excluded}, "True/AllHealthy", "all GPUs", true},
		"a partition in creation": {[]v1alpha1.DeviceStatus{gpu("gpu-0", ""), part("p", "gpu-0", "its GPU instance has no compute instance")}, "True/AllHealthy", "all", true},
	} {
		got, served := GPUsHealthy(v1alpha1.GPUNodeStatus{Devices: test.devices})
		if text := string(got.Status) + "/" + got.Reason; text != test.status || !strings.HasPrefix(got.Message, test.message) || served != test.served {
			t.Errorf("%s: %s %q, served %v", name, text, got.Message, served)
		}
	}
	long := []v1alpha1.DeviceStatus{gpu("gpu-0", "Lost: "+strings.Repeat("ä", 2000))}
	if got, _ := GPUsHealthy(v1alpha1.GPUNodeStatus{Devices: long}); len(got.Message) > 1024 || len(got.Message) < 1000 || strings.ContainsRune(got.Message, '\uFFFD') {
		t.Errorf("the message has %d bytes", len(got.Message))
	}
}

func TestGPURepairNeeded(t *testing.T) {
	device := func(name, parent string, repair v1alpha1.Repair) v1alpha1.DeviceStatus {
		return v1alpha1.DeviceStatus{Name: name, Parent: parent, UnhealthyReason: "Fault: of " + name, Repair: repair}
	}
	excluded := device("gpu-0", "", v1alpha1.RepairReplace)
	excluded.Excluded = true
	for name, test := range map[string]struct {
		devices         []v1alpha1.DeviceStatus
		status, message string
	}{
		"no GPU":                    {nil, "False/NoFault", "no GPU has a hardware fault"},
		"no hardware fault":         {[]v1alpha1.DeviceStatus{device("gpu-0", "", "")}, "False/NoFault", "no GPU has a hardware fault"},
		"an excluded GPU":           {[]v1alpha1.DeviceStatus{excluded}, "False/NoFault", "no GPU has a hardware fault"},
		"of an older agent":         {[]v1alpha1.DeviceStatus{{Name: "gpu-0", UnhealthyReason: "Lost: gone"}}, "True/Reboot", "gpu-0 needs Reboot: Lost: gone"},
		"a repair of a newer agent": {[]v1alpha1.DeviceStatus{device("gpu-0", "", "Later")}, "False/NoFault", "no GPU has a hardware fault"},
		"beside one that is known": {
			[]v1alpha1.DeviceStatus{device("gpu-0", "", "Later"), device("gpu-1", "", "Reset")}, "False/Reset", "gpu-1 needs Reset: Fault: of gpu-1",
		},
		"a partition":              {[]v1alpha1.DeviceStatus{device("gpu-0-mig-1", "gpu-0", "Reset")}, "False/Reset", "gpu-0-mig-1 needs Reset: Fault: of gpu-0-mig-1"},
		"a GPU with its partition": {[]v1alpha1.DeviceStatus{device("gpu-0", "", "Reboot"), device("gpu-0-mig-1", "gpu-0", "Reboot")}, "True/Reboot", "gpu-0 needs Reboot: Fault: of gpu-0"},
		"the worst of several faults": {
			[]v1alpha1.DeviceStatus{device("gpu-0", "", "Reset"), device("gpu-1", "", "Replace"), device("gpu-2", "", "Reboot")}, "True/Replace",
			"gpu-0 needs Reset: Fault: of gpu-0; gpu-1 needs Replace: Fault: of gpu-1; gpu-2 needs Reboot: Fault: of gpu-2",
		},
	} {
		got := GPURepairNeeded(v1alpha1.GPUNodeStatus{Devices: test.devices})
		if text := string(got.Status) + "/" + got.Reason; text != test.status || got.Message != test.message || got.Type != ConditionGPURepairNeeded {
			t.Errorf("%s: %s %q", name, text, got.Message)
		}
	}
}

// The conditions follow the GPUNode, are written once for each change, and leave the other conditions alone.
func TestConditions(t *testing.T) {
	node := &corev1.Node{}
	node.Name = "node"
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	gpus := &v1alpha1.GPUNode{}
	gpus.Name = "node"
	gpus.Status.Devices = []v1alpha1.DeviceStatus{{Name: "gpu-0"}, {Name: "gpu-1"}}
	w := newWorld(t, interceptor.Funcs{}, node, gpus)
	r := &conditions{w.cluster()}
	writes := 0
	expect := func(more int, status corev1.ConditionStatus, reason, repair string, since time.Time) {
		t.Helper()
		for range 2 {
			if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "node"}}); err != nil {
				t.Fatal(err)
			}
		}
		if writes += more; w.writes["patch Node"] != writes {
			t.Errorf("%d writes, want %d: %v", w.writes["patch Node"], writes, w.writes)
		}
		now := &corev1.Node{}
		if err := w.client.Get(t.Context(), types.NamespacedName{Name: "node"}, now); err != nil {
			t.Fatal(err)
		}
		got := conditionOf(now, ConditionGPUsHealthy)
		if got.Status != status || got.Reason != reason || !got.LastTransitionTime.Time.Equal(since) || len(now.Status.Conditions) != 3 {
			t.Errorf("%+v, want %s, %s, since %v", now.Status.Conditions, status, reason, since)
		}
		if got := conditionOf(now, ConditionGPURepairNeeded); string(got.Status)+"/"+got.Reason != repair {
			t.Errorf("%+v, want %s", got, repair)
		}
	}
	set := func(change func(*v1alpha1.GPUNode)) {
		t.Helper()
		w.clock = w.clock.Add(time.Minute)
		current := &v1alpha1.GPUNode{}
		if err := w.client.Get(t.Context(), types.NamespacedName{Name: "node"}, current); err != nil {
			t.Fatal(err)
		}
		change(current)
		if err := w.client.Status().Update(t.Context(), current); err != nil {
			t.Fatal(err)
		}
	}
	expect(2, corev1.ConditionTrue, conditionHealthy, "False/NoFault", w.clock)
	set(func(g *v1alpha1.GPUNode) {
		g.Status.Devices[1].UnhealthyReason, g.Status.Devices[1].Repair = "XID: XID 79", v1alpha1.RepairReboot
	})
	since := w.clock
	expect(2, corev1.ConditionFalse, "XID", "True/Reboot", since)
	set(func(g *v1alpha1.GPUNode) { g.Status.Devices[1].UnhealthyReason = "Lost: gone" })
	expect(2, corev1.ConditionFalse, "Lost", "True/Reboot", since)
	set(func(g *v1alpha1.GPUNode) { g.Status.Devices, g.Status.Waiting = nil, "no NVIDIA driver" })
	expect(1, corev1.ConditionUnknown, conditionUnknown, "True/Reboot", w.clock)
	set(func(g *v1alpha1.GPUNode) { g.Status.Waiting = "" })
	expect(2, corev1.ConditionUnknown, conditionUnknown, "Unknown/NotServed", w.clock.Add(-time.Minute))
}

// TestConditionsWithoutADriver: an agent that starts without a driver lists the GPUs that are held. It has found no fault, and ends none.
func TestConditionsWithoutADriver(t *testing.T) {
	hold := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-5"}, Device: device.Ref{GPU: "GPU-5"}, State: ledger.StateRestored}
	for name, c := range map[string]struct {
		repair        v1alpha1.Repair // before
		before, after string
		unread        bool
	}{
		"no fault":                   {"", "False/NoFault", "Unknown/NotServed", true},
		"a GPU to be reset":          {v1alpha1.RepairReset, "False/Reset", "Unknown/NotServed", true},
		"a GPU to be replaced":       {v1alpha1.RepairReplace, "True/Replace", "True/Replace", true},
		"a driver that finds no GPU": {"", "False/NoFault", "True/Reboot", false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, interceptor.Funcs{}, coreNode("8", "8"), gpuNode(func(s *v1alpha1.GPUNodeStatus) {
				if c.repair != "" {
					s.Devices[0].UnhealthyReason, s.Devices[0].Repair = "Fault: x", c.repair
				}
			}))
			r := &conditions{w.cluster()}
			r.client = w.cached()
			expect := func(want string, healthy corev1.ConditionStatus) {
				t.Helper()
				w.twice(r, "node-1")
				node := &corev1.Node{}
				w.get("", "node-1", node)
				got := conditionOf(node, ConditionGPURepairNeeded)
				if text := string(got.Status) + "/" + got.Reason; text != want || conditionOf(node, ConditionGPUsHealthy).Status != healthy {
					t.Errorf("%+v, want %s and %s", node.Status.Conditions, want, healthy)
				}
			}
			expect(c.before, map[bool]corev1.ConditionStatus{true: corev1.ConditionTrue, false: corev1.ConditionFalse}[c.repair == ""])
			facts := gpunode.Facts{Mode: "Dual", Waiting: "no NVIDIA driver", Holds: []ledger.Hold{hold}, Unread: c.unread}
			w.set(func(s *v1alpha1.GPUNodeStatus) { *s = gpunode.Status(facts) })
			expect(c.after, map[bool]corev1.ConditionStatus{true: corev1.ConditionUnknown, false: corev1.ConditionFalse}[c.unread])
		})
	}
}
