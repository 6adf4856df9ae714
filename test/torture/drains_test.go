// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// TestParseHold reads a file as the ledger writes it over longer contents, and one of which only the name is there.
func TestParseHold(t *testing.T) {
	got := parseHold([]byte(`{"bootID":"b","checksum":7,"record":{"state":"held","pods":[{"uid":"u1","name":"p"},{"uid":"u2"}]}}` + "\n" + `u3"}]}}`))
	if got.unreadable || !slices.Equal(got.pods, []string{"u1", "u2"}) {
		t.Errorf("%+v", got)
	}
	if got := parseHold([]byte(`{"record":{"state":"held"}}`)); got.unreadable || got.pods != nil {
		t.Errorf("no pods: %+v", got)
	}
	if got := parseHold(nil); !got.unreadable {
		t.Errorf("empty: %+v", got)
	}
}

// draining is a watch with holds, whose time stands still: it is told how long ago things were.
type draining struct {
	*watch
	now     time.Time
	records map[string]hold
}

func newDraining(t *testing.T) *draining {
	d := &draining{watch: newTestWatch(t), now: time.Now(), records: map[string]hold{}}
	d.watch.drains = &drains{statistics: d.statistics, trace: d.trace, now: func() time.Time { return d.now }, open: map[string]*drain{}}
	d.holds = func() (map[string]hold, bool) { return d.records, d.records != nil }
	return d
}

// look is one that began some time ago, at which the containers of these pods see a GPU.
func (d *draining) look(ago time.Duration, uids ...string) {
	clear(d.seen)
	for i, uid := range uids {
		d.seen[uid] = []oracle.Device{gpu(uint32(i))}
	}
	d.lookAtHolds(d.now.Add(-ago))
}

// exists makes a pod, which was deleted some time ago unless that is negative.
func (d *draining) exists(uid string, deletedAgo time.Duration) {
	pod := ourPod(uid)
	d.podSeen(pod)
	if deletedAgo >= 0 {
		pod.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		d.podSeen(pod)
		d.podHistories[uid].over = d.now.Add(-deletedAgo)
	}
}

func (d *draining) want(t *testing.T, times ...time.Duration) {
	t.Helper()
	if got := d.statistics.now().DrainTimes; !slices.Equal(got, times) {
		t.Errorf("drained in %v, not %v", []time.Duration(got), times)
	}
}

const aClaim, aLimit = "claim~c1~GPU-0", "pod~GPU-1~GPU-1"

// TestDrainsFromTheLastSight: the process ends later than the pod was deleted.
func TestDrainsFromTheLastSight(t *testing.T) {
	d := newDraining(t)
	d.exists("a", 30*time.Second)
	d.records[aClaim] = hold{pods: []string{"a"}}
	d.look(20*time.Second, "a")
	d.look(5*time.Second, "a")
	d.look(4 * time.Second)
	d.want(t)
	delete(d.records, aClaim)
	d.look(0)
	d.want(t, 5*time.Second)
	d.look(0)
	d.want(t, 5*time.Second)
}

// TestDrainsFromThePodsEnd: its container had crashed long before, and the API server said later that it had ended.
func TestDrainsFromThePodsEnd(t *testing.T) {
	for _, end := range []func(*watch, *corev1.Pod){
		func(w *watch, p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Now()}; w.podSeen(p) },
		func(w *watch, p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded; w.podSeen(p) },
		func(w *watch, p *corev1.Pod) { p.Status.Phase = corev1.PodFailed; w.podSeen(p) },
		func(w *watch, p *corev1.Pod) { w.podGone(p) },
	} {
		d := newDraining(t)
		d.exists("a", -1)
		d.records[aLimit] = hold{pods: []string{"a"}}
		d.look(20*time.Second, "a")
		end(d.watch, ourPod("a"))
		if d.podHistories["a"].over.IsZero() {
			t.Fatal("its end was not noticed")
		}
		d.podHistories["a"].over = d.now.Add(-3 * time.Second)
		end(d.watch, ourPod("a"))
		delete(d.records, aLimit)
		d.look(0)
		d.want(t, 3*time.Second)
	}
}

// TestDrainsOfTheLastPod: pods that share a claim end one after another, and the record does not name those that have ended.
func TestDrainsOfTheLastPod(t *testing.T) {
	d := newDraining(t)
	d.exists("a", 60*time.Second)
	d.records[aClaim] = hold{pods: []string{"a"}}
	d.look(50*time.Second, "a")
	d.exists("b", 20*time.Second)
	d.records[aClaim] = hold{pods: []string{"b"}}
	d.look(8*time.Second, "b")
	d.records[aClaim] = hold{}
	d.look(7 * time.Second)
	delete(d.records, aClaim)
	d.look(0)
	d.want(t, 8*time.Second)
}

// TestDrainsOfADeviceIDThatIsGivenAgain: the record's name stays, and the pod behind it is another one.
func TestDrainsOfADeviceIDThatIsGivenAgain(t *testing.T) {
	d := newDraining(t)
	d.exists("a", 9*time.Second)
	d.records[aLimit] = hold{pods: []string{"a"}}
	d.look(4*time.Second, "a")
	d.records[aLimit] = hold{unreadable: true}
	d.look(3 * time.Second)
	d.want(t)
	d.records[aLimit] = hold{}
	d.look(2 * time.Second)
	d.want(t, 4*time.Second)
	d.exists("b", time.Second)
	d.records[aLimit] = hold{pods: []string{"b"}}
	d.look(2*time.Second, "b")
	delete(d.records, aLimit)
	d.look(0)
	d.want(t, 4*time.Second, time.Second)
}

// TestWhatDoesNotDrain: a hold that no container was seen with, one whose pod lives or is unknown, and all while records cannot be read.
func TestWhatDoesNotDrain(t *testing.T) {
	d := newDraining(t)
	d.exists("unseen", time.Second)
	d.exists("lives", -1)
	for _, uid := range []string{"unseen", "lives", "unknown"} {
		d.records["claim~"+uid+"~GPU-0"] = hold{pods: []string{uid}}
	}
	d.look(2*time.Second, "lives", "unknown")
	kept := d.records
	d.records = nil
	d.look(time.Second)
	if len(d.watch.drains.open) != len(kept) {
		t.Errorf("%d holds are left while records cannot be read", len(d.watch.drains.open))
	}
	d.records = map[string]hold{}
	d.look(0)
	d.want(t)
}

// TestDrainsThatAFaultMeets are counted apart.
func TestDrainsThatAFaultMeets(t *testing.T) {
	var counted statistics
	now := time.Now()
	counted.drained(now.Add(-2*time.Second), now.Add(-time.Second))
	counted.faultBegins(0)()
	counted.drained(now.Add(-time.Minute), time.Now().Add(time.Second))
	if c := counted.now(); len(c.DrainTimes) != 1 || len(c.StruckDrains) != 1 || c.StruckDrains[0] < time.Minute {
		t.Errorf("in peace %s, met by a fault %s", c.DrainTimes, c.StruckDrains)
	}
}
