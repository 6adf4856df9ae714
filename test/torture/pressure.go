// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

// pressure plays a round's operations, several in flight at once. Each takes a place, in the order of the plan, and waits
// there for those before it that touch the same workload.
func (r *run) pressure(ctx context.Context, u user, round Round) error {
	limited := ctx
	if !r.Deadline.IsZero() {
		var cancel context.CancelFunc
		limited, cancel = context.WithDeadline(ctx, r.Deadline.Add(-quietReserve))
		defer cancel()
	}
	group, inFlight := errgroup.WithContext(ctx)
	places := make(chan struct{}, r.State.InFlight)
	last := map[string]<-chan struct{}{}
	for _, op := range round.Ops {
		select {
		case places <- struct{}{}:
		case <-inFlight.Done():
		case <-limited.Done():
		}
		if limited.Err() != nil || inFlight.Err() != nil || r.UntilFault && r.statistics.now().faults() > 0 {
			break
		}
		var before []<-chan struct{}
		finished := make(chan struct{})
		for _, name := range op.touches() {
			if earlier := last[name]; earlier != nil {
				before = append(before, earlier)
			}
			last[name] = finished
		}
		group.Go(func() error {
			defer func() { <-places }()
			defer close(finished)
			for _, earlier := range before {
				<-earlier
			}
			return r.play(inFlight, u, op)
		})
	}
	return group.Wait()
}

// play carries out one operation and stays for its dwell.
func (r *run) play(ctx context.Context, u user, op Op) error {
	if op.Component == controllerName && !r.controller {
		return nil
	}
	started := time.Now()
	r.trace.note("begin %s", op)
	var err error
	if op.IsFault() {
		err = r.inject(ctx, op)
	} else {
		r.heals.noteUserChange(op.Target)
		err = u.do(ctx, op)
	}
	if err == nil && op.Kind == Burst {
		r.awaitContention(ctx, u, op)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("operation %s: %w", op, err)
	}
	r.trace.note("end   %05d after %s", op.Index, time.Since(started).Round(time.Millisecond))
	r.statistics.add(func(c *Counters) { c.Ops++ })
	broadcast.Sleep(ctx, op.Dwell)
	return nil
}

// burstPatience bounds how long a burst stays in flight.
const burstPatience = 30 * time.Second

// awaitContention waits until one of a burst's pods waits for what the other API has: what comes next in the plan would delete
// pods that have not raced yet, on a machine that is slow to start them.
func (r *run) awaitContention(ctx context.Context, u user, burst Op) {
	contended := func(l *podHistory) bool { return l.contended }
	over := func() bool { return ctx.Err() != nil || r.UntilFault && r.statistics.now().faults() > 0 }
	for deadline := time.Now().Add(burstPatience); time.Now().Before(deadline); broadcast.Sleep(ctx, lookAgain) {
		if over() {
			return
		}
		for _, w := range burst.Workloads {
			if r.watch.count(u.namespace, w.Name, contended) > 0 {
				return
			}
		}
	}
	r.trace.note("burst %05d was not contended", burst.Index)
}

func (r *run) inject(ctx context.Context, op Op) error {
	r.trace.say("fault: %s", op)
	ended := r.statistics.faultBegins(op.recovery())
	defer ended()
	// A started fault always ends, even when the run is interrupted: no process may stay frozen.
	did, err := r.faults.inject(context.WithoutCancel(ctx), op)
	if did.skipped != "" {
		r.trace.note("fault %05d came to nothing: %s", op.Index, did.skipped)
	}
	r.statistics.add(func(c *Counters) { c.Kills += did.kills })
	return err
}
