// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/podstate"
)

// checkRuntime writes an event on the node if its container runtime does not inject CDI devices, or may not: containers would
// start without their GPU and without an error. It checks once: another runtime version comes with a reboot or a restart of
// kubelet.
func (a *agent) checkRuntime(ctx context.Context, self *podstate.Node) error {
	for {
		changed := self.Changed()
		if version := self.RuntimeVersion(); version != "" {
			a.reportRuntime(ctx, version)
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
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
	withoutCDI := func(strategy string) bool { return strategy == "envvar" || strategy == "volume-mounts" }
	if !slices.ContainsFunc(a.config.DeviceListStrategies, withoutCDI) {
		consequence += " and limits (deviceListStrategy envvar or volume-mounts is for runtimes without CDI)"
	}
	klog.FromContext(ctx).Info("Container runtime without CDI", "runtime", version, "reason", why)
	a.event(corev1.EventTypeWarning, reason, consequence+": "+why)
}
