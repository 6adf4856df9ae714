// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
)

const (
	probeTimeout    = 5 * time.Second
	probeRetryFirst = time.Second
	probeRetryMost  = time.Minute
)

// probe asks the API server, by a slice that is never stored, which fields it keeps. A server of 1.34 that keeps counters wants
// them otherwise than we have them, all in one slice, and refuses the question.
func (d *Driver) probe(ctx context.Context) (Capabilities, error) {
	kept, err := d.probeWith(ctx, []resourceapi.DeviceCounterConsumption{{
		CounterSet: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: *resource.NewQuantity(1, resource.BinarySI)}},
	}})
	if apierrors.IsInvalid(err) {
		kept, err = d.probeWith(ctx, nil)
	}
	return kept, err
}

func (d *Driver) probeWith(ctx context.Context, consumption []resourceapi.DeviceCounterConsumption) (Capabilities, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	probe := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-" + d.DriverName + "-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   d.DriverName,
			NodeName: ptr.To(d.NodeName),
			Pool:     resourceapi.ResourcePool{Name: d.NodeName, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{strictly(resourceapi.Device{
				Name:             "probe",
				ConsumesCounters: consumption,

				AllowMultipleAllocations: ptr.To(true),
				Taints:                   []resourceapi.DeviceTaint{{Key: TaintHeldByPod, Value: "true", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
			})},
		},
	}
	stored, err := d.KubeClient.ResourceV1().ResourceSlices().Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return Capabilities{}, fmt.Errorf("ask the API server which fields of devices it keeps: %w", err)
	}
	if len(stored.Spec.Devices) != 1 {
		return Capabilities{}, nil
	}
	kept := stored.Spec.Devices[0]
	return Capabilities{
		Taints: len(kept.Taints) == 1, BindingConditions: len(kept.BindingConditions) == 1, Counters: len(kept.ConsumesCounters) == 1,
		Shares: ptr.Deref(kept.AllowMultipleAllocations, false),
	}, nil
}

// learnCapabilities asks until there is an answer, and hands it to learnt. Until then GPUs are withdrawn by leaving them out,
// which every version understands.
func (d *Driver) learnCapabilities(ctx context.Context, learnt func(Capabilities)) {
	for wait := probeRetryFirst; ; wait = min(2*wait, probeRetryMost) {
		kept, err := d.probe(ctx)
		switch {
		case err == nil:
			if !kept.Taints {
				klog.FromContext(ctx).Info("The API server drops device taints, GPUs are withdrawn by leaving them out of their slice")
			}
			if d.Strict && !kept.BindingConditions {
				klog.FromContext(ctx).Info("The API server drops binding conditions, Strict has no effect (it needs Kubernetes 1.36)")
			}
			learnt(kept)
			return
		case ctx.Err() == nil:
			klog.FromContext(ctx).Error(err, "Withdrawing GPUs by leaving them out of their slice for now")
		}
		if !pause(ctx, wait) {
			return
		}
	}
}

// missingCounters tells, once, that GPUs which should be partitioned on demand cannot be.
type missingCounters struct{ said bool }

func (m *missingCounters) say(ctx context.Context, d *Driver, gpus []string, kept Capabilities) {
	if m.said || len(gpus) == 0 || kept.Counters || d.PublishNothing {
		return
	}
	m.said = true
	klog.FromContext(ctx).Info("The API server drops shared counters, GPUs are not partitioned on demand", "devices", gpus)
	d.Recorder.Eventf(d.nodeRef, corev1.EventTypeWarning, "NoPartitionsOnDemand",
		"%s should be partitioned on demand, for which the API server must keep shared counters (Kubernetes 1.36 or newer, feature gate DRAPartitionableDevices): "+
			"whole GPUs and partitions that exist are offered instead", strings.Join(gpus, ", "))
}

// dynamicGPUs are the names of those that are partitioned on demand.
func dynamicGPUs(inv device.Inventory) []string {
	var names []string
	for _, g := range inv.GPUs {
		if g.Dynamic && len(g.Profiles) > 0 {
			names = append(names, g.Name())
		}
	}
	return names
}
