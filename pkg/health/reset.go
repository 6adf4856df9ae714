// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// resetRetry is how long after a reset, or a failed one, the next attempt begins.
const resetRetry = 30 * time.Second

// resets are the GPUs that are being reset, and the earliest time of the next reset of others.
type resets struct {
	mu      sync.Mutex
	running map[string]bool
	next    map[string]time.Time
}

// resetIdle resets GPUs whose fault has the action ResetWhenIdle once they have no holder, until ctx is done.
func (i *Inventory) resetIdle(ctx context.Context) error {
	i.resets.running, i.resets.next = map[string]bool{}, map[string]time.Time{}
	var group errgroup.Group
	ticker := time.NewTicker(i.interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		for _, g := range i.config.Inventory().GPUs {
			if i.wantsReset(g) && i.resets.begin(g.UUID) {
				group.Go(func() error { i.reset(ctx, g); return nil })
			}
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	return group.Wait()
}

// wantsReset reports whether a fault of a GPU or of one of its partitions has the action ResetWhenIdle.
func (i *Inventory) wantsReset(g device.GPU) bool {
	whole, inPartition := i.xids.of(g)
	faults := slices.Concat(g.Faults, whole)
	for _, p := range g.Partitions {
		faults = append(faults, inPartition(p)...)
	}
	return slices.ContainsFunc(faults, func(f device.Health) bool { return i.action(g, f) == device.FaultResetWhenIdle })
}

// mayEndByReset reports whether a reset may end a fault.
func mayEndByReset(fault device.Health) bool { return fault.Reason != device.ReasonRowRemapFailure }

func (r *resets) begin(uuid string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running[uuid] || time.Now().Before(r.next[uuid]) {
		return false
	}
	r.running[uuid] = true
	return true
}

func (r *resets) end(uuid string, after time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, uuid)
	r.next[uuid] = time.Now().Add(after)
}

func (i *Inventory) reset(ctx context.Context, g device.GPU) {
	switch done, err := i.config.ResetIdle(ctx, g.UUID); {
	case ctx.Err() != nil || !done && err == nil:
		i.resets.end(g.UUID, 0)
	case err != nil:
		i.metrics.resets.WithLabelValues("failed").Inc()
		klog.FromContext(ctx).Error(err, "Cannot reset a GPU, trying again", "gpu", g.UUID)
		i.config.Recorder.Eventf(i.node(), corev1.EventTypeWarning, "GPUResetFailed",
			"%s (%s) has a fault and cannot be reset: %v. It stays withdrawn; the agent tries again every %v", g.Name(), g.UUID, err, resetRetry)
		i.resets.end(g.UUID, resetRetry)
	default:
		i.metrics.resets.WithLabelValues("done").Inc()
		klog.FromContext(ctx).Info("Reset a GPU because of a fault", "gpu", g.UUID)
		i.config.Recorder.Eventf(i.node(), corev1.EventTypeNormal, "GPUReset", "%s (%s) was reset because of a fault", g.Name(), g.UUID)
		i.resets.end(g.UUID, resetRetry)
	}
}
