// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"context"
	"math"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// Waiting is what RunWaiting needs.
type Waiting struct {
	// Reason returns why the agent serves no GPU. Changed returns a channel that is closed when the reason may have changed; it is taken
	// before Reason is called.
	Reason  func() string
	Changed func() <-chan struct{}
	// OnlyEarlierBoots leaves the devices in a status of this boot, and in one that names no boot: their holders may still be true.
	OnlyEarlierBoots bool
}

// RunWaiting replaces Run while the agent waits for the driver: it removes devices and holders from an existing object, because what the last
// agent wrote is no longer true. It writes the reason, and writes it again each minute to show that the agent is there. It creates no object. The
// requested MPS daemons stay; Run updates them later. It needs of the Config only REST, NodeName, Registerer and Facts.BootID. It returns when
// ctx is done. An API server that does not answer is not an error.
func (o *Object) RunWaiting(ctx context.Context, w Waiting) {
	delays := wait.Backoff{Duration: o.times.firstRetry, Factor: 2, Jitter: 0.2, Steps: math.MaxInt32, Cap: o.times.lastRefused}
	retry := delays
	for ctx.Err() == nil {
		changed := w.Changed()
		var again <-chan time.Time
		switch corrected, err := o.correct(ctx, w); {
		case err != nil && ctx.Err() == nil:
			klog.FromContext(ctx).V(1).Info("Cannot correct the node's GPUNode, trying again", "reason", err.Error())
			again = time.After(retry.Step())
		case corrected:
			again = time.After(o.nextBeat())
			fallthrough
		default:
			retry = delays
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-again:
		}
	}
}

// correct reports whether there is an object that had to be corrected.
func (o *Object) correct(ctx context.Context, w Waiting) (bool, error) {
	if err := o.refresh(ctx); err != nil {
		return false, err
	}
	object, _ := o.view.current()
	boot := o.config.Facts.BootID
	if object == nil {
		return false, nil
	}
	status := object.Status
	status.Waiting = w.Reason()
	if !w.OnlyEarlierBoots || status.BootID != "" && status.BootID != boot {
		status = v1alpha1.GPUNodeStatus{
			Waiting: status.Waiting, BootID: boot, ObservedGeneration: status.ObservedGeneration,
			Daemons: status.Daemons, UnknownDaemons: status.UnknownDaemons,
		}
	}
	if same(object.Status, status) && object.Status.Seen != nil && time.Since(object.Status.Seen.Time).Abs() < o.times.heartbeat/2 {
		return true, nil
	}
	_, err := o.updateStatus(ctx, object, status)
	return true, err
}
