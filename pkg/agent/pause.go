// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/nvml"
)

// GPU Operator's driver manager and MIG manager set the labels of their components, and nvidia.com/gpu.deploy.client, to
// paused-for-driver-upgrade and paused-for-mig-change while no process of the node may use the driver, and back to true afterwards. The
// driver manager appends to a value that is not "true" (k8s-driver-manager, maybeSetPaused; mig-parted, pkg/mig/reconfigure).
const (
	deployPrefix = "nvidia.com/gpu.deploy."
	pausedValue  = "paused-"
)

// pausedBy returns the node label that asks to pause; empty if there is none.
func pausedBy(labels map[string]string) string {
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if strings.HasPrefix(key, deployPrefix) && strings.Contains(labels[key], pausedValue) {
			return "node label " + key + "=" + labels[key]
		}
	}
	return ""
}

// pauseLimit is how long a pause waits for calls that are running. The driver manager tries again when it cannot unload the driver.
const pauseLimit = 10 * time.Second

// pause follows the node's labels.
type pause struct {
	*Agent
	c components
	// by is the label that asks for the pause; empty without a pause.
	by string
}

// begin applies the node's labels before the first call to the driver. It waits for the node's object, but no longer than the agent waits for
// the API server elsewhere.
func (p *pause) begin(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, p.times.answerWait)
	defer cancel()
	if broadcast.Await(limited, p.c.Node.Changed, func() bool { return p.c.Node.UID() != "" }) {
		return p.set(ctx, pausedBy(p.c.Node.Labels()))
	}
	return nil
}

// follow pauses and resumes until ctx is done. A deleted node object asks for nothing.
func (p *pause) follow(ctx context.Context) error {
	for {
		changed := p.c.Node.Changed()
		if p.c.Node.UID() != "" {
			if err := p.set(ctx, pausedBy(p.c.Node.Labels())); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

func (p *pause) set(ctx context.Context, by string) error {
	before := p.by
	p.by = by
	switch {
	case by == "" && before == "":
		return nil
	case by == "":
		return p.resume(ctx)
	}
	// The change of the inventory has the GPUNode written, with this reason.
	p.status.Waiting("pause", errors.New(by))
	limited, cancel := context.WithTimeout(ctx, pauseLimit)
	defer cancel()
	err := p.c.driver.Pause(limited, by)
	if ctx.Err() != nil {
		return nil
	}
	if before == "" {
		klog.FromContext(ctx).Info("Pausing: no call to the driver is made and no GPU is offered", "by", by)
		p.event(corev1.EventTypeNormal, "DriverPaused", fmt.Sprintf("No GPU is given to new pods and claims, "+
			"and the agent makes no call to the NVIDIA driver, because of %s. Running pods keep their GPUs. "+
			"The agent continues when no such label is left", by))
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "A call to the driver does not return, so the driver cannot be unloaded")
		p.event(corev1.EventTypeWarning, "DriverPaused", fmt.Sprintf("A call of the agent to the NVIDIA driver does not return (%v), "+
			"so the driver cannot be unloaded. Unless a GPU is being reset, one hangs: find it in the kernel's log (dmesg), and "+
			"reset it or reboot the node", err))
	}
	return nil
}

// resume returns an error if only a new process can use the driver.
func (p *pause) resume(ctx context.Context) error {
	// The scan's change of the inventory has the GPUNode written, without the reason.
	p.status.Waiting("pause", nil)
	err := p.c.driver.Resume(ctx)
	klog.FromContext(ctx).Info("Resuming after a pause of the driver")
	p.event(corev1.EventTypeNormal, "DriverResumed", "The agent uses the NVIDIA driver again, and offers the GPUs that it reports")
	if errors.Is(err, nvml.ErrNoDriver) {
		return nil // the node's scans wait for it
	}
	return err
}
