// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"time"
)

// begin follows Agent.serveAPIs, once both what was before and what there is now are known.
func (a *agent) begin() {
	if !a.restored || !a.synced || a.begun {
		return
	}
	a.begun = true
	a.reconcile()
	a.run("adopts", func(ctx context.Context) error {
		_ = a.alone(ctx, looking(a.driver.FindConflicting))
		_ = a.alone(ctx, looking(a.limits.FindConflicting))
		err := a.alone(ctx, a.parts.Adopt)
		a.serve()
		a.takeOver("claims", sourceDriver, a.driver.FindConflicting, a.serveClaims)
		a.takeOver("limits", "conflicting device plugin", a.limits.FindConflicting, func() { a.register(0) })
		return err
	})
}

// reconcile starts the loops of the reconciler.
func (a *agent) reconcile() {
	if a.profile.mps || a.profile.mig {
		a.run("clears settings", a.reconciler.Clear)
	}
	a.run("hands GPUs over", a.parts.Handover.Run)
	a.loop("settles holds", 10*time.Millisecond, func() []<-chan struct{} {
		return []<-chan struct{}{a.pods.Changed(), a.book.Changed(), a.host.written}
	}, func(c *call) time.Duration {
		if a.faults.noRelease {
			return never
		}
		a.sawCheckpoint()
		wait, err := a.reconciler.Settle(a.process.ctx)
		if err != nil {
			return time.Second
		}
		return wait
	})
	a.loop("checks holds", time.Second, func() []<-chan struct{} { return []<-chan struct{}{a.book.Changed()} }, func(c *call) time.Duration {
		if a.faults.noRelease {
			return never
		}
		wait, err := a.reconciler.Verify(c.context(a.process.ctx))
		if err != nil {
			return min(wait, time.Minute)
		}
		return wait
	})
	a.loop("restores what it could not", time.Second, func() []<-chan struct{} { return nil }, func(c *call) time.Duration {
		if a.faults.noRestore {
			return never
		}
		if a.adopting {
			return time.Second
		}
		a.adopting = true
		left, err := a.reconciler.RestoreLate(c.context(a.process.ctx))
		a.adopting = false
		if left || err != nil || a.profile.foreign != nil { // what adoptions and other loops add is announced to the product only
			return time.Second
		}
		return never
	})
}

func looking(find func(context.Context)) func(context.Context) error {
	return func(ctx context.Context) error {
		find(ctx)
		return nil
	}
}

// sourceDriver is the source of pkg/driver for a driver of the same name.
const sourceDriver = "conflicting driver"

// takeOver serves an API once the product no longer finds a foreign driver that serves it.
func (a *agent) takeOver(api, source string, find func(context.Context), serve func()) {
	a.run("takes over "+api, func(ctx context.Context) error {
		c, _ := ctx.Value(callKey{}).(*call)
		// The agent finds a device plugin by its socket, too, which has no model.
		for a.book.Withholds(source) || a.installed() {
			a.hit(foreignAwaited)
			wait := a.latency() // kubelet's directories are watched
			if a.chance(4) {
				wait = a.between(0, 10*time.Second)
			}
			c.sleep(wait, "looks again")
			_ = a.alone(ctx, looking(find))
		}
		serve()
		return nil
	})
}

// alone has no other call that adopts or restores beside it: a mutex that a parked call has would stop the clock.
func (a *agent) alone(ctx context.Context, do func(context.Context) error) error {
	c, _ := ctx.Value(callKey{}).(*call)
	for a.adopting {
		c.sleep(50*time.Millisecond, "waits for another adoption")
	}
	a.adopting = true
	err := do(ctx)
	a.adopting = false
	return err
}

// serveClaims is the session of the DRA driver.
func (a *agent) serveClaims() {
	a.serving = true
	a.loop("builds slices", 0, func() []<-chan struct{} {
		return []<-chan struct{}{a.book.Changed(), a.specChanged, a.parts.Views.Offered.Changed()}
	}, func(c *call) time.Duration {
		return a.publish()
	})
	// The library's slice controller reverts foreign changes, and checks all slices after it has listed them.
	a.api.watch(a.process, "slice/", func(_ string, _, after any) {
		if now, _ := after.(*slice); a.published != nil && !now.same(a.published) {
			a.after(a.process, 100*time.Millisecond, "repairs its slice", a.writeSlice)
		}
	}, a.refresh)
	a.kubelet.lookForPlugin()
}
