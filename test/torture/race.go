// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const (
	// racers is how many replicas each side of a race has: both together leave GPUs for those who lose.
	racers = 3
	// racePatience is how long a side may take to its place. After that the race continues without it.
	racePatience = 30 * time.Second
)

// race measures how long healing takes in peace: on an empty node the claims of a Deployment lose their GPUs to limits while
// others are free. The controller is frozen until the limits have the GPUs that claims of bound pods are allocated to, which
// the agent cannot learn of it meanwhile; those pods wait for a ConfigMap, before which kubelet prepares nothing. When the
// controller runs again and has had its time, the ConfigMap comes, and with it the conflict.
func (r *run) race(ctx context.Context, u user) error {
	if err := u.settle(ctx); err != nil {
		return err
	}
	replicas := racers
	if r.hardware != nil {
		// There are fewer whole GPUs, and fewer at the end of them.
		replicas = wholeGPUs / 2
	}
	claims := Workload{Name: "claims", Shape: Deployment, API: oracle.Claim, GPUs: 1, Replicas: replicas, Last: true, Late: true}
	limits := Workload{Name: "limits", Shape: Deployment, API: oracle.Limits, GPUs: 1, Replicas: replicas}
	err := r.lineUp(ctx, u, claims, limits)
	if errors.Is(err, errAway) {
		r.trace.say("no race: %v", err)
		return u.clear(ctx, PodsOwn)
	}
	if err != nil {
		return err
	}
	before := r.statistics.now()
	broadcast.Sleep(ctx, Op{Kind: Freeze}.recovery())
	r.heals.room(true)
	defer r.heals.room(false)
	if err := u.createLate(ctx); err != nil {
		return err
	}
	if err := r.settle(ctx, u); err != nil {
		return err
	}
	after := r.statistics.now()
	r.trace.say("race: %d claims of %d lost, and healed within %s", after.PendingEviction-before.PendingEviction, claims.Replicas,
		after.HealTimes[len(before.HealTimes):].percentile(100))
	return r.finish(ctx, u)
}

// lineUp returns when limits have GPUs that claims are allocated to, and nothing is frozen any more.
func (r *run) lineUp(ctx context.Context, u user, claims, limits Workload) error {
	defer r.statistics.faultBegins(Op{Kind: Freeze}.recovery())()
	thaw, err := r.faults.stop(ctx, controllerProgram)
	for _, side := range []struct {
		w      Workload
		placed func(*podHistory) bool
	}{
		{claims, func(l *podHistory) bool { return l.pod.Spec.NodeName != "" }},
		{limits, func(l *podHistory) bool { return l.placed }},
	} {
		if err == nil {
			err = u.create(ctx, side.w)
		}
		for late := time.Now().Add(racePatience); err == nil && time.Now().Before(late); broadcast.Sleep(ctx, retryPause) {
			if r.watch.count(u.namespace, side.w.Name, side.placed) == side.w.Replicas || ctx.Err() != nil {
				break
			}
		}
	}
	return errors.Join(err, thaw())
}

// createLate makes the ConfigMap that pods of a Late workload wait for.
func (u user) createLate(ctx context.Context) error {
	return persist(ctx, "create ConfigMap", func(ctx context.Context) error {
		late := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: lateName}}
		_, err := u.client.CoreV1().ConfigMaps(u.namespace).Create(ctx, late, metav1.CreateOptions{})
		return err
	})
}
