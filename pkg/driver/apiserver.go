// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// ErrNoAPI is returned by Ready while the API server does not serve claims.
var ErrNoAPI = errors.New("the API server does not serve resource.k8s.io/v1: enable it (Kubernetes 1.34 or newer, not disabled by " +
	"kube-apiserver's --runtime-config), or set mode DevicePluginOnly")

// Requests time out after probeTimeout and are retried with a growing delay.
const (
	probeTimeout    = 5 * time.Second
	probeRetryFirst = time.Second
	probeRetryMost  = time.Minute
)

// waitForAPI waits until the API server serves the DRA API, which an administrator may enable later
// (TestServerWithoutClaims). It returns false when ctx is done.
func (d *Driver) waitForAPI(ctx context.Context) bool {
	reported := false
	for wait := 2 * probeRetryFirst; ; wait = min(2*wait, probeRetryMost) {
		served := d.apiServed(ctx)
		d.mu.Lock()
		d.noAPI = !served
		d.mu.Unlock()
		if served {
			return ctx.Err() == nil
		}
		if !reported {
			reported = true
			klog.FromContext(ctx).Info("Serving no claims", "reason", ErrNoAPI.Error())
			if !d.PublishNothing {
				d.Recorder.Eventf(d.nodeRef, corev1.EventTypeWarning, "NoClaimsAPI", "claims are not served: %v", ErrNoAPI)
			}
		}
		if !pause(ctx, wait) {
			return false
		}
	}
}

// apiServed returns true also for an API server that does not answer: the publisher retries.
func (d *Driver) apiServed(ctx context.Context) bool {
	_, err := d.slicesOfNode(ctx)
	return !apierrors.IsNotFound(err)
}

// slicesOfNode lists the slices of this driver and node.
func (d *Driver) slicesOfNode(ctx context.Context) (*resourceapi.ResourceSliceList, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return d.KubeClient.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorNodeName: d.NodeName, resourceapi.ResourceSliceSelectorDriver: d.DriverName,
	}.String()})
}

// probe returns which fields the API server keeps. Until it answers, devices are withdrawn by omission, which every version
// supports. A server of 1.34 with the feature DRAPartitionableDevices refuses counters in a slice of their own, so that probe is
// invalid.
func (d *Driver) probe(ctx context.Context) (Capabilities, error) {
	kept, err := d.probeWith(ctx, []resourceapi.DeviceCounterConsumption{{
		CounterSet: "probe", Counters: map[string]resourceapi.Counter{"probe": {Value: *resource.NewQuantity(1, resource.BinarySI)}},
	}})
	if apierrors.IsInvalid(err) {
		kept, err = d.probeWith(ctx, nil)
	}
	switch {
	case err != nil:
		if ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Withdrawing devices by omitting them for now")
		}
		return Capabilities{}, err
	case !kept.Taints:
		klog.FromContext(ctx).Info("The API server drops device taints, withdrawing devices by omitting them")
	}
	if d.Strict && !kept.BindingConditions {
		klog.FromContext(ctx).Info("The API server drops binding conditions, strict has no effect (it needs Kubernetes 1.36)")
	}
	return kept, nil
}

// probeWith creates a slice in a dry run. The API server returns it without the fields that it drops.
func (d *Driver) probeWith(ctx context.Context, consumption []resourceapi.DeviceCounterConsumption) (Capabilities, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	probe := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "probe-" + d.DriverName + "-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   d.DriverName,
			NodeName: ptr.To(d.NodeName),
			Pool:     resourceapi.ResourcePool{Name: d.NodeName, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{withBindingConditions(resourceapi.Device{
				Name:                     "probe",
				ConsumesCounters:         consumption,
				AllowMultipleAllocations: ptr.To(true),
				Taints:                   []resourceapi.DeviceTaint{{Key: TaintHeldByPod, Value: "true", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
			})},
		},
	}
	stored, err := d.KubeClient.ResourceV1().ResourceSlices().Create(ctx, probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err != nil {
		return Capabilities{}, fmt.Errorf("probe which device fields the API server keeps: %w", err)
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

// reportMissingCounters reports that the API server drops the counters that dynamic GPUs need.
func (d *Driver) reportMissingCounters(ctx context.Context, gpus []string) {
	klog.FromContext(ctx).Info("The API server drops shared counters, GPUs are not partitioned on demand", "devices", gpus)
	d.Recorder.Eventf(d.nodeRef, corev1.EventTypeWarning, "NoPartitionsOnDemand",
		"%s should be partitioned on demand, for which the API server must keep shared counters (Kubernetes 1.36 or newer, feature gate DRAPartitionableDevices): "+
			"whole GPUs and partitions that exist are offered instead", strings.Join(gpus, ", "))
}
