// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func names(n int, marks map[int]string) string {
	var all []string
	for i := range n {
		if mark, ok := marks[i]; ok && mark == "-" {
			continue
		} else if ok {
			all = append(all, fmt.Sprintf("gpu-%d!%s", i, mark))
		} else {
			all = append(all, fmt.Sprintf("gpu-%d", i))
		}
	}
	return strings.Join(all, " ")
}

func TestPublishWithdrawAndReturn(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		setup func(*fakeAPI)
		mark  string
	}{
		"taints":                         {func(*fakeAPI) {}, "held-by-pod"},
		"a server without taints":        {func(f *fakeAPI) { f.dropTaints = true }, "-"},
		"a server that drops them later": {func(f *fakeAPI) { f.dropTaints, f.keepProbeTaints = true, true }, "-"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, machine(4))
			test.setup(r.api)
			r.run().ready()
			r.awaitPublished(names(4, nil))
			r.takeByPod(1, nil)
			r.awaitPublished(names(4, map[int]string{1: test.mark}))
			if n := r.metric("tandem_published_devices", "withdrawn"); n != 1 {
				t.Error("withdrawn:", n)
			}
			r.releasePodHold(1)
			r.awaitPublished(names(4, nil))
			// A claim's device stays offered: the scheduler allocated it.
			c := r.claim("a", "gpu-0")
			if results, err := r.driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c}); err != nil || results[c.UID].Err != nil {
				t.Fatal(results[c.UID].Err)
			}
			r.takeByPod(2, nil)
			r.awaitPublished(names(4, map[int]string{2: test.mark}))
		})
	}
}

// A GPU under maintenance is not offered. A claim that was allocated it before is served, and others get other GPUs.
func TestMaintenanceIsNotOffered(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		setup func(*fakeAPI)
		mark  string
	}{
		"taints":                  {func(*fakeAPI) {}, "maintenance"},
		"a server without taints": {func(f *fakeAPI) { f.dropTaints = true }, "-"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			allocations := &fakeAllocations{changed: make(chan struct{})}
			r := newRig(t, machine(4), func(c *Config) { c.Allocations = allocations })
			test.setup(r.api)
			r.run().ready()
			before := r.claim("before", "gpu-1")
			allocations.maintain(1, 3)
			r.awaitPublished(names(4, map[int]string{1: test.mark, 3: test.mark}))
			if n := r.metric("tandem_published_devices", "withdrawn"); n != 2 {
				t.Error("withdrawn:", n)
			}
			if err := r.ask(t.Context(), before); err != nil {
				t.Errorf("a claim from before: %v", err)
			}
			for _, got := range allocateAll(t, r.api.slices(), 4) {
				if got == "gpu-1" || got == "gpu-3" {
					t.Errorf("the scheduler gives %s to a claim", got)
				}
			}
			allocations.maintain(1)
			r.awaitPublished(names(4, map[int]string{1: test.mark}))
		})
	}
}

// A process of a force-deleted pod does not end: its GPU is not offered, and the scheduler gives new claims the other seven. When
// kubelet unprepares the claim, the GPU is back.
func TestHungClaimBlocksItsGPUOnly(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8))
	r.run().ready()
	c := r.claim("hung", "gpu-0")
	if err := r.ask(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	r.awaitPublished(names(8, nil))
	r.podstate.set("uid-hung", ledger.Orphaned)
	r.ledger.SetDeserted(r.ledger.Holds()[0], true)
	r.awaitPublished(names(8, map[int]string{0: "draining"}))
	for _, got := range allocateAll(t, r.api.slices(), 8) {
		if got == "gpu-0" {
			t.Error("the scheduler gives the hung GPU to a claim")
		}
	}
	r.podstate.set("uid-hung", ledger.Gone)
	if err := r.ledger.DrainClaim(t.Context(), "uid-hung"); err != nil {
		t.Fatal(err)
	}
	r.awaitPublished(names(8, nil))
}

// A claim was refused because of another claim, whose pod is there: the scheduler does not know that one.
func TestContestedGPUIsNotOffered(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(4))
	r.run().ready()
	if err := r.ask(t.Context(), r.claim("first", "gpu-1")); err != nil {
		t.Fatal(err)
	}
	r.awaitPublished(names(4, nil))
	if err := r.ask(t.Context(), r.claim("second", "gpu-1")); err == nil {
		t.Fatal("two claims have the GPU")
	}
	r.awaitPublished(names(4, map[int]string{1: "draining"}))
}

// During an upgrade of the control plane only some servers keep taints. Once all do, the publisher uses taints again.
func TestTaintsAreTriedAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(4))
	r.driver.probeAgain = time.Second
	r.api.dropTaints, r.api.keepProbeTaints = true, true
	r.run().ready()
	r.takeByPod(1, nil)
	r.awaitPublished(names(4, map[int]string{1: "-"}))
	r.api.upgrade()
	r.awaitPublished(names(4, map[int]string{1: "held-by-pod"}))
}

// A GPU that goes from one pod to the next is withdrawn once: each write makes the scheduler retry all waiting pods.
func TestAGPUThatChangesHandsCostsNoWrite(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(4), func(c *Config) { c.ReturnDelay = time.Hour }).run()
	r.ready()
	r.takeByPod(1, nil)
	r.awaitPublished(names(4, map[int]string{1: "held-by-pod"}))
	before := r.api.writeCount()
	for range 20 {
		r.releasePodHold(1)
		r.takeByPod(1, nil)
	}
	r.takeByPod(2, nil)
	r.awaitPublished(names(4, map[int]string{1: "held-by-pod", 2: "held-by-pod"}))
	if n := r.api.writeCount() - before; n != 1 {
		t.Errorf("%d writes", n)
	}
}

func TestPublishFollowsInventory(t *testing.T) {
	t.Parallel()
	inv := machine(4)
	r := newRig(t, inv).run()
	r.ready()
	lost := machine(4)
	lost.GPUs[3].Health = device.Health{Reason: device.ReasonLost, Message: "fell off"}
	r.inventory.set(lost)
	r.awaitPublished(names(4, map[int]string{3: "unhealthy!gpu.nvidia.com/gpu-lost"}))
	if n := r.metric("tandem_published_devices", "unhealthy"); n != 1 {
		t.Error("unhealthy:", n)
	}
	r.inventory.set(device.Inventory{})
	eventually(t, "an empty slice", func() error {
		if s := r.api.slices(); len(s) != 1 || len(s[0].Spec.Devices) != 0 {
			return fmt.Errorf("%d slices: %s", len(s), r.published())
		}
		return nil
	})
	r.inventory.set(machine(256))
	r.awaitPublished(names(256, nil))
	if n := len(r.api.slices()); n != 4 {
		t.Errorf("%d slices", n)
	}
}

// kubelet removes every slice of its node when it starts, and registers the driver afterwards.
func TestRepublishAfterKubeletRestart(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	k := r.ready()
	c := r.claim("a", "gpu-0")
	if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	for range 2 {
		before := r.api.slices()[0].UID
		k.stop()
		r.api.wipeSlices()
		wiped := time.Now()
		k = startKubelet(t, r.dir, "gpu.nvidia.com")
		r.awaitPublished(names(8, nil))
		t.Logf("published again after %v", time.Since(wiped))
		if r.api.slices()[0].UID == before {
			t.Error("the slice was never removed")
		}
		if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
			t.Error(err, errs)
		}
	}
	if n := r.metric("tandem_dra_registrations_total"); n != 3 {
		t.Error("registrations:", n)
	}
}

func TestSlicesFollowTheNodeObject(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2)).run()
	r.ready()
	owner := func(want types.UID) func() error {
		return func() error {
			found := r.api.slices()
			if len(found) != 1 || len(found[0].OwnerReferences) != 1 || found[0].OwnerReferences[0].UID != want {
				return fmt.Errorf("%d slices", len(found))
			}
			return nil
		}
	}
	eventually(t, "slices of the first node", owner("node-uid-1"))
	r.api.remove("nodes", testNode)
	eventually(t, "Ready to say that the node is gone", func() error {
		if err := r.driver.Ready(); err == nil || !strings.Contains(err.Error(), "node node1 is not known") {
			return fmt.Errorf("Ready: %v", err)
		}
		return nil
	})
	// As the garbage collector does.
	r.api.wipeSlices()
	r.api.put("nodes", newNode("node-uid-2"))
	eventually(t, "slices of the second node", owner("node-uid-2"))
	eventually(t, "Ready", r.driver.Ready)
}

func TestPublishErrorsAreReportedAndRetried(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2))
	r.api.failWrites = apierrors.NewInvalid(schema.GroupKind{Group: "resource.k8s.io", Kind: "ResourceSlice"}, "x", nil)
	r.run()
	startKubelet(t, r.dir, "gpu.nvidia.com")
	eventually(t, "Ready to name the error", func() error {
		if err := r.driver.Ready(); err == nil || !strings.Contains(err.Error(), "is invalid") {
			return fmt.Errorf("Ready: %v", err)
		}
		return nil
	})
	eventually(t, "an event on the node", func() error {
		if !strings.Contains(r.events.all(), "Node/node1 InvalidResourceSlice: ") {
			return errors.New(r.events.all())
		}
		return nil
	})
	if r.metric("tandem_publish_errors_total") == 0 {
		t.Error("no error counted")
	}
	r.api.set(func() { r.api.failWrites = nil })
	r.awaitPublished(names(2, nil))
	eventually(t, "Ready", r.driver.Ready)
}

// Nothing is published before the API server has answered which fields it keeps. A server that refuses all of the fields keeps none.
func TestPublishWaitsForTheProbe(t *testing.T) {
	t.Parallel()
	r := newRig(t, threeGPUs())
	r.api.failProbe = apierrors.NewServiceUnavailable("not now")
	r.run()
	eventually(t, "Ready to name the error", func() error {
		if err := r.driver.Ready(); err == nil || !strings.Contains(err.Error(), "not now") {
			return fmt.Errorf("Ready: %v", err)
		}
		return nil
	})
	if got := r.published(); got != "" {
		t.Error("published:", got)
	}
	r.api.set(func() { r.api.failProbe = apierrors.NewInvalid(schema.GroupKind{Kind: "ResourceSlice"}, "x", nil) })
	r.awaitPools(map[string]string{"": "gpu-0 gpu-1 gpu-2"})
}

// After a long outage of the API server, failed writes are still retried often.
func TestRetriesStayFrequent(t *testing.T) {
	retries := newRetries()
	for range 100 {
		if delay := retries.When(testNode); delay < 50*time.Millisecond || delay > 20*time.Second {
			t.Fatalf("tried again after %v", delay)
		}
	}
	retries.Forget(testNode)
	if delay := retries.When(testNode); delay > time.Second {
		t.Errorf("after a success tried again after %v", delay)
	}
}

func TestNodeThatDoesNotExist(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2), func(c *Config) { c.NodeName = "nodel" }).run()
	startKubelet(t, r.dir, "gpu.nvidia.com")
	eventually(t, "Ready to name the node", func() error {
		if err := r.driver.Ready(); err == nil || !strings.Contains(err.Error(), "node nodel is not known to the API server (is the node name right?)") {
			return fmt.Errorf("Ready: %v", err)
		}
		return nil
	})
}

// A restarted agent finds its slices unchanged and writes nothing.
func TestRestartWritesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	r.ready()
	r.awaitPublished(names(8, nil))
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	before := r.api.writeCount()
	r.run().ready()
	if n := r.api.writeCount() - before; n != 0 {
		t.Errorf("%d writes", n)
	}
}

// On a new node the GPUs are published before the library's slice controller has started, which takes a second. The controller finds
// the slices as it would write them, and writes later changes.
func TestPublishedSoonAfterStart(t *testing.T) {
	t.Parallel()
	r := newRig(t, threeGPUs())
	r.run()
	r.awaitPools(map[string]string{"": "gpu-0", "/gpu-01": "8 slices 26 devices", "/gpu-02": "8 slices 26 devices"})
	startKubelet(t, r.dir, "gpu.nvidia.com")
	eventually(t, "Ready", r.driver.Ready)
	stored := len(r.api.slices())
	if writes := r.api.writeCount(); writes != stored {
		t.Errorf("%d writes for %d slices", writes, stored)
	}
	if early := r.api.earlyWrites(); early != stored {
		t.Errorf("%d of %d slices were written before the controller started", early, stored)
	}
	r.takeByPod(0, nil)
	r.awaitPools(map[string]string{"": "gpu-0!held-by-pod", "/gpu-01": "8 slices 26 devices", "/gpu-02": "8 slices 26 devices"})
}

// The slice controller creates a pool whose first write failed.
func TestControllerCreatesWhatFailedAtStart(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2))
	r.api.failWrites = apierrors.NewServiceUnavailable("not now")
	r.run()
	startKubelet(t, r.dir, "gpu.nvidia.com")
	eventually(t, "an error", func() error {
		if r.metric("tandem_publish_errors_total") == 0 {
			return errors.New("no error counted")
		}
		return nil
	})
	r.api.set(func() { r.api.failWrites = nil })
	r.awaitPublished(names(2, nil))
	eventually(t, "Ready", r.driver.Ready)
}

// Which pool a GPU is in is told to those who apply DeviceTaintRules, in every mode: the names of the pools of dynamic GPUs by UUID.
func TestPoolsAreTold(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*Config)
		want   map[string]string
	}{
		"claims":    {func(*Config) {}, map[string]string{uuidOf(0): device.OwnPool(testNode, device.GPU{Minor: 0}), uuidOf(1): device.OwnPool(testNode, device.GPU{Minor: 1})}},
		"no claims": {func(c *Config) { c.OfferedToClaims, c.PublishNothing = func(device.GPU) bool { return false }, true }, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			told := make(chan map[string]string, 1)
			newRig(t, machine(2, dynamic), c.change, func(c *Config) {
				c.Placed = func(pools map[string]string) {
					select {
					case told <- maps.Clone(pools):
					default:
					}
				}
			}).run()
			if got := <-told; !maps.Equal(got, c.want) {
				t.Errorf("told %v, want %v", got, c.want)
			}
		})
	}
}
