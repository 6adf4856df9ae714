// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
)

const (
	// resetRetry is how long after the first reset the next attempt begins. The delay doubles with each, up to maxResetRetry: the node's
	// GPUs are not watched during a reset.
	resetRetry    = 30 * time.Second
	maxResetRetry = 30 * time.Minute
	// mostResets is how many resets that do not end a fault the agent makes.
	mostResets = 3
)

// resets are the attempts to reset GPUs, by UUID.
type resets struct {
	mu sync.Mutex
	of map[string]attempts
}

// attempts are those of one GPU since it last had no fault that asks for a reset.
type attempts struct {
	running bool
	// done and failed count resets that were made and that were refused. reported is how many of done were reported as useless.
	done, failed, reported int
	// next is when the next attempt may begin.
	next time.Time
}

// resetIdle begins, in the group, to reset GPUs whose fault has the action ResetWhenIdle and that have no holder. It is called at intervals.
func (i *Inventory) resetIdle(ctx context.Context, group *errgroup.Group) {
	for _, g := range i.config.Inventory().GPUs {
		switch {
		case g.Health.Reason == device.ReasonPaused: // not now
		case !i.wantsReset(g):
			i.resets.forget(g.UUID)
		default:
			if a, may := i.resets.begin(g.UUID); may {
				group.Go(func() error { i.reset(ctx, g, a); return nil })
			}
		}
	}
}

// wantsReset reports whether a fault of a GPU or of one of its partitions has the action ResetWhenIdle, and all that count may end by a reset.
func (i *Inventory) wantsReset(g device.GPU) bool {
	whole, inPartition := i.xids.of(g)
	faults := slices.Concat(g.Faults, whole)
	for _, p := range g.Partitions {
		faults = append(faults, inPartition(p)...)
	}
	wants := false
	for _, f := range faults {
		switch action := i.action(g, f); {
		case action == device.FaultIgnore:
		case !f.MayEndByReset():
			return false
		case action == device.FaultResetWhenIdle:
			wants = true
		}
	}
	return wants
}

// begin returns the earlier attempts, and whether another one may begin. end must follow.
func (r *resets) begin(uuid string) (before attempts, may bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before = r.of[uuid]
	if before.running || time.Now().Before(before.next) || before.reported >= mostResets {
		return before, false
	}
	now := before
	now.running, now.reported = true, before.done
	r.of[uuid] = now
	return before, true
}

// end ends an attempt, and returns how long the GPU waits for the next one.
func (r *resets) end(uuid string, now attempts) time.Duration {
	delay := min(resetRetry<<min(max(now.done+now.failed-1, 0), 10), maxResetRetry)
	now.next = time.Now().Add(delay)
	r.put(uuid, now)
	return delay
}

// put replaces the attempts of a GPU, of which none runs any more.
func (r *resets) put(uuid string, now attempts) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now.running = false
	r.of[uuid] = now
}

// any reports whether there are attempts that may have to be forgotten.
func (r *resets) any() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.of) > 0
}

// forget begins anew with a GPU that has had no such fault until the next attempt was due.
func (r *resets) forget(uuid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.of[uuid]; !a.running && !time.Now().Before(a.next) {
		delete(r.of, uuid)
	}
}

// reset makes one attempt.
func (i *Inventory) reset(ctx context.Context, g device.GPU, a attempts) {
	if a.done > a.reported {
		a.reported = a.done
		next := "The agent resets it again"
		if a.done == mostResets {
			next = "The agent does not reset it any more: replace the GPU, or restart the agent after a repair"
		}
		i.resetFailed(g, fmt.Sprintf("was reset %d times because of a fault that has not ended. It stays withdrawn. %s", a.done, next))
		if a.done == mostResets {
			i.resets.put(g.UUID, a)
			return
		}
	}
	switch done, err := i.config.ResetIdle(ctx, g.UUID); {
	case ctx.Err() != nil || !done && err == nil || err != nil && i.paused(g.UUID):
		i.resets.put(g.UUID, a)
	case err != nil:
		a.failed++
		klog.FromContext(ctx).Error(err, "Cannot reset a GPU, trying again", "gpu", g.UUID)
		delay := i.resets.end(g.UUID, a)
		i.resetFailed(g, fmt.Sprintf("has a fault and cannot be reset: %v. It stays withdrawn. "+
			"The agent tries again in %v. If the next resets fail as well, drain the node and reboot it", err, delay))
	default:
		a.done++
		i.metrics.resets.WithLabelValues("done").Inc()
		klog.FromContext(ctx).Info("Reset a GPU because of a fault", "gpu", g.UUID)
		i.config.Recorder.Eventf(i.node(), corev1.EventTypeNormal, "GPUReset", "%s (%s) was reset because of a fault", g.Name(), g.UUID)
		i.resets.end(g.UUID, a)
	}
}

func (i *Inventory) resetFailed(g device.GPU, what string) {
	i.metrics.resets.WithLabelValues("failed").Inc()
	i.config.Recorder.Eventf(i.node(), corev1.EventTypeWarning, "GPUResetFailed", "%s (%s) %s", g.Name(), g.UUID, what)
}

// paused reports whether the agent has let go of the driver.
func (i *Inventory) paused(uuid string) bool {
	g, _ := i.config.Inventory().ByUUID(uuid)
	return g.Health.Reason == device.ReasonPaused
}
