// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// fakeAllocations are claims that the scheduler allocated.
type fakeAllocations struct {
	mu     sync.Mutex
	claims []v1alpha1.AllocatedClaim
	// maintained are the UUIDs of GPUs under maintenance.
	maintained map[string]bool
	late       bool
	changed    chan struct{}
}

func (f *fakeAllocations) Synced() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.late
}

func (f *fakeAllocations) Claims() []v1alpha1.AllocatedClaim {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.claims
}

func (f *fakeAllocations) Maintenance() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.maintained
}

// maintain takes GPUs out of service.
func (f *fakeAllocations) maintain(minors ...int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.maintained = map[string]bool{}
	for _, minor := range minors {
		f.maintained[uuidOf(minor)] = true
	}
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fakeAllocations) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f *fakeAllocations) set(claims ...*resourceapi.ResourceClaim) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.claims, f.late = nil, false
	for _, c := range claims {
		a := v1alpha1.AllocatedClaim{UID: c.UID, Namespace: c.Namespace, Name: c.Name, Allocated: c.Status.Allocation.AllocationTimestamp}
		for _, result := range c.Status.Allocation.Devices.Results {
			if !ptr.Deref(result.AdminAccess, false) {
				a.Devices, a.Pools = append(a.Devices, result.Device), append(a.Pools, result.Pool)
			}
		}
		f.claims = append(f.claims, a)
	}
	close(f.changed)
	f.changed = make(chan struct{})
}

// strictRig runs only the confirmations, with claims whose pods wait to be bound.
func strictRig(t *testing.T, claims ...*resourceapi.ResourceClaim) (*rig, *fakeAllocations, *fake.Clientset) {
	t.Helper()
	var objects []runtime.Object
	for _, c := range claims {
		objects = append(objects, c)
	}
	client, allocations := fake.NewClientset(objects...), &fakeAllocations{changed: make(chan struct{})}
	r := newRig(t, machine(2), func(c *Config) { c.KubeClient, c.Allocations, c.Strict = client, allocations, true })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.driver.confirmAllocations(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r, allocations, client
}

// unbound stores a claim whose pod the scheduler binds after the conditions are written.
func unbound(name string, devices ...string) *resourceapi.ResourceClaim {
	c := newClaim(name, devices...)
	c.Status.ReservedFor = nil
	for i := range c.Status.Allocation.Devices.Results {
		result := &c.Status.Allocation.Devices.Results[i]
		result.BindingConditions, result.BindingFailureConditions = []string{ConditionReserved}, []string{ConditionRefused}
	}
	return c
}

// strictConditions returns the conditions of a claim's devices, such as "gpu-0=reserved".
func strictConditions(t *testing.T, client *fake.Clientset, name string) []string {
	t.Helper()
	c, err := client.ResourceV1().ResourceClaims("team-a").Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, d := range c.Status.Devices {
		for _, condition := range d.Conditions {
			all = append(all, d.Device+"="+strings.TrimPrefix(condition.Type, "tandem-gpu.dev/"))
		}
	}
	return all
}

func awaitStates(t *testing.T, client *fake.Clientset, name string, want ...string) {
	t.Helper()
	eventually(t, "conditions", func() error {
		if got := strictConditions(t, client, name); !slices.Equal(got, want) {
			return fmt.Errorf("%v, want %v", got, want)
		}
		return nil
	})
}

func (r *rig) awaitHolders(want string) {
	r.t.Helper()
	eventually(r.t, "holders", func() error {
		if got := r.holders(); got != want {
			return fmt.Errorf("%q, want %q", got, want)
		}
		return nil
	})
}

func TestStrictReservesBeforeThePodIsBound(t *testing.T) {
	a := unbound("a", "gpu-0", "gpu-1")
	r, allocations, client := strictRig(t, a)
	allocations.set(a)
	awaitStates(t, client, "a", "gpu-0=reserved", "gpu-1=reserved")
	r.awaitHolders("gpu-0: claim uid-a held, gpu-1: claim uid-a held")
}

// Admin access holds no device, but its pod waits for the conditions, too.
func TestStrictAnswersAdminAccess(t *testing.T) {
	t.Parallel()
	a := unbound("a", "gpu-0")
	a.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	r, allocations, client := strictRig(t, a)
	allocations.set(a)
	awaitStates(t, client, "a", "gpu-0=reserved")
	r.awaitHolders("")
}

func TestStrictCancelsWhenNoPodIsBound(t *testing.T) {
	t.Parallel()
	a := unbound("a", "gpu-0")
	r, allocations, client := strictRig(t, a)
	allocations.set(a)
	awaitStates(t, client, "a", "gpu-0=reserved")
	allocations.set()
	r.awaitHolders("")
}

// TestStrictAnswersAnotherAllocation: the scheduler takes an allocation back and allocates the same devices again, and the agent learns of
// both at once. The API server has dropped the conditions of the first allocation.
func TestStrictAnswersAnotherAllocation(t *testing.T) {
	t.Parallel()
	a := unbound("a", "gpu-0")
	a.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	r, allocations, client := strictRig(t, a)
	allocations.set(a)
	awaitStates(t, client, "a", "gpu-0=reserved")
	again, err := client.ResourceV1().ResourceClaims("team-a").Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	again.Status.Devices = nil
	again.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: time.Unix(2, 0)}
	if _, err := client.ResourceV1().ResourceClaims("team-a").UpdateStatus(t.Context(), again, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	allocations.set(again)
	awaitStates(t, client, "a", "gpu-0=reserved")
	r.awaitHolders("gpu-0: claim uid-a held")
	allocations.set()
	r.awaitHolders("")
}

func TestStrictKeepsPreparedClaims(t *testing.T) {
	t.Parallel()
	a, b := unbound("a", "gpu-0"), unbound("b", "gpu-1")
	r, allocations, client := strictRig(t, a, b)
	allocations.set(a, b)
	awaitStates(t, client, "a", "gpu-0=reserved")
	awaitStates(t, client, "b", "gpu-1=reserved")
	if _, err := r.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "uid-a", Namespace: "team-a", Name: "a", Devices: []device.Ref{{GPU: uuidOf(0)}}}); err != nil {
		t.Fatal(err)
	}
	allocations.set() // the controller may be wrong or late
	r.awaitHolders("gpu-0: claim uid-a held")
}

func TestStrictRefusesDevicesOfPods(t *testing.T) {
	t.Parallel()
	a := unbound("a", "gpu-0")
	r, allocations, client := strictRig(t, a)
	r.takeByPod(0, &ledger.Pod{UID: "p", Namespace: "team-b", Name: "secret"})
	allocations.set(a)
	awaitStates(t, client, "a", "gpu-0=refused")
	c, err := client.ResourceV1().ResourceClaims("team-a").Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if message := c.Status.Devices[0].Conditions[0].Message; strings.Contains(message, "secret") || !strings.Contains(message, "pod in another namespace") {
		t.Errorf("message %q", message)
	}
	if got := r.metric("tandem_strict_refusals_total"); got != 1 {
		t.Errorf("%v refusals counted", got)
	}
}

// The scheduler tries another node instead of a device that Prepare would refuse.
func TestStrictRefusesUnhealthyDevices(t *testing.T) {
	t.Parallel()
	unhealthy, missing := unbound("unhealthy", "gpu-0"), unbound("missing", "gpu-7")
	r, allocations, client := strictRig(t, unhealthy, missing)
	r.inventory.set(machine(2, func(g *device.GPU) { g.Health = device.Health{Reason: device.ReasonLost} }))
	allocations.set(unhealthy, missing)
	awaitStates(t, client, "unhealthy", "gpu-0=refused")
	awaitStates(t, client, "missing", "gpu-7=refused")
	r.awaitHolders("")
}

// Partitions of dynamic GPUs are reserved before the pod is bound, and created by Prepare.
func TestStrictReservesPartitions(t *testing.T) {
	t.Parallel()
	a, b := unbound("a", "gpu-1-mig-3g40gb-9-4"), unbound("b", "gpu-1-mig-1g10gb-19-6")
	for _, c := range []*resourceapi.ResourceClaim{a, b} {
		c.Status.Allocation.Devices.Results[0].Pool = testNode + "/gpu-01"
	}
	r, allocations, client := strictRig(t, a, b)
	r.inventory.set(machine(2, dynamic))
	allocations.set(a)
	awaitStates(t, client, "a", "gpu-1-mig-3g40gb-9-4=reserved")
	if holds := r.ledger.Holds(); len(holds) != 1 || holds[0].Device.Placement != (device.Placement{Start: 4, Size: 4}) {
		t.Errorf("held: %v", holds)
	}
	allocations.set(a, b)
	awaitStates(t, client, "b", "gpu-1-mig-1g10gb-19-6=refused")
	allocations.set()
	r.awaitHolders("")
}

// A claim waits for a draining device, and delays no other claim.
func TestStrictWaitsForOneAndAnswersTheOther(t *testing.T) {
	t.Parallel()
	a, b := unbound("a", "gpu-0"), unbound("b", "gpu-1")
	r, allocations, client := strictRig(t, a, b)
	if _, err := r.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "uid-old", Devices: []device.Ref{{GPU: uuidOf(0)}}}); err != nil {
		t.Fatal(err)
	}
	r.podstate.set("uid-old", ledger.Terminating)
	allocations.set(a, b)
	awaitStates(t, client, "b", "gpu-1=reserved")
	if got := strictConditions(t, client, "a"); len(got) != 0 {
		t.Errorf("%v while the device drains", got)
	}
	r.podstate.set("uid-old", ledger.Gone)
	if err := r.ledger.DrainClaim(t.Context(), "uid-old"); err != nil {
		t.Fatal(err)
	}
	awaitStates(t, client, "a", "gpu-0=reserved")
}

func TestStrictRetriesFailedWrites(t *testing.T) {
	t.Parallel()
	a := unbound("a", "gpu-0")
	failures := 2
	r, allocations, client := strictRig(t, a)
	client.PrependReactor("update", "resourceclaims", func(kubetesting.Action) (bool, runtime.Object, error) {
		failures--
		return failures >= 0, nil, errors.New("not now")
	})
	allocations.set(a)
	awaitStates(t, client, "a", "gpu-0=reserved")
	allocations.set()
	r.awaitHolders("")
}

// Claims for which the scheduler does not wait get no conditions: those allocated before strict, and those answered before a restart.
func TestStrictLeavesOthersToPrepare(t *testing.T) {
	t.Parallel()
	before, answered, bad, sentinel := newClaim("before", "gpu-0"), unbound("answered", "gpu-0"), unbound("bad", "gpu-0"), unbound("sentinel", "gpu-1")
	bad.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{parameters(resourceapi.AllocationConfigSourceClaim, `{"nonsense":true}`)}
	answered.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: "gpu.nvidia.com", Pool: testNode, Device: "gpu-0", Conditions: []metav1.Condition{{Type: ConditionReserved, Status: metav1.ConditionTrue}},
	}}
	r, allocations, client := strictRig(t, before, answered, bad, sentinel)
	allocations.set(before, answered, bad, sentinel)
	awaitStates(t, client, "sentinel", "gpu-1=reserved")
	awaitStates(t, client, "bad", "gpu-0=reserved") // Prepare says what is wrong
	if got := strictConditions(t, client, "before"); len(got) != 0 {
		t.Errorf("conditions %v", got)
	}
	r.awaitHolders("gpu-1: claim uid-sentinel held")
}

func TestStrictDevicesWaitForTheLedger(t *testing.T) {
	for _, strict := range []bool{false, true} {
		offer := Offer{NodeName: testNode, Strict: strict}
		pools, _ := offer.Pools(Facts{Inventory: threeGPUs(), Kept: everything, Now: time.Now()})
		for _, d := range append(pools[testNode].Slices[0].Devices, pools[testNode+"/gpu-02"].Slices[1].Devices...) {
			if got := d.BindsToNode != nil && slices.Equal(d.BindingConditions, []string{ConditionReserved}) &&
				slices.Equal(d.BindingFailureConditions, []string{ConditionRefused}); got != strict {
				t.Errorf("strict %v: device %+v", strict, d)
			}
		}
	}
}
