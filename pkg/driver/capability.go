// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

const (
	probeTimeout    = 5 * time.Second
	probeRetryFirst = time.Second
	probeRetryMost  = time.Minute
)

// capabilities are fields of a device that servers before 1.36 drop silently by default (feature gates DRADeviceTaints and
// DRADeviceBindingConditions).
type capabilities struct{ taints, bindingConditions bool }

// probe asks the API server, by a slice that is never stored, which fields it keeps.
func (d *Driver) probe(ctx context.Context) (capabilities, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	probe := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-" + d.DriverName + "-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   d.DriverName,
			NodeName: ptr.To(d.NodeName),
			Pool:     resourceapi.ResourcePool{Name: d.NodeName, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{strictly(resourceapi.Device{
				Name:   "probe",
				Taints: []resourceapi.DeviceTaint{{Key: TaintHeldByLimit, Value: "true", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
			})},
		},
	}
	stored, err := d.KubeClient.ResourceV1().ResourceSlices().Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return capabilities{}, fmt.Errorf("ask the API server whether it keeps device taints: %w", err)
	}
	if len(stored.Spec.Devices) != 1 {
		return capabilities{}, nil
	}
	kept := stored.Spec.Devices[0]
	return capabilities{taints: len(kept.Taints) == 1, bindingConditions: len(kept.BindingConditions) == 1}, nil
}

// learnCapabilities asks until there is an answer, and hands it to learnt. Until then GPUs are withdrawn by leaving them out,
// which every version understands.
func (d *Driver) learnCapabilities(ctx context.Context, learnt func(capabilities)) {
	for wait := probeRetryFirst; ; wait = min(2*wait, probeRetryMost) {
		kept, err := d.probe(ctx)
		switch {
		case err == nil:
			if !kept.taints {
				klog.FromContext(ctx).Info("The API server drops device taints, GPUs are withdrawn by leaving them out of their slice")
			}
			if d.Strict != nil && !kept.bindingConditions {
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
