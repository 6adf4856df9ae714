// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/partition"
)

// fakePartitions makes every partition at once, or none.
type fakePartitions struct {
	mu    sync.Mutex
	err   error
	calls []string
	// onRecord is called when a partition was recorded. Optional.
	onRecord func()
	// known is what a second call for the same place returns.
	known map[device.Ref]device.Partition
	// removed partitions do not exist, by their UUID. unsaid is why that is not known.
	removed map[string]bool
	unsaid  error
}

func (f *fakePartitions) Exists(_ context.Context, p device.Partition) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.unsaid == nil && !f.removed[p.UUID], f.unsaid
}

func (f *fakePartitions) Create(ctx context.Context, request partition.Request) (device.Partition, error) {
	if f.onRecord != nil {
		f.onRecord()
	}
	if err := request.Reserved(); err != nil {
		return device.Partition{}, err
	}
	created, err := f.create(request.Partition)
	if err != nil {
		return device.Partition{}, err
	}
	return created, request.Publish(ctx, created)
}

func (f *fakePartitions) create(want device.Partition) (device.Partition, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, "create "+want.Name())
	if f.err != nil {
		return device.Partition{}, f.err
	}
	created, ok := f.known[want.Ref]
	if !ok {
		created = want
		created.UUID, created.Made = "MIG-"+want.Ref.Placement.String(), true
		f.known[want.Ref] = created
	}
	return created, nil
}

func (f *fakePartitions) EnsureWhole(_ context.Context, gpu string, reserved func() error) error {
	if err := reserved(); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, "whole "+gpu)
	return f.err
}

// dynamicMachine is a machine whose GPUs are partitioned on demand.
func dynamicMachine(n int) device.Inventory {
	return machine(n, func(g *device.GPU) {
		g.Dynamic = true
		g.Profiles = []device.Profile{
			{ID: 9, Name: "3g.40gb", Placements: []device.Placement{{Size: 4}, {Start: 4, Size: 4}}},
			{ID: 19, Name: "1g.10gb", Placements: []device.Placement{{Size: 1}, {Start: 1, Size: 1}}},
		}
	})
}

// demanding is a claim for devices of the pool of GPU 0.
func (r *rig) demanding(name string, devices ...string) *resourceapi.ResourceClaim {
	c := newClaim(name, devices...)
	for i := range c.Status.Allocation.Devices.Results {
		c.Status.Allocation.Devices.Results[i].Pool = testNode + "/gpu-00"
	}
	r.api.put("resourceclaims", c)
	return c
}

func newDynamicRig(t *testing.T) (*rig, *fakePartitions) {
	made := &fakePartitions{known: map[device.Ref]device.Partition{}}
	return newRig(t, dynamicMachine(2), func(c *Config) { c.Partitions = made }).run(), made
}

func TestPrepareMakesPartitions(t *testing.T) {
	t.Parallel()
	r, made := newDynamicRig(t)
	k := r.ready()
	c := r.demanding("a", "gpu-0-mig-1g10gb-19-1", "gpu-0-mig-3g40gb-9-4")
	const cdi = "k8s.gpu.nvidia.com/gpu=MIG-"
	want := []prepared{
		{[]string{"gpus"}, testNode + "/gpu-00", "gpu-0-mig-1g10gb-19-1", cdi + "1+1"},
		{[]string{"gpus"}, testNode + "/gpu-00", "gpu-0-mig-3g40gb-9-4", cdi + "4+4"},
	}
	for range 2 {
		got, errs, err := k.prepare("v1", c)
		if err != nil || len(errs) > 0 {
			t.Fatal(err, errs)
		}
		if diff := cmp.Diff(want, got["uid-a"]); diff != "" {
			t.Error(diff)
		}
	}
	if got := len(r.ledger.Holds()); got != 2 {
		t.Errorf("%d holds, want 2: %s", got, r.holders())
	}
	// The whole GPU, and a place that overlaps, are in other hands; the place beside them is not.
	for device, want := range map[string]string{
		"gpu-0": "which overlaps gpu-0, is held by claim team-a/a", "gpu-0-mig-3g40gb-9-0": "is held by claim team-a/a", "gpu-0-mig-1g10gb-19-0": "",
	} {
		_, errs, err := k.prepare("v1", r.demanding("b", device))
		if err != nil || (want == "") != (errs["uid-b"] == nil) || want != "" && !strings.Contains(errs["uid-b"].Error(), want) {
			t.Errorf("%s: %v %v, want %q", device, err, errs, want)
		}
	}
	if got := strings.Join(made.calls[len(made.calls)-1:], ""); got != "create gpu-0-mig-1g10gb-19-0" {
		t.Errorf("the last call is %q", got)
	}
}

// The partitions of all claims of a pod are created at the same time. One GPU after the other could take longer than kubelet waits.
func TestPrepareMakesPartitionsOfManyGPUs(t *testing.T) {
	t.Parallel()
	const gpus = 3
	made := &fakePartitions{known: map[device.Ref]device.Partition{}}
	var together sync.WaitGroup
	made.onRecord = func() { together.Done(); together.Wait() }
	r := newRig(t, dynamicMachine(gpus), func(c *Config) { c.Partitions = made })
	claims := []*resourceapi.ResourceClaim{newClaim("a", "gpu-0-mig-3g40gb-9-4", "gpu-1-mig-3g40gb-9-4"), newClaim("b", "gpu-2-mig-3g40gb-9-4")}
	for _, c := range claims {
		for i, result := range c.Status.Allocation.Devices.Results {
			gpu := strings.TrimPrefix(device.GPUName(result.Device), "gpu-")
			c.Status.Allocation.Devices.Results[i].Pool = testNode + "/gpu-0" + gpu
		}
	}
	together.Add(gpus)
	if err := r.ask(t.Context(), claims...); err != nil {
		t.Error(err)
	}
	if got := len(r.ledger.Holds()); got != gpus {
		t.Errorf("%d holds, want %d: %s", got, gpus, r.holders())
	}
	made.err, made.known = errors.New("the driver says no"), map[device.Ref]device.Partition{}
	together.Add(gpus)
	if err := r.ask(t.Context(), claims...); err == nil || strings.Count(err.Error(), "the driver says no") != 1 {
		t.Errorf("without partitions: %v", err)
	}
}

func TestPrepareWholeDynamicGPU(t *testing.T) {
	t.Parallel()
	r, made := newDynamicRig(t)
	k := r.ready()
	got, errs, err := k.prepare("v1", r.demanding("a", "gpu-0"))
	if err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	if diff := cmp.Diff([]prepared{{[]string{"gpus"}, testNode + "/gpu-00", "gpu-0", "k8s.gpu.nvidia.com/gpu=" + uuidOf(0)}}, got["uid-a"]); diff != "" {
		t.Error(diff)
	}
	if want := "whole " + uuidOf(0); len(made.calls) != 1 || made.calls[0] != want {
		t.Errorf("calls %q, want %q", made.calls, want)
	}
}

// A partition that cannot be made leaves no hold behind, and the next attempt gets it.
func TestPartitionCannotBeMade(t *testing.T) {
	t.Parallel()
	r, made := newDynamicRig(t)
	k := r.ready()
	c := r.demanding("a", "gpu-0-mig-1g10gb-19-1")
	made.err = errors.New("insufficient resources")
	for range 2 {
		_, errs, err := k.prepare("v1", c)
		if err != nil || errs["uid-a"] == nil || !strings.Contains(errs["uid-a"].Error(), "insufficient resources") {
			t.Fatal(err, errs)
		}
		if got := r.holders(); got != "" {
			t.Error("held:", got)
		}
	}
	if events := r.events.all(); !strings.Contains(events, reasonPartitionNotMade+": device gpu-0-mig-1g10gb-19-1") {
		t.Error("events:", events)
	}
	made.err = nil
	if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
}

// A claim that finds an unmanaged partition in its place has a conflict, as with any other holder, and is moved.
func TestUnmanagedPartition(t *testing.T) {
	t.Parallel()
	r, made := newDynamicRig(t)
	k := r.ready()
	r.pods.movable.Store(true)
	made.err = &partition.UnmanagedError{Device: "gpu-0-mig-3g40gb-9-0", Unmanaged: device.Partition{UUID: "MIG-theirs", Profile: "1g.10gb", ProfileID: 19}}
	_, errs, err := k.prepare("v1", r.demanding("a", "gpu-0-mig-3g40gb-9-0"))
	if err != nil || errs["uid-a"] == nil || !strings.Contains(errs["uid-a"].Error(), "MIG-theirs") {
		t.Fatal(err, errs)
	}
	if conflicts := r.ledger.Conflicts(); len(conflicts) != 1 || !conflicts[0].PendingEviction || len(r.ledger.Holds()) != 0 {
		t.Errorf("conflicts %+v, held: %s", conflicts, r.holders())
	}
}

// Who only looks makes nothing.
func TestAdminAccessToPartitions(t *testing.T) {
	t.Parallel()
	r, made := newDynamicRig(t)
	k := r.ready()
	if _, errs, err := k.prepare("v1", r.demanding("a", "gpu-0-mig-1g10gb-19-0")); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	inv := dynamicMachine(2)
	p := made.known[device.Ref{GPU: uuidOf(0), Placement: device.Placement{Size: 1}}]
	inv.GPUs[0].Partitions = []device.Partition{p}
	r.inventory.set(inv)
	watch := r.demanding("watch", "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1")
	for i := range watch.Status.Allocation.Devices.Results {
		watch.Status.Allocation.Devices.Results[i].AdminAccess = ptr.To(true)
	}
	r.api.put("resourceclaims", watch)
	got, errs, err := k.prepare("v1", watch)
	if err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	want := []prepared{
		{[]string{"gpus"}, testNode + "/gpu-00", "gpu-0-mig-1g10gb-19-0", "k8s.gpu.nvidia.com/gpu=" + p.UUID},
		{[]string{"gpus"}, testNode + "/gpu-00", "gpu-0-mig-1g10gb-19-1", ""},
	}
	if diff := cmp.Diff(want, got["uid-watch"]); diff != "" {
		t.Error(diff)
	}
	if len(made.calls) != 1 || len(r.ledger.Holds()) != 1 {
		t.Errorf("calls %q, held: %s", made.calls, r.holders())
	}
}

// A GPU that an administrator has put into MIG mode since it was allocated is no whole GPU.
func TestWholeGPUInMIGMode(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2)).run()
	k := r.ready()
	inv := machine(2)
	inv.GPUs[0].MIGEnabled = true
	r.inventory.set(inv)
	watch := r.claim("watch", "gpu-0")
	watch.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
	r.api.put("resourceclaims", watch)
	for claim, want := range map[*resourceapi.ResourceClaim]string{r.claim("a", "gpu-0"): "is in MIG mode", r.claim("b", "gpu-1"): "", watch: ""} {
		_, errs, err := k.prepare("v1", claim)
		if got := errs[string(claim.UID)]; err != nil || (got == nil) != (want == "") || got != nil && !strings.Contains(got.Error(), want) {
			t.Errorf("claim %s: %v, %v, want %q", claim.Name, err, got, want)
		}
	}
}

// A claim that is unprepared after its partition was recorded gets no partition.
func TestUnpreparedBeforeCreate(t *testing.T) {
	t.Parallel()
	r, made := newDynamicRig(t)
	k := r.ready()
	c := r.demanding("a", "gpu-0-mig-1g10gb-19-1")
	made.onRecord = func() {
		if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
			t.Error(err, errs)
		}
	}
	_, errs, err := k.prepare("v1", c)
	if err != nil || errs["uid-a"] == nil || !strings.Contains(errs["uid-a"].Error(), errUnprepared.Error()) || len(made.calls) > 0 {
		t.Errorf("got %v, %v; calls %q", err, errs, made.calls)
	}
}
