// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/internal/runtimes"
	"github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/gpunode"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/podstate"
	"github.com/tandem-gpu/tandem/pkg/wiring"
)

// lockInterval is how often the agent tries to lock the ledger. A blocking flock could not be cancelled.
const lockInterval = time.Second

// openLedger waits while another agent process has the ledger locked: a force-deleted predecessor may still run.
func (a *Agent) openLedger(ctx context.Context, c components) error {
	for reported := false; ; reported = true {
		problems, err := c.Open(ctx)
		for _, problem := range problems {
			klog.FromContext(ctx).Error(problem, "Cannot read a record")
		}
		if !errors.Is(err, ledger.ErrLocked) {
			a.status.Waiting("ledger", err)
			return err
		}
		if !reported {
			a.wait(ctx, "ledger", "LedgerLocked", err)
		}
		if !broadcast.Sleep(ctx, lockInterval) {
			return context.Cause(ctx)
		}
	}
}

// errDriverArrived ends an agent in driverless mode: main starts it again, now with the driver.
var errDriverArrived = errors.New("the NVIDIA driver reports GPUs now")

// driverless returns the agent in driverless mode. It has the same components, over an empty inventory: claims are unprepared, holds
// are kept, and nothing is published. kubelet cannot end a pod whose claims are not unprepared, and a driver upgrade waits until all GPU
// pods have ended (TestPodsEndWithoutADriver).
func (a *Agent) driverless() *Agent {
	next := a.with(a.config.ServingNothing())
	next.isDriverless = true
	return next
}

// holdsAny reports whether the ledger or kubelet says that a claim or pod may have a device. A node without one needs no driverless
// mode.
func (a *Agent) holdsAny(book *ledger.Ledger) bool {
	claims, err := podstate.ReadClaimState(a.config.KubeletDir, a.config.DriverName)
	return err != nil || len(claims) > 0 || len(book.Holds()) > 0
}

// awaitGPU waits until the driver reports a GPU. It returns false when ctx is done.
func (a *Agent) awaitGPU(ctx context.Context, node *nvml.Node) bool {
	reported := ""
	return broadcast.Await(ctx, node.Changed, func() bool {
		missing := node.Missing()
		if missing == nil {
			a.status.Waiting("driver", nil)
			a.status.Waiting("gpus", nil)
			return true
		}
		if missing.Error() != reported {
			reported = missing.Error()
			a.reportMissing(ctx, missing)
		}
		return false
	})
}

// scanPatience is how long the first scan may take before GPUNode says that the agent waits for it.
const scanPatience = 5 * time.Second

// reportWaiting keeps the node's GPUNode from showing the GPUs and holders of an earlier boot until stop is called. stop waits for its end.
// During the first scan it leaves a status of this boot as it is, because the ledger is about to confirm its holders. After a scan without
// a GPU, nothing is held.
func (a *Agent) reportWaiting(ctx context.Context, c components, scanning bool) (stop func()) {
	return meanwhile(ctx, func(ctx context.Context) {
		if scanning && !broadcast.Sleep(ctx, scanPatience) {
			return
		}
		object, err := gpunode.New(gpunode.Config{
			REST: a.api, NodeName: a.config.NodeName, Registerer: prometheus.NewRegistry(), Facts: gpunode.Facts{BootID: a.bootID},
		})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot correct the node's GPUNode")
			return
		}
		object.RunWaiting(ctx, gpunode.Waiting{OnlyEarlierBoots: scanning, Changed: c.driver.Changed, Reason: func() string {
			if missing := c.driver.Missing(); missing != nil && !scanning {
				return missing.Error()
			}
			return "the agent reads the node's GPUs"
		}})
	})
}

// meanwhile runs a function until stop is called, which waits for its end.
func meanwhile(ctx context.Context, run func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

// reportMissing reports why there is no GPU. The agent of a node without NVIDIA hardware is ready, so that it does not delay an
// installation.
func (a *Agent) reportMissing(ctx context.Context, missing error) {
	noDriver, ok := errors.AsType[*nvml.NoDriverError](missing)
	_, paused := errors.AsType[*nvml.PausedError](missing)
	switch {
	case paused: // reported when it began
		a.status.Waiting("driver", nil)
		a.status.Waiting("gpus", nil)
	case ok && noDriver.NoHardware:
		klog.FromContext(ctx).Info("Serving nothing on a node without an NVIDIA GPU", "reason", missing.Error())
		for _, check := range []string{"driver", "claims", "limits", "mode"} {
			a.status.Waiting(check, nil)
		}
	case ok:
		a.wait(ctx, "driver", "NoDriver", missing)
	default:
		a.status.Waiting("driver", nil)
		a.wait(ctx, "gpus", "NoGPU", missing)
	}
}

// wait reports why the agent is not ready in its status, its log and an event on the node.
func (a *Agent) wait(ctx context.Context, check, reason string, err error) {
	klog.FromContext(ctx).Info("Waiting", "for", check, "reason", err.Error())
	a.status.Waiting(check, err)
	a.event(corev1.EventTypeWarning, reason, err.Error())
}

// event records an event on the node.
func (a *Agent) event(severity, reason, message string) {
	a.recorder.Event(regarding.Node(a.config.NodeName), severity, reason, message)
}

const (
	returnInterval = time.Second
	// lastReturn is how long after the agent is ready it returns memory for the last time: work that follows the start has ended.
	lastReturn = 45 * time.Second
	// startupGC is the garbage collector's percentage until memory is first returned. The collector would use a tenth of the start's time.
	startupGC = 400
)

// returnMemory returns memory that only startup needed to the kernel: about half of the agent's heap, which the Go runtime would keep for
// minutes, and most of the program's pages. It does so after each change of what the agent waits for, and for the last time some time after
// the agent is ready. The bench figure rss_idle exceeds 45 MiB without it.
func (a *Agent) returnMemory(ctx context.Context) error {
	percent := debug.SetGCPercent(startupGC)
	defer debug.SetGCPercent(percent)
	wait := returnInterval
	for previous := ""; ; {
		if !broadcast.Sleep(ctx, wait) {
			return nil
		}
		waiting := a.status.Ready()
		if reason := fmt.Sprint(waiting); reason != previous || wait == lastReturn {
			previous = reason
			debug.SetGCPercent(percent)
			debug.FreeOSMemory()
			if err := unmapProgram(); err != nil {
				klog.FromContext(ctx).Info("Cannot return pages of the program to the kernel, so the agent uses more memory", "reason", err.Error())
			}
		}
		switch {
		case waiting != nil:
			wait = returnInterval
		case wait == lastReturn:
			return nil
		default:
			wait = lastReturn
		}
	}
}

// metrics are those of the wiring itself.
type metrics struct {
	*prometheus.Registry
	modes    *prometheus.GaugeVec
	rejected prometheus.Gauge
}

func newMetrics() metrics {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	factory := promauto.With(registry)
	factory.NewGaugeVec(prometheus.GaugeOpts{
		Name: "tandem_build_info", Help: "Version and commit of the running agent; always 1.",
	}, []string{"version", "commit"}).WithLabelValues(version.Version, version.Commit).Set(1)
	return metrics{
		Registry: registry,
		modes: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_mode", Help: "1 for the mode of the node: Dual, ClaimsOnly, DevicePluginOnly or Split.",
		}, []string{"mode"}),
		rejected: factory.NewGauge(prometheus.GaugeOpts{
			Name: "tandem_config_rejected", Help: "1 while the newest configuration of the node (file and label) is wrong and the previous one is in use.",
		}),
	}
}

// deviceNames is implemented by cdi.Specs.
type deviceNames interface{ UseSecretNames(secret bool) }

// chooseNames selects secret names of CDI devices where the configuration, or a flaw of the container runtime, requires them. version is empty
// while it is not known.
func (a *Agent) chooseNames(names deviceNames, version string) {
	if a.config.CDIDeviceNames != config.CDINamesAuto {
		names.UseSecretNames(a.config.CDIDeviceNames == config.CDINamesSecret)
	} else if version != "" {
		names.UseSecretNames(runtimes.TakesDevices(version))
	}
}

// checkRuntime writes an event on the node if its container runtime does not inject CDI devices, or may not: containers would start without
// their GPU and without an error. It also writes one if an image can choose GPUs, and then gives CDI devices secret names. It does so for each
// version: the runtime may be updated while the agent runs.
func (a *Agent) checkRuntime(ctx context.Context, self *podstate.Node, names deviceNames) error {
	version := ""
	next := func() bool {
		before := version
		version = cmp.Or(self.RuntimeVersion(), before)
		return version != before
	}
	for broadcast.Await(ctx, self.Changed, next) {
		a.chooseNames(names, version)
		a.reportRuntime(ctx, version)
	}
	return nil
}

// checkCgroups reports while the cgroups of pods do not show which pods have ended. kubelet may come back with another setting while the
// agent runs.
func (a *Agent) checkCgroups(ctx context.Context, pods *podstate.Pods) error {
	for reported := false; ; {
		err := pods.CheckCgroups()
		if err != nil {
			err = fmt.Errorf("GPUs of pods that have ended stay taken: %w", err)
		}
		if err != nil && !reported {
			a.wait(ctx, "cgroups", "NoPodCgroups", err)
		}
		a.status.Waiting("cgroups", err)
		reported = err != nil
		if !broadcast.Sleep(ctx, a.times.cgroups) {
			return nil
		}
	}
}

func (a *Agent) reportRuntime(ctx context.Context, version string) {
	support, why := cdi.JudgeRuntime(version, a.config.HostRoot)
	var reason, consequence string
	switch support {
	case cdi.RuntimeLacks:
		reason, consequence = "RuntimeWithoutCDI", "Containers will start without the GPUs of their claims"
	case cdi.RuntimeNeedsSetting:
		reason, consequence = "RuntimeMayLackCDI", "Containers may start without the GPUs of their claims"
	case cdi.RuntimeTrustsImages:
		klog.FromContext(ctx).Info("Container runtime trusts images", "runtime", version, "reason", why)
		a.event(corev1.EventTypeWarning, "RuntimeTrustsImages",
			"If CRIU is installed on the node, everyone who may create pods can get the GPUs of others: "+why)
		return
	default:
		return
	}
	if !slices.ContainsFunc(a.config.DeviceListStrategies, wiring.WithoutCDI) {
		consequence += " and limits (limits work without CDI if deviceListStrategy is envvar or volume-mounts)"
	}
	klog.FromContext(ctx).Info("Container runtime without CDI", "runtime", version, "reason", why)
	a.event(corev1.EventTypeWarning, reason, consequence+": "+why)
}
