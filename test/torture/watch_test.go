// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/test/oracle"
)

func newTestWatch(t *testing.T) *watch {
	statistics, trace := &statistics{}, discard(t)
	return &watch{
		memory: oracle.NewMemory(), statistics: statistics, trace: trace, podHistories: map[string]*podHistory{},
		heals: &heals{statistics: statistics, trace: trace, known: map[string]bool{}}, seen: map[string][]oracle.Device{},
		evicting: map[int]time.Time{},
	}
}

func ourPod(name string) *corev1.Pod {
	w := Workload{Name: name, API: oracle.Claim, GPUs: 1}
	pod := barePod(w, 0)
	pod.UID = types.UID(name)
	return pod
}

// TestEvictedByTaint: the eviction of a pod with limits is right while its GPU has a taint, and for evictionLag afterwards. A taint of another GPU
// does not excuse it. No taint excuses the eviction of a pod with a claim.
func TestEvictedByTaint(t *testing.T) {
	for name, c := range map[string]struct {
		gpus    map[int]bool
		evicts  map[int]time.Duration // since the end of the taint
		tainted bool
	}{
		"its GPU has a taint":          {map[int]bool{1: true, 2: true}, map[int]time.Duration{2: -1}, true},
		"its GPU had a taint just now": {map[int]bool{2: true}, map[int]time.Duration{2: time.Second}, true},
		"its GPU had a taint":          {map[int]bool{2: true}, map[int]time.Duration{2: evictionLag + time.Second}, false},
		"another GPU has a taint":      {map[int]bool{1: true}, map[int]time.Duration{2: -1}, false},
		"no GPU has a taint":           {map[int]bool{1: true}, nil, false},
		"its GPU is not known":         {nil, map[int]time.Duration{2: -1}, true},
		"no GPU is known, nor a taint": {},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTestWatch(t)
			for gpu, ended := range c.evicts {
				w.setEvicting(gpu, true)
				if ended >= 0 {
					w.setEvicting(gpu, false)
					w.evicting[gpu] = w.evicting[gpu].Add(-ended)
				}
			}
			yes := true
			pod := barePod(Workload{Name: "limits", API: oracle.Limits, GPUs: 1}, 0)
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Controller: &yes}}
			w.podSeen(pod)
			w.podHistories[""].gpus = c.gpus
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Reason: "EvictionByEvictionAPI"}}
			w.podSeen(pod)
			if now := w.statistics.now(); (now.EvictedByTaint == 1) != c.tainted || (now.WronglyEvicted == 0) != c.tainted {
				t.Errorf("evicted by a taint: %d, wrongly: %d", now.EvictedByTaint, now.WronglyEvicted)
			}
			claim := ourPod("bare")
			claim.Status.Conditions = pod.Status.Conditions
			wrongs := w.statistics.now().WronglyEvicted
			if w.podSeen(claim); w.statistics.now().WronglyEvicted != wrongs+1 {
				t.Error("a taint excuses the eviction of a pod with a claim")
			}
		})
	}
}

// TestWronglyEvicted: the eviction of a pod with a claim is wrong if it has no owner, or one that does not replace it.
func TestWronglyEvicted(t *testing.T) {
	w := newTestWatch(t)
	yes := true
	replaced := ourPod("replaced")
	replaced.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Controller: &yes}}
	deleted := ourPod("deleted")
	for _, pod := range []*corev1.Pod{replaced, ourPod("bare"), ownedBy(workflow(Workload{Name: "w"}), ourPod("workflow"))} {
		w.podSeen(pod)
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Reason: "EvictionByEvictionAPI"}}
		w.podSeen(pod)
		w.podGone(pod)
	}
	deleted.Status.Conditions = []corev1.PodCondition{{Type: corev1.DisruptionTarget, Reason: "PreemptionByScheduler"}}
	w.podGone(deleted)
	if n, wrongs := w.statistics.now().WronglyEvicted, w.takeWrongs(); n != 2 || len(wrongs) != 2 || len(w.takeWrongs()) > 0 {
		t.Errorf("%d were wrongly evicted: %v", n, wrongs)
	}
}

// TestFailedByAnUnusableDevice: a pod that came long after the agent could know fails by Tandem's refusal. What kubelet itself refuses is
// right, and so is a refusal in the first seconds or in peace.
func TestFailedByAnUnusableDevice(t *testing.T) {
	const refused = "allocate nvidia.com/gpu: device GPU-1 cannot be given to a container: read-only file system"
	for i, c := range []struct {
		message string
		came    time.Duration // after the directory became read-only; before it where negative
		usable  bool
		want    int
	}{
		{refused, unusableGrace + time.Second, false, 1},
		{"allocate nvidia.com/gpu: reserve devices for a pod: read-only file system", unusableGrace + time.Second, false, 1},
		{"Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0", unusableGrace + time.Second, false, 0},
		{refused, unusableGrace - time.Second, false, 0},
		{refused, unusableGrace + time.Second, true, 0},
	} {
		w := newTestWatch(t)
		w.setUnusable(true)
		w.unusable = w.unusable.Add(-c.came)
		if c.usable {
			w.setUnusable(false)
		}
		pod := ourPod(fmt.Sprint("p", i))
		pod.CreationTimestamp = metav1.Now()
		w.podSeen(pod)
		pod.Status.Phase, pod.Status.Reason, pod.Status.Message = corev1.PodFailed, "UnexpectedAdmissionError", c.message
		w.podSeen(pod)
		if got := w.statistics.now(); got.FailedUnusable != c.want || got.FailedAdmissions != 1 {
			t.Errorf("%+v: %d of %d", c, got.FailedUnusable, got.FailedAdmissions)
		}
	}
}

// TestVictims are pods that see GPUs and are not being deleted, the oldest first.
func TestVictims(t *testing.T) {
	w := newTestWatch(t)
	now := time.Now()
	for i, name := range []string{"young", "old", "blind", "deleted", "gone"} {
		pod := ourPod(name)
		pod.CreationTimestamp = metav1.NewTime(now.Add(-time.Duration(i) * time.Minute))
		if name == "deleted" {
			pod.DeletionTimestamp = &metav1.Time{Time: now}
		}
		w.podSeen(pod)
		if name == "gone" {
			w.podGone(pod)
		}
		if name != "blind" {
			w.seen[name] = []oracle.Device{gpu(uint32(i))}
		}
	}
	if got := fmt.Sprint(w.victims()); got != "[{old  old-0 old} {young  young-0 young}]" {
		t.Errorf("victims: %s", got)
	}
	if got := len(w.present()); got != 4 {
		t.Errorf("%d pods are there", got)
	}
}
