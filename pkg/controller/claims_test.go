// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// TestAllocatedClaimsPass: a claim passes from its first device to its deletion.
func TestAllocatedClaimsPass(t *testing.T) {
	const (
		waiting = "without a device"
		foreign = "with another driver's device"
		ours    = "with a device"
	)
	claims := map[string]*resourceapi.ResourceClaim{waiting: newClaim("a"), foreign: newClaim("a", "gpu-0"), ours: newClaim("a", "gpu-0")}
	claims[foreign].Status.Allocation.Devices.Results[0].Driver = "net.example.com"
	type event struct {
		kind  watch.EventType
		claim string
		want  bool
	}
	for name, events := range map[string][]event{
		"never allocated": {{watch.Added, waiting, false}, {watch.Modified, waiting, false}, {watch.Modified, foreign, false}, {watch.Deleted, foreign, false}},
		"allocated": {
			{watch.Added, waiting, false}, {watch.Modified, ours, true}, {watch.Modified, waiting, true}, {watch.Modified, ours, true},
			{watch.Deleted, ours, true},
		},
		"deleted without devices": {{watch.Added, ours, true}, {watch.Modified, waiting, true}, {watch.Deleted, waiting, true}},
		"bookmark":                {{watch.Bookmark, waiting, true}, {watch.Added, waiting, false}},
	} {
		filter := &allocatedClaims{driver: testDriver, passed: sets.New[types.UID]()}
		for i, e := range events {
			if got := filter.passes(e.kind, claims[e.claim]); got != e.want {
				t.Errorf("%s, event %d: %s a claim %s: passes %t", name, i, e.kind, e.claim, got)
			}
		}
	}
}

// TestDeletedClaimsAreForgotten: also those whose deletion is found by a list, because the watch was interrupted.
func TestDeletedClaimsAreForgotten(t *testing.T) {
	const name = "a"
	for test, remove := range map[string]func(w *watch.RaceFreeFakeWatcher){
		"watched": func(w *watch.RaceFreeFakeWatcher) { w.Delete(newClaim(name, "gpu-0")) },
		"listed": func(w *watch.RaceFreeFakeWatcher) {
			expired := apierrors.NewResourceExpired("too old").Status()
			w.Error(&expired)
		},
	} {
		t.Run(test, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := fake.NewClientset(newClaim(name, "gpu-0"))
				var watcher *watch.RaceFreeFakeWatcher
				api.PrependWatchReactor("resourceclaims", func(clienttesting.Action) (bool, watch.Interface, error) {
					watcher = watch.NewRaceFreeFake()
					return true, watcher, nil
				})
				cache, err := newClaimCache(api, testDriver)
				if err != nil {
					t.Fatal(err)
				}
				has := func() bool { return cache.get("ns", name).Name == name }
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error)
				go func() { done <- cache.Start(ctx) }()
				synctest.Wait()
				if !has() {
					t.Fatal("the claim is not cached")
				}
				if err := api.ResourceV1().ResourceClaims("ns").Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				remove(watcher)
				time.Sleep(time.Minute) // until the next list
				synctest.Wait()
				if has() {
					t.Error("the deleted claim is cached")
				}
				watcher.Add(newClaim(name))
				synctest.Wait()
				if has() {
					t.Error("the claim is remembered")
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestStoppedWatchEnds fails if a goroutine is left.
func TestStoppedWatchEnds(t *testing.T) {
	synctest.Test(t, func(*testing.T) {
		all := watch.NewFakeWithChanSize(1, false)
		w := filteredWatch{watch.Filter(all, func(e watch.Event) (watch.Event, bool) { return e, true })}
		all.Add(newClaim("a"))
		synctest.Wait() // the filter has the event, and nothing reads it
		w.Stop()
	})
}

// TestClaimCache: the cache has the claims with devices, and the nodes of a claim are enqueued when it gets and loses devices.
func TestClaimCache(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	waiting := newClaim("waiting")
	api := fake.NewClientset(waiting, newClaim("listed", "gpu-0"))
	cache, err := newClaimCache(api, testDriver)
	if err != nil {
		t.Fatal(err)
	}
	early, stop := context.WithTimeout(ctx, 10*time.Millisecond)
	defer stop()
	if err := cache.changes().WaitForSync(early); err == nil {
		t.Error("filled before it has started")
	}
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer queue.ShutDown()
	if err := cache.changes().Start(ctx, queue); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- cache.Start(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := cache.changes().WaitForSync(ctx); err != nil {
			t.Errorf("a controller that is stopped: %v", err)
		}
	}()
	if err := cache.changes().WaitForSync(ctx); err != nil {
		t.Fatal(err)
	}
	// enqueued waits for the next request.
	enqueued := func(why string) {
		t.Helper()
		request, _ := queue.Get()
		queue.Done(request)
		if request.Name != "node-1" {
			t.Errorf("%s: request for %q", why, request.Name)
		}
	}
	has := func(name string, want bool) {
		t.Helper()
		if (cache.get("ns", name).Name == name) != want {
			t.Errorf("claim %s is cached: %t", name, !want)
		}
	}
	on := func(want ...types.UID) {
		t.Helper()
		claims := cache.on("node-1")
		if len(claims) != len(want) {
			t.Fatalf("claims of the node: %v, want %v", claims, want)
		}
		for i, c := range claims {
			if c.UID != want[i] {
				t.Errorf("claim %s of the node, want %s", c.UID, want[i])
			}
		}
	}
	set := func(claim *resourceapi.ResourceClaim) {
		t.Helper()
		if _, err := api.ResourceV1().ResourceClaims("ns").Update(ctx, claim.DeepCopy(), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	enqueued("a claim that was listed")
	has("waiting", false)
	on("uid-listed")
	set(newClaim("waiting", "gpu-1"))
	enqueued("a claim that gets a device")
	has("waiting", true)
	on("uid-listed", "uid-waiting")
	set(waiting)
	enqueued("a claim that loses its device")
	on("uid-listed")
	if err := api.ResourceV1().ResourceClaims("ns").Delete(ctx, "listed", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	enqueued("a claim that is deleted")
	has("listed", false)
	on()
}
