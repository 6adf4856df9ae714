// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/faults"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// besideBroken checks on an empty node that two GPUs of which each claim would be allocated the first ones do not keep others from the
// rest. The first is that of a claim that stays while its pod was force-deleted and has processes that do not end: Kubernetes deallocates
// the claim, and the next one must get another GPU. The second is lost after a claim was allocated it and before kubelet prepares the
// claim: the claim has to be healed. All that fits on the other GPUs has to run before either is whole again. Claims must not be offered
// the two meanwhile. Then a taint evicts one of the pods with limits.
func (r *run) besideBroken(ctx context.Context, u user) error {
	if err := u.settle(ctx); err != nil {
		return err
	}
	began := time.Now()
	hung := Workload{Name: "hung", Shape: Shared, API: oracle.Claim, GPUs: 1, Replicas: 1}
	lost := Workload{Name: "lost", Shape: Deployment, API: oracle.Claim, GPUs: 1, Replicas: 1, Late: true}
	whole := gpusANode
	if r.hardware != nil {
		whole = wholeGPUs
	}
	others := Workload{Name: "limits", Shape: Deployment, API: oracle.Limits, GPUs: 1, Replicas: whole - 3}
	ended := r.statistics.faultBegins(Op{Kind: HangPod}.recovery())
	undo, err := r.breakTwo(ctx, u, hung, lost)
	if errors.Is(err, errAway) {
		r.trace.say("nothing beside broken GPUs: %v", err)
		err = errors.Join(undo(ctx), u.clear(ctx, PodsOwn))
		ended()
		return err
	}
	if err == nil {
		err = u.create(ctx, others)
	}
	if err == nil {
		err = u.createLate(ctx)
	}
	if err == nil {
		err = r.retry(ctx, u, lost)
	}
	if err == nil {
		err = r.settle(ctx, u)
	}
	if err == nil {
		r.trace.say("beside a hung pod and a lost GPU: all ran after %s", time.Since(began).Round(100*time.Millisecond))
		err = r.taintBeside(ctx, u)
	}
	err = errors.Join(err, undo(ctx))
	ended()
	if err != nil {
		return err
	}
	return r.finish(ctx, u)
}

// taintBeside taints the GPU of a pod with limits. The watch has seen the GPUs of all pods with limits, so it counts an eviction from another GPU
// as wrong.
func (r *run) taintBeside(ctx context.Context, u user) error {
	const index = -1 // no operation has it
	did, err := r.faults.taintGPU(ctx, Op{Kind: TaintGPU, Index: index, Answer: noExecute, Pause: evictionPause})
	if err != nil {
		return err
	}
	if did.skipped != "" {
		r.trace.say("no taint beside broken GPUs: %s", did.skipped)
	}
	return r.settle(ctx, u)
}

// evictionPause is how long the rule of taintBeside stays: longer than an eviction takes.
const evictionPause = 3 * time.Second

// breakTwo returns when the GPU of one workload's pod is hung and that of the other's claim is lost. The error is errAway if the pods do not
// get that far. undo works after an error, too.
func (r *run) breakTwo(ctx context.Context, u user, hung, lost Workload) (undo func(context.Context) error, err error) {
	var undos []func(context.Context) error
	undo = func(ctx context.Context) error {
		var errs []error
		for _, one := range undos {
			errs = append(errs, one(context.WithoutCancel(ctx)))
		}
		return errors.Join(errs...)
	}
	if err := u.create(ctx, hung); err != nil {
		return undo, err
	}
	if !r.awaitCount(ctx, u, hung, func(l *podHistory) bool { return l.placed && len(r.watch.seen[string(l.pod.UID)]) > 0 }) {
		return undo, errAway
	}
	victims := r.watch.victims()
	at := slices.IndexFunc(victims, func(v victim) bool { return v.namespace == u.namespace && v.workload == hung.Name })
	if at < 0 {
		return undo, errAway
	}
	hungGPU, err := r.allocatedGPU(ctx, u, hung)
	if err != nil {
		return undo, err
	}
	processes, err := r.faults.hang(ctx, victims[at], Forced)
	if err != nil {
		return undo, errors.Join(err, awayIf(errors.Is(err, faults.ErrNoProcess)))
	}
	undos = append(undos, processes.End)
	if err := r.awaitWithdrawn(ctx, hungGPU, "its holder is gone and has a process that does not end"); err != nil {
		return undo, err
	}
	if err := u.create(ctx, lost); err != nil {
		return undo, err
	}
	if !r.awaitCount(ctx, u, lost, func(l *podHistory) bool { return l.pod.Spec.NodeName != "" }) {
		return undo, errAway
	}
	lostGPU, err := r.allocatedGPU(ctx, u, lost)
	if err != nil {
		return undo, err
	}
	undos = append(undos, func(context.Context) error { return r.broken.find(lostGPU) })
	r.trace.note("lost: GPU %d", lostGPU)
	if err := r.broken.lose(lostGPU); err != nil {
		return undo, err
	}
	// What kubelet prepares before the agent has noticed runs on it.
	return undo, r.awaitWithdrawn(ctx, lostGPU, "it is lost")
}

// awaitWithdrawn waits until claims are not offered the GPU. If they are for too long, the GPU counts as stuck.
func (r *run) awaitWithdrawn(ctx context.Context, gpu int, why string) error {
	name := fmt.Sprintf("%s/gpu-%d", r.auditor.node.Name(), gpu)
	for late := time.Now().Add(racePatience); ; broadcast.Sleep(ctx, retryPause) {
		offered, err := r.auditor.claimsOffer(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil && !slices.Contains(offered, name):
			return nil
		case err != nil && time.Now().After(late):
			return err
		case time.Now().After(late):
			r.statistics.add(func(c *Counters) { c.Stuck++ })
			r.reportStuck(ctx, fmt.Sprintf("claims are offered %s after %s, although %s", name, racePatience, why))
			return nil
		}
	}
}

// retry makes kubelet look at a workload's pods again and again until they are gone, or for a while: left alone it tries a claim again after
// 60 to 90 s.
func (r *run) retry(ctx context.Context, u user, w Workload) error {
	first := map[string]bool{}
	for _, v := range r.watch.present() {
		first[v.uid] = v.namespace == u.namespace && v.workload == w.Name
	}
	for deadline := time.Now().Add(racePatience); time.Now().Before(deadline) && ctx.Err() == nil; broadcast.Sleep(ctx, retryEvery) {
		left := slices.DeleteFunc(r.watch.present(), func(v victim) bool { return !first[v.uid] })
		if len(left) == 0 {
			return nil
		}
		for _, v := range left {
			patch := fmt.Appendf(nil, `{"metadata": {"annotations": {"torture/retry": %q}}}`, time.Now())
			err := persist(ctx, "annotate pod", func(ctx context.Context) error {
				_, err := u.client.CoreV1().Pods(v.namespace).Patch(ctx, v.name, types.MergePatchType, patch, metav1.PatchOptions{})
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// retryEvery is the time between two looks of kubelet.
const retryEvery = 3 * time.Second

// awaitCount reports whether all pods of a workload are soon as is says.
func (r *run) awaitCount(ctx context.Context, u user, w Workload, is func(*podHistory) bool) bool {
	for late := time.Now().Add(racePatience); time.Now().Before(late) && ctx.Err() == nil; broadcast.Sleep(ctx, retryPause) {
		if r.watch.count(u.namespace, w.Name, is) >= w.Replicas {
			return true
		}
	}
	return false
}

// allocatedGPU is the GPU of a workload's only claim.
func (r *run) allocatedGPU(ctx context.Context, u user, w Workload) (gpu int, err error) {
	err = persist(ctx, "find the claim of "+w.Name, func(ctx context.Context) error {
		now, err := r.snapshot(ctx, u)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(now.pods, func(p corev1.Pod) bool { return p.Labels[workloadLabel] == w.Name })
		if at < 0 || len(now.allocatedTo(now.pods[at])) != 1 {
			return errors.New("it has none")
		}
		gpu = now.allocatedTo(now.pods[at])[0].gpu
		return nil
	})
	return gpu, err
}

func awayIf(away bool) error {
	if away {
		return errAway
	}
	return nil
}
