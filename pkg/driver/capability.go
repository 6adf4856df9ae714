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

// keepsTaints asks the API server, by a slice that is never stored, whether it keeps device taints. Servers before 1.36
// drop them silently by default (feature gate DRADeviceTaints).
func (d *Driver) keepsTaints(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	probe := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-" + d.DriverName + "-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   d.DriverName,
			NodeName: ptr.To(d.NodeName),
			Pool:     resourceapi.ResourcePool{Name: d.NodeName, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{
				Name:   "probe",
				Taints: []resourceapi.DeviceTaint{{Key: TaintHeldByLimit, Value: "true", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
			}},
		},
	}
	stored, err := d.KubeClient.ResourceV1().ResourceSlices().Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return false, fmt.Errorf("ask the API server whether it keeps device taints: %w", err)
	}
	return len(stored.Spec.Devices) == 1 && len(stored.Spec.Devices[0].Taints) == 1, nil
}

// learnTaints asks until there is an answer, and hands a positive one to learnt. Until then GPUs are withdrawn by leaving
// them out, which every version understands.
func (d *Driver) learnTaints(ctx context.Context, learnt func()) {
	for wait := probeRetryFirst; ; wait = min(2*wait, probeRetryMost) {
		kept, err := d.keepsTaints(ctx)
		switch {
		case err == nil && kept:
			learnt()
			return
		case err == nil:
			klog.FromContext(ctx).Info("The API server drops device taints, GPUs are withdrawn by leaving them out of their slice")
			return
		case ctx.Err() == nil:
			klog.FromContext(ctx).Error(err, "Withdrawing GPUs by leaving them out of their slice for now")
		}
		if !pause(ctx, wait) {
			return
		}
	}
}
