// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

type option func(*corev1.Pod)

func pod(uid, name string, options ...option) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name, UID: types.UID(uid)}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, o := range options {
		o(p)
	}
	return p
}

func phase(phase corev1.PodPhase) option { return func(p *corev1.Pod) { p.Status.Phase = phase } }
func beingDeleted(p *corev1.Pod)         { now := metav1.Now(); p.DeletionTimestamp = &now }
func mirrorOf(static string) option {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: static} }
}
func ranOnce(p *corev1.Pod) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", ContainerID: "containerd://1"}}
}
func names(claim string) option {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "gpu", ResourceClaimName: &claim})
	}
}
func fromTemplate(claim string) option {
	return func(p *corev1.Pod) {
		template := "template"
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "gpu", ResourceClaimTemplateName: &template})
		p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim}, {Name: "none"}}
	}
}
func extended(claim string) option {
	return func(p *corev1.Pod) {
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: claim}
	}
}

// known is a Pods that has synced a while ago, without an API server.
func known(t *testing.T, f tree, pods ...*corev1.Pod) *Pods {
	t.Helper()
	p, err := NewPods(fake.NewClientset(), "node-1", f.fresh(), t.TempDir())
	must(t, err)
	p.synced = time.Now().Add(-time.Hour)
	for _, pod := range pods {
		p.add(t, pod)
	}
	return p
}

func (p *Pods) add(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	trimmed, err := trim(pod)
	must(t, err)
	p.store(trimmed)
}

func limit(state ledger.State, age time.Duration, uids ...string) ledger.Hold {
	h := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-a"}, State: state, Since: time.Now().Add(-age), Began: time.Now().Add(-age), Resource: "nvidia.com/gpu"}
	for _, uid := range uids {
		h.Pods = append(h.Pods, ledger.Pod{UID: uid})
	}
	return h
}

// setBack has a hold that was taken before the clock was set back by an hour.
func setBack(h ledger.Hold) ledger.Hold {
	h.Since = h.Since.Add(time.Hour)
	return h
}

func claim(state ledger.State, uids ...string) ledger.Hold {
	h := limit(state, time.Minute, uids...)
	h.Holder, h.Namespace, h.Name = ledger.Holder{Kind: ledger.KindClaim, ID: "claim-uid"}, "apps", "one"
	return h
}

func claimSince(age time.Duration, state ledger.State, uids ...string) ledger.Hold {
	h := claim(state, uids...)
	h.Began = time.Now().Add(-age)
	return h
}

// cgroup states of a pod in a table.
const (
	noGroup = iota
	emptyGroup
	busyGroup
)

func (f tree) group(uid string, state int) {
	if state != noGroup {
		f.v2("kubepods/burstable/pod"+uid, state == busyGroup)
	}
}

func TestStateOfPodHold(t *testing.T) {
	before, recent := 2*time.Hour, 10*time.Second // the first list was an hour ago
	tests := []struct {
		name   string
		pod    *corev1.Pod
		delete bool
		group  int
		hold   ledger.Hold
		want   ledger.PodState
	}{
		{"live", pod(podA, "a"), false, busyGroup, limit(ledger.StateHeld, recent, podA), ledger.Running},
		{"live, no cgroup yet", pod(podA, "a"), false, noGroup, limit(ledger.StateHeld, recent, podA), ledger.Running},
		{"being deleted", pod(podA, "a", beingDeleted), false, busyGroup, limit(ledger.StateHeld, recent, podA), ledger.Terminating},
		{"being deleted, no cgroup", pod(podA, "a", beingDeleted), false, noGroup, limit(ledger.StateHeld, recent, podA), ledger.Terminating},
		{"Succeeded, busy", pod(podA, "a", phase(corev1.PodSucceeded)), false, busyGroup, limit(ledger.StateHeld, recent, podA), ledger.Orphaned},
		{"Succeeded, empty", pod(podA, "a", phase(corev1.PodSucceeded)), false, emptyGroup, limit(ledger.StateHeld, recent, podA), ledger.Gone},
		{"Succeeded, no cgroup", pod(podA, "a", phase(corev1.PodSucceeded)), false, noGroup, limit(ledger.StateHeld, recent, podA), ledger.Gone},
		{"Failed by another component, busy", pod(podA, "a", phase(corev1.PodFailed)), false, busyGroup, limit(ledger.StateHeld, recent, podA), ledger.Orphaned},
		{"Succeeded and being deleted", pod(podA, "a", phase(corev1.PodSucceeded), beingDeleted), false, emptyGroup, limit(ledger.StateHeld, recent, podA), ledger.Gone},
		{"deleted, busy", pod(podA, "a"), true, busyGroup, limit(ledger.StateHeld, recent, podA), ledger.Orphaned},
		{"deleted, empty: a container may follow", pod(podA, "a"), true, emptyGroup, limit(ledger.StateHeld, recent, podA), ledger.Orphaned},
		{"deleted, no cgroup", pod(podA, "a"), true, noGroup, limit(ledger.StateHeld, recent, podA), ledger.Gone},
		{"deleted, no cgroup, just allocated", pod(podA, "a"), true, noGroup, limit(ledger.StateHeld, 0, podA), ledger.Terminating},
		{"deleted, busy, just allocated", pod(podA, "a"), true, busyGroup, limit(ledger.StateHeld, 0, podA), ledger.Orphaned},
		{"deleted, no cgroup, just allocated, draining", pod(podA, "a"), true, noGroup, limit(ledger.StateDraining, 0, podA), ledger.Terminating},
		{"deleted, busy, draining", pod(podA, "a"), true, busyGroup, limit(ledger.StateDraining, 0, podA), ledger.Orphaned},
		{"deleted before it had started", pod(podA, "a", pending), true, noGroup, limit(ledger.StateHeld, recent, podA), ledger.Orphaned},
		{"never seen, held before the first list", nil, false, noGroup, limit(ledger.StateHeld, before, podA), ledger.Gone},
		{"never seen, held before the first list, busy", nil, false, busyGroup, limit(ledger.StateHeld, before, podA), ledger.Orphaned},
		{"never seen, held since", nil, false, noGroup, limit(ledger.StateHeld, recent, podA), ledger.Running},
		{"never seen, expected", nil, false, noGroup, limit(ledger.StateRestored, recent, podA), ledger.Gone},
		{"never seen, expected, busy", nil, false, busyGroup, limit(ledger.StateRestored, recent, podA), ledger.Orphaned},
		{"no pod known", nil, false, noGroup, limit(ledger.StateHeld, recent), ledger.Running},
		{"one of two lives", pod(podA, "a"), false, busyGroup, limit(ledger.StateRestored, recent, podA, podB), ledger.Running},
		{"deleted, just allocated, the clock was set back", pod(podA, "a"), true, noGroup, setBack(limit(ledger.StateHeld, 0, podA)), ledger.Terminating},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := newTree(t)
			f.v2("kubepods/burstable", false)
			f.group(podA, test.group)
			p := known(t, f)
			if test.pod != nil {
				p.add(t, test.pod)
			}
			if test.delete {
				p.forget(test.pod)
			}
			if got := p.PodState(test.hold); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
			p.synced = time.Time{}
			if got := p.PodState(test.hold); got != ledger.Running {
				t.Errorf("before the first list: got %v, want %v", got, ledger.Running)
			}
		})
	}
}

func TestPodStateWithoutCgroups(t *testing.T) {
	p := known(t, newTree(t), pod(podA, "a", phase(corev1.PodSucceeded)))
	if got := p.PodState(limit(ledger.StateHeld, time.Minute, podA)); got != ledger.Orphaned {
		t.Errorf("limit: got %v", got)
	}
	if got := p.PodState(claim(ledger.StateDraining, podA)); got != ledger.Orphaned {
		t.Errorf("claim: got %v", got)
	}
}

// former is a pod that had the claim and has ended.
var former = pod(formerPod, "former", names("one"), ranOnce, phase(corev1.PodSucceeded))

func TestStateOfClaim(t *testing.T) {
	tests := []struct {
		name   string
		pods   []*corev1.Pod
		delete []string // names
		groups map[string]int
		hold   ledger.Hold
		want   ledger.PodState
	}{
		{"held, pod lives", []*corev1.Pod{pod(podA, "a", names("one"))}, nil, nil, claim(ledger.StateHeld, podA), ledger.Running},
		{"held, pod is being deleted", []*corev1.Pod{pod(podA, "a", names("one"), beingDeleted)}, nil, nil, claim(ledger.StateHeld, podA), ledger.Terminating},
		{"held, pod has ended", []*corev1.Pod{pod(podA, "a", phase(corev1.PodFailed))}, nil, nil, claim(ledger.StateHeld, podA), ledger.Terminating},
		{"held, one pod ends, the other lives", []*corev1.Pod{pod(podA, "a", beingDeleted), pod(podB, "b", names("one"))}, nil, nil, claim(ledger.StateHeld, podA), ledger.Running},
		{"held, no pod known", nil, nil, nil, claim(ledger.StateHeld), ledger.Running},
		{"draining, no pod known", nil, nil, nil, claim(ledger.StateDraining), ledger.Gone},
		{"draining, busy", []*corev1.Pod{pod(podA, "a", beingDeleted)}, nil, map[string]int{podA: busyGroup}, claim(ledger.StateDraining, podA), ledger.Orphaned},
		{"draining, empty", []*corev1.Pod{pod(podA, "a", beingDeleted)}, nil, map[string]int{podA: emptyGroup}, claim(ledger.StateDraining, podA), ledger.Gone},
		{"draining, prepared and not yet started", []*corev1.Pod{pod(podA, "a", names("one"))}, nil, map[string]int{podA: emptyGroup}, claim(ledger.StateDraining, podA), ledger.Running},
		{"draining, a pod may have been started without asking", []*corev1.Pod{former, pod(podA, "a", names("one"))}, nil, map[string]int{podA: emptyGroup}, claimSince(time.Second, ledger.StateDraining, formerPod), ledger.Orphaned},
		{"draining, a pod that kubelet does not start yet", []*corev1.Pod{former, pod(podA, "a", names("one"))}, nil, nil, claimSince(time.Second, ledger.StateDraining, formerPod), ledger.Gone},
		{"draining, a pod was force-deleted that may have been started without asking", []*corev1.Pod{former, pod(podA, "a", names("one"))}, []string{"a"}, map[string]int{podA: emptyGroup}, claimSince(time.Second, ledger.StateDraining, formerPod), ledger.Orphaned},
		{"draining, a pod of another claim was force-deleted", []*corev1.Pod{former, pod(podA, "a", names("two"))}, []string{"a"}, map[string]int{podA: emptyGroup}, claimSince(time.Second, ledger.StateDraining, formerPod), ledger.Gone},
		{"draining, no pod was told that it has the claim", []*corev1.Pod{pod(podA, "a", names("one"))}, nil, map[string]int{podA: emptyGroup}, claimSince(time.Second, ledger.StateDraining), ledger.Gone},
		{"draining, a pod that has not been seen", []*corev1.Pod{former}, nil, map[string]int{podB: emptyGroup}, claimSince(time.Second, ledger.StateDraining, formerPod), ledger.Orphaned},
		{"draining, a pod that ran and was not recorded", []*corev1.Pod{former, pod(podA, "a", names("one"), ranOnce, beingDeleted)}, nil, map[string]int{podA: emptyGroup}, claimSince(time.Second, ledger.StateDraining, formerPod), ledger.Gone},
		{"draining, prepared before a check", nil, nil, map[string]int{podA: emptyGroup}, claimSince(time.Second, ledger.StateDraining, podA), ledger.Orphaned},
		{"draining, prepared and never seen", nil, nil, nil, claimSince(2*time.Minute, ledger.StateDraining, podA), ledger.Gone},
		{"draining, between two starts of a container", []*corev1.Pod{pod(podA, "a", names("one"), ranOnce)}, nil, map[string]int{podA: emptyGroup}, claim(ledger.StateDraining), ledger.Running},
		{"draining, ran and is being deleted", []*corev1.Pod{pod(podA, "a", names("one"), ranOnce, beingDeleted)}, nil, map[string]int{podA: emptyGroup}, claim(ledger.StateDraining, podA), ledger.Gone},
		{"draining, ran and has ended", []*corev1.Pod{pod(podA, "a", names("one"), ranOnce, phase(corev1.PodSucceeded))}, nil, map[string]int{podA: emptyGroup}, claim(ledger.StateDraining, podA), ledger.Gone},
		{"draining, another pod shares it by name", []*corev1.Pod{pod(podB, "b", names("one"))}, nil, map[string]int{podB: busyGroup}, claim(ledger.StateDraining, podA), ledger.Orphaned},
		{"draining, another pod shares it by template", []*corev1.Pod{pod(podB, "b", fromTemplate("one"))}, nil, map[string]int{podB: busyGroup}, claim(ledger.StateDraining), ledger.Orphaned},
		{"draining, for an extended resource", []*corev1.Pod{pod(podB, "b", extended("one"))}, nil, map[string]int{podB: busyGroup}, claim(ledger.StateDraining), ledger.Orphaned},
		{"draining, a pod of another claim", []*corev1.Pod{pod(podB, "b", names("two"), extended(""))}, nil, map[string]int{podB: busyGroup}, claim(ledger.StateDraining), ledger.Gone},
		{"draining, an unrecorded pod was force-deleted", []*corev1.Pod{pod(podB, "b", names("one"))}, []string{"b"}, map[string]int{podB: busyGroup}, claim(ledger.StateDraining), ledger.Orphaned},
		{"draining, recorded and never seen", nil, nil, map[string]int{podA: busyGroup}, claim(ledger.StateDraining, podA), ledger.Orphaned},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			f := newTree(t)
			f.v2("kubepods/burstable", false)
			for uid, state := range test.groups {
				f.group(uid, state)
			}
			p := known(t, f, test.pods...)
			for _, pod := range test.pods {
				if slices.Contains(test.delete, pod.Name) {
					p.forget(pod)
				}
			}
			if got := p.PodState(test.hold); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// TestStartedWithoutAsking: until kubelet receives the Unprepare response it starts pods of the claim without a Prepare call. One that comes
// between two looks at its state is in its cgroup by then, and not yet in our watch, or it has no process yet.
func TestStartedWithoutAsking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTree(t)
		f.group(podA, emptyGroup)
		p := known(t, f, former)
		h := claimSince(0, ledger.StateDraining, formerPod)
		ask := func(when string, want ledger.PodState) {
			t.Helper()
			p.Sweep([]ledger.Hold{h})
			if got := p.PodState(h); got != want {
				t.Errorf("%s: got %v, want %v", when, got, want)
			}
		}
		ask("the pod is unknown", ledger.Orphaned)
		p.add(t, pod(podA, "a", names("two")))
		ask("it is another claim's", ledger.Gone)
		p.add(t, pod(podA, "a", names("one")))
		ask("it is the claim's", ledger.Orphaned)
		f.remove("kubepods/burstable/pod" + podA)
		ask("it is gone", ledger.Gone)
		f.group(podA, emptyGroup)
		time.Sleep(reportDelay)
		ask("it would have a process by now", ledger.Gone)

		// One that comes when kubelet has forgotten the claim is another claim's of that name, or kubelet asks.
		f.group(podB, emptyGroup)
		p.add(t, pod(podB, "b", names("one")))
		ask("another one comes", ledger.Gone)
		h.Began = time.Now()
		ask("the claim was prepared and let go of once more", ledger.Orphaned)
	})
}

// An unknown pod with a cgroup without a process keeps a draining claim for a minute, while it may start. kubelet leaves some cgroups
// for longer.
func TestEmptyCgroupOfAnUnknownPod(t *testing.T) {
	f := newTree(t)
	f.group(podA, emptyGroup)
	f.group(podB, emptyGroup)
	p := known(t, f)
	ask := func(name string, h ledger.Hold, want ledger.PodState) {
		t.Helper()
		if got := p.PodState(h); got != want {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
	ask("just began to drain", claimSince(0, ledger.StateDraining, podA), ledger.Orphaned)
	ask("drained for a minute", claimSince(reportDelay, ledger.StateDraining, podA), ledger.Gone)
	p.listed(time.Now(), []string{podA, podB})
	time.Sleep(time.Millisecond)
	ask("the first list did not have the pod", claimSince(0, ledger.StateDraining, podA), ledger.Gone)
	ask("it drained before the list", claimSince(time.Second, ledger.StateDraining, podA), ledger.Orphaned) // podB may have come meanwhile
	f.remove("kubepods/burstable/pod" + podB)
	ask("it drained before the list, and has its own pod only", claimSince(time.Second, ledger.StateDraining, podA), ledger.Gone)
}

// The pods of a claim of the same name that came after it do not keep it; its own do.
func TestStateWithoutClaim(t *testing.T) {
	f := newTree(t)
	f.group(podB, busyGroup)
	p := known(t, f, pod(podB, "b", names("one"), ranOnce))
	if got := p.PodState(claim(ledger.StateDraining, podA)); got != ledger.Running {
		t.Errorf("as long as the claim may exist: got %v", got)
	}
	if got := p.StateWithoutClaim(claim(ledger.StateHeld, podA)); got != ledger.Gone {
		t.Errorf("the pod is the successor's: got %v", got)
	}
	if got := p.StateWithoutClaim(claim(ledger.StateHeld, podB)); got != ledger.Running {
		t.Errorf("the pod is recorded: got %v", got)
	}
	p.forget(pod(podB, "b"))
	if got := p.StateWithoutClaim(claim(ledger.StateHeld, podA)); got != ledger.Orphaned {
		t.Errorf("a deleted pod that still runs may be its own: got %v", got)
	}
}

// After a claim was prepared with other devices, only pods of before keep its hold.
func TestStateBefore(t *testing.T) {
	f := newTree(t)
	f.group(podB, busyGroup)
	p := known(t, f, pod(podB, "b", names("one"), ranOnce))
	state := fmt.Sprintf(`{"ClaimInfoStateList":[{"ClaimUID":"claim-uid","PodUIDs":{%q:{}},
		"DriverState":{"gpu.nvidia.com":{"Devices":[{"PoolName":"n"}]}}}]}`, podB)
	file, err := json.Marshal(map[string]any{"Data": state, "Checksum": crc32.ChecksumIEEE([]byte(state))})
	must(t, err)
	must(t, os.WriteFile(ClaimStatePath(p.kubeletDir), file, 0o600))
	h := claim(ledger.StateHeld, podA)
	if got := p.StateBefore(h); got != ledger.Gone {
		t.Errorf("the pod was prepared later: got %v", got)
	}
	if got := p.StateBefore(claim(ledger.StateHeld, podB)); got != ledger.Running {
		t.Errorf("the pod is recorded: got %v", got)
	}
	f.group(podA, busyGroup)
	if got := p.StateBefore(h); got != ledger.Orphaned {
		t.Errorf("its pod has a process: got %v", got)
	}
}

func TestMirrorPods(t *testing.T) {
	f := newTree(t)
	f.group(static, busyGroup)
	mirror, again := pod("mirror-1", "etcd", mirrorOf(static)), pod("mirror-2", "etcd", mirrorOf(static))
	hold := limit(ledger.StateHeld, time.Minute, static)
	p := known(t, f, mirror)
	ask := func(when string, want ledger.PodState) {
		t.Helper()
		if got := p.PodState(hold); got != want {
			t.Errorf("%s: got %v, want %v", when, got, want)
		}
	}
	ask("mirrored", ledger.Running)
	if got := p.Name(static); got.Name != "etcd" {
		t.Errorf("name is %+v", got)
	}
	p.forget(mirror)
	ask("the mirror pod was deleted", ledger.Orphaned)
	p.add(t, again)
	ask("kubelet made it again", ledger.Running)
	p.add(t, mirror)
	p.add(t, again)
	p.forget(mirror)
	ask("made again before the deletion was seen", ledger.Running)
	p.forget(cache.DeletedFinalStateUnknown{Key: "apps/etcd", Obj: again})
	f.remove("kubepods/burstable/pod" + static)
	ask("manifest removed", ledger.Gone)
}

func TestTrimKeepsWhatIsNeeded(t *testing.T) {
	full := pod(podA, "a", names("one"), fromTemplate("two"), extended("three"), beingDeleted, mirrorOf(static), ranOnce, phase(corev1.PodFailed),
		asks("1", "2"), asksFirst("4"), admitted, safeToEvict, ownedBy("Other", false), ownedBy("ReplicaSet", true))
	full.ResourceVersion = "7"
	full.Annotations["other"] = "x"
	full.Labels = map[string]string{"other": "x"}
	once, err := trim(full)
	must(t, err)
	twice, err := trim(once)
	must(t, err)
	if !reflect.DeepEqual(once, twice) {
		t.Errorf("trimmed twice it is %+v, not %+v", twice, once)
	}
	got := once.(*corev1.Pod)
	if got.UID != podA || got.ResourceVersion != "7" || runningUID(got) != static || got.DeletionTimestamp == nil || !podstatus.Ended(got) {
		t.Errorf("got %+v", got)
	}
	for _, claim := range []string{"one", "two", "three"} {
		if !claimsOf(got)[claim] {
			t.Errorf("claim %s is lost", claim)
		}
	}
	if len(got.Status.ContainerStatuses) != 1 {
		t.Errorf("a started container is lost: %+v", got.Status)
	}
	if len(got.Spec.Containers) != 1 || len(got.Spec.Containers[0].Resources.Requests) != 2 || len(got.OwnerReferences) != 1 ||
		got.Labels != nil || len(got.Annotations) != 2 {
		t.Errorf("kept too much or too little: %+v", got)
	}
	if asked := asked(got, ours)["nvidia.com/gpu"]; asked != 4 || got.Status.StartTime == nil || got.OwnerReferences[0].Kind != "ReplicaSet" {
		t.Errorf("what it asks for (%d), its start or its owner is lost: %+v", asked, got)
	}
	if len(full.Spec.Containers) != 2 || full.Labels == nil || len(full.OwnerReferences) != 2 {
		t.Error("the original was changed")
	}
	fresh, err := trim(pod(podB, "b"))
	must(t, err)
	if bare := fresh.(*corev1.Pod); bare.Status.ContainerStatuses != nil || bare.Spec.Containers != nil || bare.OwnerReferences != nil {
		t.Errorf("nothing was started, asked for or owned: %+v", bare)
	}
	if other, err := trim("no pod"); err != nil || other != "no pod" {
		t.Errorf("got %v, %v", other, err)
	}
}

// age makes a deletion one of a while ago.
func (p *Pods) age(uid types.UID) {
	gone := p.pods[uid]
	gone.ended = time.Now().Add(-2 * reportDelay)
	p.pods[uid] = gone
}

func TestSweep(t *testing.T) {
	f := newTree(t)
	f.group(podB, busyGroup)
	p := known(t, f)
	for _, uid := range []string{"held", podB, "gone", "gone just now"} {
		p.add(t, pod(uid, uid))
		p.forget(pod(uid, uid))
	}
	for _, uid := range []types.UID{"held", podB, "gone"} {
		p.age(uid)
	}
	p.Sweep([]ledger.Hold{limit(ledger.StateHeld, 0, "held")})
	left := slices.Sorted(maps.Keys(p.pods))
	if want := []types.UID{podB, "gone just now", "held"}; !slices.Equal(left, want) {
		t.Errorf("remembers %v, want %v", left, want)
	}
}

func TestEndedBy(t *testing.T) {
	start := time.Now()
	p := known(t, newTree(t), pod(podA, "a"), pod(podB, "b", phase(corev1.PodSucceeded)))
	later := time.Now().Add(time.Hour)
	for _, test := range []struct {
		uid    string
		moment time.Time
		want   bool
	}{{podA, later, false}, {podB, later, true}, {podB, start.Add(-time.Second), false}, {"unknown", later, false}} {
		if got := p.EndedBy(test.uid, test.moment); got != test.want {
			t.Errorf("%s before %s: got %v", test.uid, test.moment, got)
		}
	}
	p.forget(pod(podA, "a"))
	if !p.EndedBy(podA, later) {
		t.Error("a deleted pod has ended")
	}
}

func TestUnknownPodsAndClaimNames(t *testing.T) {
	f := newTree(t)
	f.group(podA, busyGroup)
	f.group(podB, emptyGroup)
	f.group(static, busyGroup)
	p := known(t, f, pod(podA, "a", names("one"), extended("two")), pod("mirror", "etcd", mirrorOf(static)), pod("c", "c", names("one")))
	got, err := p.UnknownPods()
	if err != nil || !slices.Equal(got, []string{podB}) {
		t.Errorf("unknown pods are %v, %v", got, err)
	}
	if got, want := p.ClaimNames(), []types.NamespacedName{{Namespace: "apps", Name: "one"}, {Namespace: "apps", Name: "two"}}; !slices.Equal(got, want) {
		t.Errorf("claims are %v, want %v", got, want)
	}
	// A pod that was deleted by force may run on.
	p.forget(pod(podA, "a"))
	if got, err := p.UnknownPods(); err != nil || !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values([]string{podA, podB}))) {
		t.Errorf("unknown pods are %v, %v", got, err)
	}
}

// An update that changes nothing of interest wakes no waiter.
func TestOnlyNewsIsAnnounced(t *testing.T) {
	p := known(t, newTree(t))
	news := func(when string, want bool, pod *corev1.Pod) {
		t.Helper()
		changed := p.Changed()
		p.add(t, pod)
		select {
		case <-changed:
			if !want {
				t.Errorf("%s: announced", when)
			}
		default:
			if want {
				t.Errorf("%s: not announced", when)
			}
		}
	}
	a := pod(podA, "a")
	news("first seen", true, a)
	again := a.DeepCopy()
	again.ResourceVersion, again.Status.PodIP = "8", "10.0.0.1"
	news("an address", false, again)
	news("started", true, pod(podA, "a", ranOnce))
	news("ended", true, pod(podA, "a", ranOnce, phase(corev1.PodFailed)))
}

// TestRun goes through a real informer, with a pod that is replaced by one of its name.
func TestRun(t *testing.T) {
	f := newTree(t)
	f.v2("kubepods/burstable", false)
	client := fake.NewClientset(pod(podA, "a"))
	p, err := NewPods(client, "node-1", f.fresh(), t.TempDir())
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	if !p.AwaitSync(ctx) {
		t.Fatal("not synced")
	}
	// All of the first list is there with it.
	if !p.Known(podA) {
		t.Fatal("synced without its pods")
	}
	await := func(what string, reached func() bool) {
		t.Helper()
		for {
			changed := p.Changed()
			if reached() {
				return
			}
			select {
			case <-changed:
			case <-time.After(time.Minute):
				t.Fatalf("never: %s", what)
			}
		}
	}
	pods := client.CoreV1().Pods("apps")
	// As after an interrupted watch: one update instead of a deletion and an addition.
	_, err = pods.Update(ctx, pod(podB, "a"), metav1.UpdateOptions{})
	must(t, err)
	await("the new pod", func() bool { return p.Known(podB) })
	await("the end of the old one", func() bool { return p.PodState(limit(ledger.StateHeld, time.Minute, podA)) == ledger.Gone })
	must(t, pods.Delete(ctx, "a", metav1.DeleteOptions{}))
	await("the deletion", func() bool { return p.EndedBy(podB, time.Now().Add(time.Hour)) })
	cancel()
	must(t, <-done)
	if p.AwaitSync(ctx) != true {
		t.Error("it was synced")
	}
}

func TestAwaitSyncEndsWithContext(t *testing.T) {
	p, err := NewPods(fake.NewClientset(), "node-1", newTree(t).fresh(), t.TempDir())
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if p.AwaitSync(ctx) {
		t.Error("synced without an informer")
	}
}

func TestStarted(t *testing.T) {
	for state, want := range map[int]bool{noGroup: false, emptyGroup: false, busyGroup: true} {
		f := newTree(t)
		f.v2("kubepods/burstable/podanchor", true)
		f.group(podA, state)
		if got := known(t, f).Started(limit(ledger.StateHeld, time.Second, podA), nil); got != want {
			t.Errorf("cgroup state %d: started %v, want %v", state, got, want)
		}
	}
	if !known(t, newTree(t)).Started(limit(ledger.StateHeld, time.Second, podA), nil) {
		t.Error("a pod of which the kernel says nothing has not started")
	}
}

// TestStartedBeforeTheWatch: the agent has restarted, and a limit of before names no pod. Its pod may have been force-deleted
// meanwhile: the API server has forgotten it, kubelet has struck it off, and it runs.
func TestStartedBeforeTheWatch(t *testing.T) {
	for state, want := range map[int]bool{noGroup: false, emptyGroup: false, busyGroup: true} {
		f := newTree(t)
		f.v2("kubepods/burstable/podanchor", false)
		f.group(podA, state)
		p := known(t, f)
		if got := p.Started(limit(ledger.StateHeld, 2*time.Hour), nil); got != want {
			t.Errorf("cgroup state %d: started %v, want %v", state, got, want)
		}
		// One that was given out since names no pod yet: its pod would have been seen.
		if p.Started(limit(ledger.StateHeld, time.Minute), nil) {
			t.Errorf("cgroup state %d: a new hold counts as the unknown pod's", state)
		}
	}
}

// TestForceDeletedBeforeItStarted: a kubelet that is frozen between the admission and the pod's cgroup starts the pod when it
// goes on, and hears of the deletion afterwards.
func TestForceDeletedBeforeItStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTree(t)
		f.v2("kubepods/burstable", false)
		p := known(t, f)
		ask := func(want ledger.PodState) {
			t.Helper()
			if got := p.PodState(limit(ledger.StateHeld, time.Hour, podA)); got != want {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		waiting := pod(podA, "a", pending)
		p.add(t, waiting)
		p.forget(waiting)
		ask(ledger.Orphaned)
		time.Sleep(reportDelay)
		ask(ledger.Gone)

		p.add(t, waiting)
		p.forget(waiting)
		f.group(podA, emptyGroup)
		ask(ledger.Orphaned)
		f.remove("kubepods/burstable/pod" + podA)
		ask(ledger.Gone)
	})
}

// TestForceDeletedBeforeTheWatch: the same while the agent restarts.
func TestForceDeletedBeforeTheWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newTree(t)
		f.v2("kubepods/burstable", false)
		p := known(t, f)
		p.synced = time.Now()
		h := limit(ledger.StateHeld, Settling, podA)
		ask := func(want ledger.PodState) {
			t.Helper()
			if got := p.PodState(h); got != want {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		ask(ledger.Orphaned)
		time.Sleep(reportDelay - Settling)
		ask(ledger.Gone)
	})
}

// TestStartedAndStruckOff: kubelet has admitted a pod that our watch knew to be gone, and has struck it off its checkpoint since.
// The hold names no pod, and the pod that runs has no other hold.
func TestStartedAndStruckOff(t *testing.T) {
	f := newTree(t)
	f.group(podA, busyGroup)
	p := known(t, f)
	h := limit(ledger.StateHeld, time.Second)
	h.Resource = "nvidia.com/gpu"
	if p.Started(h, []ledger.Hold{h}) {
		t.Error("no pod requests the resource")
	}
	asking := pod(podA, "a", pending, asks("1"))
	p.add(t, asking)
	p.forget(asking)
	if !p.Started(h, []ledger.Hold{h}) {
		t.Error("a pod that runs has nothing of what it asks for")
	}
	if p.Started(h, []ledger.Hold{h, limit(ledger.StateHeld, time.Second, podA)}) {
		t.Error("the pod that runs has all that it asks for")
	}
}

// TestStartedBeforeAnybodyLooked: the pod of a limit that has no pod yet is in kubelet's checkpoint, unless that is older.
func TestStartedBeforeAnybodyLooked(t *testing.T) {
	f := newTree(t)
	f.group(podA, busyGroup)
	p := known(t, f)
	path := DeviceCheckpointPath(p.kubeletDir)
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, fmt.Appendf(nil, `{"Data":{"PodDeviceEntries":[{"PodUID":%q,"ContainerName":"init","ResourceName":"nvidia.com/gpu",
		"DeviceIDs":{"0":["GPU-a"]}}]},"Checksum":1}`, podA), 0o600))
	h := limit(ledger.StateHeld, time.Second)
	h.Resource = "nvidia.com/gpu"
	if !p.Started(h, nil) {
		t.Error("the pod in the checkpoint runs")
	}
	if !p.Started(setBack(h), nil) {
		t.Error("the pod in the checkpoint runs, whatever the clock says")
	}
	must(t, os.Chtimes(path, time.Time{}, time.Now().Add(-time.Minute)))
	if p.Started(h, nil) {
		t.Error("the checkpoint names the pod before")
	}
	other := limit(ledger.StateHeld, time.Second)
	other.Holder.ID, other.Resource = "GPU-b", "nvidia.com/gpu"
	if p.Started(other, nil) {
		t.Error("the checkpoint names another device")
	}
}

// TestKubeletStillHasTheDevices: a claim has not ended while kubelet may start a pod with its devices without asking.
func TestKubeletStillHasTheDevices(t *testing.T) {
	f := newTree(t)
	f.v2("kubepods/burstable", true)
	p := known(t, f)
	for state, want := range map[string]ledger.PodState{
		`{"ClaimInfoStateList":[]}`: ledger.Gone,
		`{"ClaimInfoStateList":[{"ClaimUID":"claim-uid","DriverState":{"gpu.nvidia.com":{}}}]}`:                             ledger.Gone,
		`{"ClaimInfoStateList":[{"ClaimUID":"other","DriverState":{"gpu.nvidia.com":{"Devices":[{"PoolName":"n"}]}}}]}`:     ledger.Gone,
		`{"ClaimInfoStateList":[{"ClaimUID":"claim-uid","DriverState":{"gpu.nvidia.com":{"Devices":[{"PoolName":"n"}]}}}]}`: ledger.Orphaned,
		`torn`: ledger.Orphaned,
	} {
		file, err := json.Marshal(map[string]any{"Data": state, "Checksum": crc32.ChecksumIEEE([]byte(state))})
		must(t, err)
		must(t, os.WriteFile(ClaimStatePath(p.kubeletDir), file, 0o600))
		if got := p.PodState(claim(ledger.StateDraining, podA)); got != want {
			t.Errorf("%s: %v, want %v", state, got, want)
		}
	}
}

// TestPodThatComesDuringUnprepare: kubelets before 1.37 start a pod with the devices of a claim whose Unprepare is under way, and
// forget both when they hear the answer. Our watch may hear of the pod last.
func TestPodThatComesDuringUnprepare(t *testing.T) {
	f := newTree(t)
	f.group(podA, emptyGroup)
	f.group(podB, emptyGroup)
	f.v2("kubepods/burstable", true)
	p := known(t, f, pod(podA, "a", names("one"), ranOnce, beingDeleted))
	says := func(state string) {
		file, err := json.Marshal(map[string]any{"Data": state, "Checksum": crc32.ChecksumIEEE([]byte(state))})
		must(t, err)
		must(t, os.WriteFile(ClaimStatePath(p.kubeletDir), file, 0o600))
	}
	h := claimSince(0, ledger.StateDraining, podA)
	podState := func(when string, want ledger.PodState) {
		t.Helper()
		p.Sweep([]ledger.Hold{h})
		if got := p.PodState(h); got != want {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	says(fmt.Sprintf(`{"ClaimInfoStateList":[{"ClaimUID":"claim-uid","PodUIDs":{%q:{},%q:{}},"DriverState":{"gpu.nvidia.com":{"Devices":[{"PoolName":"n"}]}}}]}`, podA, podB))
	podState("before the answer", ledger.Orphaned)
	_, added, err := p.AddedPods(h)
	must(t, err)
	if len(added) != 1 || added[0].UID != podB {
		t.Errorf("added: %v", added)
	}
	h.Pods = append(h.Pods, added...) // as the reconciler records it
	says(`{"ClaimInfoStateList":[]}`)
	podState("the pod has a cgroup and is unknown", ledger.Orphaned)
	p.store(pod(podB, "b", names("one")))
	podState("it is about to start", ledger.Running)
	f.group(podB, busyGroup)
	p.forget(pod(podB, "b"))
	podState("it was force-deleted and runs", ledger.Orphaned)
	f.remove("kubepods/burstable/pod" + podB)
	podState("it is gone", ledger.Gone)
}

// A hold is busy while one of its pods has a process, or no pod is known.
func TestBusy(t *testing.T) {
	for name, test := range map[string]struct {
		hold  ledger.Hold
		group int
		want  bool
	}{
		"runs":                           {claim(ledger.StateHeld, podA), busyGroup, true},
		"has ended":                      {claim(ledger.StateHeld, podA), emptyGroup, false},
		"has not begun":                  {claim(ledger.StateHeld, podA), noGroup, false},
		"a pod that the hold names not":  {claim(ledger.StateHeld, podB), busyGroup, true},
		"no pod is known":                {limit(ledger.StateRestored, time.Minute), noGroup, true},
		"a limit of before that is gone": {limit(ledger.StateRestored, time.Minute, podB), noGroup, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTree(t)
			f.group("anchor", busyGroup)
			f.group(podA, test.group)
			p := known(t, f, pod(podA, "a", names("one")))
			if got := p.Busy(test.hold); got != test.want {
				t.Errorf("busy: %t", got)
			}
		})
	}
}

// Any user who may create pods can write the annotation of a mirror pod.
func TestForgedMirror(t *testing.T) {
	for name, forge := range map[string]func(*Pods){
		"after the pod": func(p *Pods) {
			p.add(t, pod(podA, "a", ranOnce))
			p.add(t, pod(podB, "forged", mirrorOf(podA)))
		},
		"before the pod": func(p *Pods) {
			p.add(t, pod(podB, "forged", mirrorOf(podA)))
			p.add(t, pod(podA, "a", ranOnce))
		},
		"of a static pod": func(p *Pods) {
			p.add(t, pod("mirror", "a", mirrorOf(podA), ranOnce))
			p.add(t, pod(podB, "forged", mirrorOf(podA)))
		},
		"before a static pod": func(p *Pods) {
			p.add(t, pod(podB, "forged", mirrorOf(podA)))
			p.add(t, pod("mirror", "a", mirrorOf(podA), ranOnce))
			p.forget(pod(podB, "forged", mirrorOf(podA))) // kubelet deletes it at once
			p.add(t, pod("mirror", "a", mirrorOf(podA), ranOnce))
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newTree(t)
			f.group("anchor", busyGroup)
			f.group(podA, busyGroup)
			p := known(t, f)
			forge(p)
			p.forget(pod(podB, "forged", mirrorOf(podA)))
			if since := p.UnwantedSince(podA); !since.IsZero() || p.Name(podA).Name != "a" {
				t.Errorf("unwanted since %s, %+v", since, p.Name(podA))
			}
			if podState := p.PodState(limit(ledger.StateHeld, 5*time.Minute, podA)); podState != ledger.Running {
				t.Errorf("the pod is %v", podState)
			}
		})
	}
	t.Run("of a pod that was deleted", func(t *testing.T) {
		f := newTree(t)
		f.group("anchor", busyGroup)
		f.group(podA, busyGroup)
		p := known(t, f, pod(podA, "a", ranOnce))
		p.forget(pod(podA, "a"))
		p.add(t, pod(podB, "forged", mirrorOf(podA)))
		if podState := p.PodState(limit(ledger.StateHeld, 5*time.Minute, podA)); podState != ledger.Orphaned {
			t.Errorf("the pod is %v", podState)
		}
	})
	t.Run("of nothing", func(t *testing.T) {
		f := newTree(t)
		f.group("anchor", busyGroup)
		forged := pod(podB, "forged", names("one"), mirrorOf(""))
		p := known(t, f, forged)
		p.forget(forged)
		p.age(podB)
		p.Sweep(nil)
		if len(p.pods) > 0 {
			t.Errorf("kept %v", p.pods)
		}
	})
}

// TestPodThatComesBeforeTheFirstUnprepare: kubelet, whose record of claims was deleted, starts a pod of a shared claim while the agent
// answers Unprepare. That does not depend on how long the claim had its device.
func TestPodThatComesBeforeTheFirstUnprepare(t *testing.T) {
	for _, age := range []time.Duration{time.Second, 5 * time.Minute} {
		f := newTree(t)
		f.group("anchor", busyGroup)
		f.group(podB, emptyGroup)
		ended := pod(podA, "a", names("one"), ranOnce)
		p := known(t, f, ended, pod(podB, "b", names("one"), phase(corev1.PodPending)))
		p.forget(ended)
		clock := time.Now().Add(-age)
		book, err := ledger.Open(t.Context(), ledger.Options{Dir: t.TempDir(), BootID: "b", PodStates: p, Now: func() time.Time { return clock }})
		must(t, err)
		_, err = book.ReserveClaim(t.Context(), ledger.ClaimRequest{
			UID: "claim-uid", Namespace: "apps", Name: "one", Pods: []ledger.Pod{{UID: podA}}, Devices: []device.Ref{{GPU: "GPU-a"}},
		})
		must(t, err)
		clock = time.Now()
		for range 2 { // kubelet may ask again
			must(t, book.DrainClaim(t.Context(), "claim-uid"))
			if holds := book.Holds(); len(holds) != 1 || holds[0].State != ledger.StateDraining {
				t.Errorf("held for %s: %v", age, holds)
			}
		}
		must(t, book.Close())
	}
}
