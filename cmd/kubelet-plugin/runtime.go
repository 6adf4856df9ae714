// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/cdi"
)

// runtimeInterval is how long to wait for an API server that is away, or a node that has not said what it runs.
const runtimeInterval = 10 * time.Second

// checkRuntime writes an event on the node if its container runtime does not inject CDI devices, or may not: containers would
// start without their GPU and without an error. It checks once: another runtime version comes with a reboot or a restart of
// kubelet.
func (a *agent) checkRuntime(ctx context.Context) error {
	for {
		node, err := a.client.CoreV1().Nodes().Get(ctx, a.config.NodeName, metav1.GetOptions{})
		if err == nil && node.Status.NodeInfo.ContainerRuntimeVersion != "" {
			a.reportRuntime(ctx, node.Status.NodeInfo.ContainerRuntimeVersion)
			return nil
		}
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(4).Info("Cannot learn what the container runtime is", "reason", err.Error())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(runtimeInterval):
		}
	}
}

func (a *agent) reportRuntime(ctx context.Context, version string) {
	support, why := cdi.JudgeRuntime(version, a.config.HostRoot)
	var reason, consequence string
	switch support {
	case cdi.RuntimeLacks:
		reason, consequence = "RuntimeWithoutCDI", "Containers will start without the GPUs of their claims"
	case cdi.RuntimeNeedsSetting:
		reason, consequence = "RuntimeMayLackCDI", "Containers may start without the GPUs of their claims"
	default:
		return
	}
	if a.limitsNeedCDI() {
		consequence += " and limits (deviceListStrategy envvar or volume-mounts is for runtimes without CDI)"
	}
	klog.FromContext(ctx).Info("Container runtime without CDI", "runtime", version, "reason", why)
	a.event(corev1.EventTypeWarning, reason, consequence+": "+why)
}

// limitsNeedCDI reports whether every answer to a limit is by CDI.
func (a *agent) limitsNeedCDI() bool {
	for _, strategy := range a.config.DeviceListStrategies {
		if strategy != "cdi-cri" && strategy != "cdi-annotations" {
			return false
		}
	}
	return true
}
