// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"time"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// attend starts kube-scheduler again if it has ended, as kubelet does with a static pod. No fault ends it, so what ended it is a finding:
// kube-scheduler exits, for example, if an unbound pod takes the place of a bound one of the same name.
func (r *run) attend(ctx context.Context) {
	scheduler := r.cluster.Component(cluster.Scheduler)
	if _, err := scheduler.Pid(); !errors.Is(err, cluster.ErrNotRunning) {
		return
	}
	r.statistics.add(func(c *Counters) { c.Stuck++ })
	r.reportStuck(ctx, "kube-scheduler has ended, which no fault does; the end of its log says why")
	if err := restart(ctx, scheduler.Start); err != nil && ctx.Err() == nil {
		r.trace.say("start kube-scheduler: %v", err)
	}
}

// progress logs every ten seconds how far the run is.
func (r *run) progress(ctx context.Context) error {
	before := r.State.Counters.Ops
	for {
		broadcast.Sleep(ctx, heartbeat)
		if ctx.Err() != nil {
			return nil
		}
		r.attend(ctx)
		running, waiting, looks := r.watch.counts()
		now := r.statistics.now()
		eta := "?"
		if done := now.Ops - before; done > 0 {
			left := time.Duration(float64(time.Since(r.started)) / float64(done) * float64(r.State.Ops-now.Ops))
			eta = left.Round(time.Second).String()
			if !r.Deadline.IsZero() && left > time.Until(r.Deadline) {
				eta = time.Until(r.Deadline).Round(time.Second).String()
			}
		}
		r.trace.say("ops %d/%d  running %d  pending %d  faults %d  kills %d  contended %d  conflicts %d  healed %d  "+
			"failed admissions %d  looks %d  ETA %s", now.Ops, r.State.Ops, running, waiting, now.Faults, now.Kills, now.Contended,
			now.Conflicts, now.Healed, now.FailedAdmissions, looks, eta)
	}
}
