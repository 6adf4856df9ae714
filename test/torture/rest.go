// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// settle waits until everything is at rest; each pod that is not when patience ends is stuck.
func (r *run) settle(ctx context.Context, u user) error {
	ended := time.Now()
	problems, err := r.awaitRest(ctx, u)
	if err != nil {
		return err
	}
	r.trace.say("at rest after %s", time.Since(ended).Round(100*time.Millisecond))
	if len(problems) == 0 {
		if problems, err = r.disagreements(ctx, u); err != nil || len(problems) == 0 {
			return err
		}
	}
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(problems)) {
		lines = append(lines, name+" "+problems[name])
	}
	leaked := 0
	for name := range problems {
		if isPartition(name) {
			leaked++
		}
	}
	r.statistics.add(func(c *Counters) { c.Stuck, c.Leaked = c.Stuck+len(lines)-leaked, c.Leaked+leaked })
	r.reportStuck(ctx, lines...)
	return nil
}

// reportStuck says what is stuck and keeps the logs. The caller counts it.
func (r *run) reportStuck(ctx context.Context, lines ...string) {
	r.trace.say("STUCK: %s", strings.Join(lines, "; "))
	r.keepLogs(ctx, "stuck", lines)
}

// handOver ends the pods that run, once all is at rest, so that those who rightly waited have to get what is freed.
func (r *run) handOver(ctx context.Context, u user) error {
	return persist(ctx, "end the pods that run", func(ctx context.Context) error {
		pods, err := r.client.CoreV1().Pods(u.namespace).List(ctx, metav1.ListOptions{LabelSelector: workloadLabel})
		if err != nil {
			return err
		}
		for _, pod := range pods.Items {
			if pod.Status.Phase != corev1.PodRunning {
				continue
			}
			options := withGrace(short)
			options.Preconditions = metav1.NewUIDPreconditions(string(pod.UID))
			if err := r.client.CoreV1().Pods(u.namespace).Delete(ctx, pod.Name, options); err != nil && !apierrors.IsNotFound(err) {
				return err
			}
		}
		return nil
	})
}

// awaitRest wants two looks in a row at which every pod is settled.
func (r *run) awaitRest(ctx context.Context, u user) (problems map[string]string, err error) {
	start := time.Now()
	deadline := start.Add(settlePatience)
	calm := 0
	for {
		var now snapshot
		if now, err = r.snapshot(ctx, u); err == nil {
			problems = now.unsettled()
			maps.Copy(problems, r.hardware.ownerless(now.allocated()))
			calm++
			if len(problems) > 0 {
				calm = 0
			}
			r.trace.waiting("not at rest", problems)
		}
		// The pod needs time once it is there.
		if started := time.Now().Add(time.Minute); onlyPodsMissing(problems) && time.Since(start) < controllerPatience && started.After(deadline) {
			deadline = started
		}
		if calm == 2 || time.Now().After(deadline) && err == nil {
			return problems, nil
		}
		if time.Now().After(deadline.Add(opPatience)) {
			return nil, err
		}
		broadcast.Sleep(ctx, lookAgain)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// crashPatience is how long a container that has crashed may take to start anew, with kubelet's first back-off of 10 s.
const crashPatience = 20 * time.Second

// disagreements compares what kubelet believes to have given to the running pods with what their containers see. It asks once
// things are at rest: while pods are admitted the question does harm. A container that crashes just then sees nothing for a
// moment.
func (r *run) disagreements(ctx context.Context, u user) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, opPatience)
	defer cancel()
	for began := time.Now(); ; {
		granted, err := oracle.Granted(ctx, r.auditor.node)
		var now snapshot
		if err == nil {
			now, err = r.snapshot(ctx, u)
		}
		if err == nil {
			if problems := now.disagree(granted); len(problems) == 0 || time.Since(began) > crashPatience {
				return problems, nil
			}
		}
		broadcast.Sleep(ctx, lookAgain)
		if ctx.Err() != nil {
			return nil, err
		}
	}
}

func (r *run) snapshot(ctx context.Context, u user) (snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	pods, err := r.client.CoreV1().Pods(u.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return snapshot{}, fmt.Errorf("list pods: %w", err)
	}
	claims, err := r.client.ResourceV1().ResourceClaims(u.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return snapshot{}, fmt.Errorf("list ResourceClaims: %w", err)
	}
	deployments, err := r.client.AppsV1().Deployments(u.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return snapshot{}, fmt.Errorf("list Deployments: %w", err)
	}
	foreign, err := r.foreign()
	return snapshot{
		pods: pods.Items, claims: claims.Items, deployments: deployments.Items, seen: r.watch.sights(), room: r.room(), foreign: foreign,
	}, err
}

// foreign are the device IDs of foreign plugins that kubelet has recorded, by the pod's UID.
func (r *run) foreign() (map[string][]string, error) {
	root, err := r.auditor.node.Root()
	if err != nil {
		return nil, err
	}
	recorded, err := oracle.Recorded(root)
	for uid, ids := range recorded {
		recorded[uid] = slices.DeleteFunc(ids, func(id string) bool { _, is := oracle.ForeignID(id); return !is })
	}
	return recorded, err
}

// awaitFree waits until nothing is left of what was deleted, and answers what is when patience ends.
func (r *run) awaitFree(ctx context.Context) (lines []string, missing int, err error) {
	deadline := time.Now().Add(freePatience)
	for {
		call, cancel := context.WithTimeout(ctx, 2*callPatience)
		lines, missing, err = r.auditor.leaks(call)
		cancel()
		if err == nil {
			r.trace.waiting("not free", lines)
		}
		if err == nil && (len(lines) == 0 || time.Now().After(deadline)) {
			return lines, missing, nil
		}
		if time.Now().After(deadline.Add(opPatience)) {
			return nil, 0, err
		}
		broadcast.Sleep(ctx, lookAgain)
		if ctx.Err() != nil {
			return nil, 0, ctx.Err()
		}
	}
}

// onlyPodsMissing reports whether a controller of Kubernetes has not created all pods, and nothing else is left to wait for.
func onlyPodsMissing(problems map[string]string) bool {
	for object := range problems {
		if !strings.HasPrefix(object, "deployment ") {
			return false
		}
	}
	return true
}
