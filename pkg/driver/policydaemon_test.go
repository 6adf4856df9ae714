// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// fakePolicy lets claims join the daemons of the GPUs that it has.
type fakePolicy struct {
	mu      sync.Mutex
	daemons map[string]bool
	// late has calls end with their context.
	late  bool
	err   error
	calls []string
}

func (f *fakePolicy) ByDaemon(gpu device.GPU) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.daemons[gpu.UUID]
}

func (f *fakePolicy) Join(ctx context.Context, claim sharing.Claim, d device.Device, share device.Share) ([]string, error) {
	f.mu.Lock()
	f.calls = append(f.calls, fmt.Sprintf("%s/%s joins %s with %s", claim.Namespace, claim.Name, d.Name(), share))
	late, err, daemon := f.late, f.err, f.daemons[d.GPU.UUID]
	f.mu.Unlock()
	switch {
	case late:
		<-ctx.Done()
		return nil, fmt.Errorf("join: %w", &sharing.NotReadyError{Daemon: "gpu-0-0", State: "has not been started"})
	case err != nil || !daemon:
		return nil, err
	}
	return []string{"k8s.gpu.nvidia.com/sharing=" + d.Name()}, nil
}

func (f *fakePolicy) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakePolicy) said() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.calls...)
}

// newPolicyRig is a node whose first GPUs are shared by MPS, and the others by time.
func newPolicyRig(t *testing.T, byMPS, others int) (*rig, *fakeSharing, *fakePolicy) {
	inv := sharedMachine(byMPS + others)
	policy := &fakePolicy{daemons: map[string]bool{}}
	for i := range byMPS {
		inv.GPUs[i].Sharing.Strategy = device.MPS
		policy.daemons[inv.GPUs[i].UUID] = true
	}
	r, shared := newSharingRig(t, inv, func(c *Config) { c.Policy = policy })
	return r, shared, policy
}

// partsClaim has so much of each device, each by a request of its own unless requests says otherwise.
func (r *rig) partsClaim(name, memory string, devices, requests []string) *resourceapi.ResourceClaim {
	c := newClaim(name, devices...)
	amount := map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	asked := map[string]bool{}
	for i := range c.Status.Allocation.Devices.Results {
		result := &c.Status.Allocation.Devices.Results[i]
		result.Request, result.ShareID, result.ConsumedCapacity = requests[i], ptr.To(types.UID(fmt.Sprint("share-", i))), amount
		if !asked[result.Request] {
			c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, resourceapi.DeviceRequest{
				Name: result.Request, Exactly: &resourceapi.ExactDeviceRequest{Capacity: &resourceapi.CapacityRequirements{Requests: amount}},
			})
		}
		asked[result.Request] = true
	}
	r.api.put("resourceclaims", c)
	return c
}

// A claim that has a part of a GPU is a client of that GPU's daemon, and its status says who limits it; one that has all of it has it
// without the daemon.
func TestPrepareByPolicy(t *testing.T) {
	t.Parallel()
	r, shared, policy := newPolicyRig(t, 1, 1)
	k := r.ready()
	for name, test := range map[string]struct {
		claim *resourceapi.ResourceClaim
		cdi   []string
		joins []string
		calls []string
		said  []string
	}{
		"a part by MPS": {
			claim: r.partsClaim("a", "10Gi", []string{"gpu-0"}, []string{"one"}), cdi: []string{"gpu-0"}, joins: []string{"team-a/a joins gpu-0 with 10240Mi of 24576Mi"},
			said: []string{
				"gpu-0/share-0 SharingApplied=True(MPS): processes are clients of the GPU's MPS daemon, together with those of other holders",
				"gpu-0/share-0 MemoryLimit=True(Client): CUDA limits each process to 10240 MiB by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: a process without that variable has no limit",
			},
		},
		"two parts of one GPU": {
			claim: r.partsClaim("a", "2Gi", []string{"gpu-0", "gpu-0"}, []string{"one", "two"}), cdi: []string{"gpu-0", "gpu-0"}, joins: []string{"team-a/a joins gpu-0 with 4096Mi of 24576Mi"},
			said: []string{
				"gpu-0/share-0 SharingApplied=True(MPS): processes are clients of the GPU's MPS daemon, together with those of other holders",
				"gpu-0/share-0 MemoryLimit=True(Client): CUDA limits each process to 4096 MiB by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: a process without that variable has no limit",
				"gpu-0/share-1 SharingApplied=True(MPS): processes are clients of the GPU's MPS daemon, together with those of other holders",
				"gpu-0/share-1 MemoryLimit=True(Client): CUDA limits each process to 4096 MiB by CUDA_MPS_PINNED_DEVICE_MEM_LIMIT in its environment: a process without that variable has no limit",
			},
		},
		"a part by time": {
			claim: r.partsClaim("a", "10Gi", []string{"gpu-1"}, []string{"one"}), cdi: []string{""}, joins: []string{"team-a/a joins gpu-1 with 10240Mi of 24576Mi"},
			said: []string{
				"gpu-1/share-0 SharingApplied=True(TimeSlicing): processes take turns, time slice of the device",
				"gpu-1/share-0 MemoryLimit=False(Advisory): time-slicing does not enforce the claim's share (10240Mi of 24576Mi), nor the shares of other holders",
			},
		},
		"all of a GPU that is shared by MPS": {
			claim: r.claim("a", "gpu-0"), cdi: []string{""}, calls: []string{"uid-a: Exclusive " + uuidOf(0)}, said: []string{},
		},
		"all of a GPU that is shared by time": {claim: r.claim("a", "gpu-1"), cdi: []string{""}, said: []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			r.api.put("resourceclaims", test.claim)
			shared.set(func() { shared.calls = nil })
			policy.set(func() { policy.calls = nil })
			got, errs, err := k.prepare("v1", test.claim)
			if err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
			if diff := cmp.Diff(test.cdi, additional(got["uid-a"])); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(append([]string(nil), test.joins...), policy.said()); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(append([]string(nil), test.calls...), shared.said()); diff != "" {
				t.Error(diff)
			}
			r.awaitSaid(t, "a", test.said)
			if errs, err := k.unprepare("v1", test.claim); err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
			r.awaitFree(t)
			shared.set(func() { clear(shared.applied) })
		})
	}
}

// A claim with a share may request the settings that the node's policy has for the GPU, and no others.
func TestSettingsOfThePolicy(t *testing.T) {
	t.Parallel()
	const sliced = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`
	r, _, _ := newPolicyRig(t, 1, 1)
	k := r.ready()
	for name, test := range map[string]struct {
		gpu, settings, want string
	}{
		"time-slicing":            {"gpu-1", sliced, ""},
		"another interval":        {"gpu-1", gpuSliced, "other settings than the node's policy (strategy TimeSlicing with interval Default)"},
		"MPS of a GPU without":    {"gpu-1", fmt.Sprintf(gpuMPS, "{}"), "strategy TimeSlicing with interval Default"},
		"MPS":                     {"gpu-0", fmt.Sprintf(gpuMPS, "{}"), ""},
		"MPS with a limit":        {"gpu-0", fmt.Sprintf(gpuMPS, `{"defaultPinnedDeviceMemoryLimit":"1Gi"}`), "strategy MPS without mpsConfig"},
		"MPS with a percentage":   {"gpu-0", fmt.Sprintf(gpuMPS, `{"defaultActiveThreadPercentage":50}`), "strategy MPS without mpsConfig"},
		"MPS with per-GPU limits": {"gpu-0", fmt.Sprintf(gpuMPS, `{"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi"}}`), "strategy MPS without mpsConfig"},
		"MPS with several users":  {"gpu-0", fmt.Sprintf(gpuMPS, `{"multiUser":true}`), "strategy MPS without mpsConfig"},
		"time-slicing beside MPS": {"gpu-0", sliced, "strategy MPS without mpsConfig"},
	} {
		t.Run(name, func(t *testing.T) {
			c := r.partsClaim("a", "10Gi", []string{test.gpu}, []string{"one"})
			c.Status.Allocation.Devices.Config = list(parameters(claimSource, test.settings))
			r.api.put("resourceclaims", c)
			_, errs, err := k.prepare("v1", c)
			if got := fmt.Sprint(errs["uid-a"]); err != nil || (test.want == "") != (len(errs) == 0) || !strings.Contains(got, test.want) {
				t.Fatalf("got %v %s, want %q", err, got, test.want)
			}
			if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
			r.awaitFree(t)
		})
	}
}

// A claim that was prepared with the settings of the policy keeps its share when kubelet prepares it again after a change of the policy. A new
// claim with the same settings is refused.
func TestSettingsOfAnEarlierPolicy(t *testing.T) {
	t.Parallel()
	const sliced = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing"}}`
	r, _, _ := newPolicyRig(t, 0, 1)
	k := r.ready()
	claim := func(name string) *resourceapi.ResourceClaim {
		c := r.partsClaim(name, "10Gi", []string{"gpu-0"}, []string{"one"})
		c.Status.Allocation.Devices.Config = list(parameters(claimSource, sliced))
		r.api.put("resourceclaims", c)
		return c
	}
	held, next := claim("a"), claim("b")
	if _, errs, err := k.prepare("v1", held); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	inv := sharedMachine(1)
	inv.GPUs[0].Sharing.Interval = "Long"
	r.inventory.set(inv)
	if _, errs, err := k.prepare("v1", held); err != nil || len(errs) > 0 {
		t.Errorf("prepared again: %v %v", err, errs)
	}
	if _, errs, err := k.prepare("v1", next); err != nil || !strings.Contains(fmt.Sprint(errs["uid-b"]), "strategy TimeSlicing with interval Long") {
		t.Errorf("a new claim: %v %v", err, errs)
	}
}

// A claim that has all of the memory beside a claim without any keeps that share when the policy changes. It does not get the settings of a GPU
// that it has alone, which are for claims with the GPU as a whole.
func TestAllMemoryOfAnEarlierPolicy(t *testing.T) {
	t.Parallel()
	r, shared, policy := newPolicyRig(t, 0, 1)
	inv := sharedMachine(1)
	memory := fmt.Sprint(inv.GPUs[0].MemoryBytes)
	unlimited := device.Sharing{Strategy: device.TimeSlicing, Claims: device.Unlimited, Interval: "Long"}
	inv.GPUs[0].Sharing = unlimited
	r.inventory.set(inv)
	k := r.ready()
	claim := func(name, memory string) *resourceapi.ResourceClaim {
		c := r.partsClaim(name, memory, []string{"gpu-0"}, []string{"one"})
		c.Status.Allocation.Devices.Config = list(parameters(claimSource, gpuSliced))
		r.api.put("resourceclaims", c)
		return c
	}
	all, none := claim("a", memory), claim("b", "0")
	byTime, byMPS := device.Sharing{Strategy: device.TimeSlicing, Claims: device.ByMemory}, device.Sharing{Strategy: device.MPS, Claims: device.ByMemory}
	for _, after := range []device.Sharing{unlimited, {}, byTime, byMPS, unlimited} {
		inv := sharedMachine(1)
		inv.GPUs[0].Sharing = after
		r.inventory.set(inv)
		for _, c := range []*resourceapi.ResourceClaim{all, none} {
			if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
				t.Errorf("%+v: %s: %v %v", after, c.Name, err, errs)
			}
		}
		if calls := shared.said(); len(calls) > 0 {
			t.Errorf("%+v: settings of a claim: %q", after, calls)
		}
	}
	if want := 10; len(policy.said()) != want {
		t.Errorf("the policy's settings: %q", policy.said())
	}
	// No holder gets the whole GPU, nor memory of it.
	for name, memory := range map[string]string{"c": memory, "d": "1Gi"} {
		if _, errs, err := k.prepare("v1", claim(name, memory)); err != nil || len(errs) != 1 {
			t.Errorf("%s of a full GPU: %v %v", memory, err, errs)
		}
	}
}

// A client of a daemon sees that daemon's GPU only.
func TestPartsOfSeveralGPUsByMPS(t *testing.T) {
	t.Parallel()
	r, _, _ := newPolicyRig(t, 2, 2)
	k := r.ready()
	for name, test := range map[string]struct {
		devices, requests []string
		// refused is what the error says; empty for none.
		refused string
	}{
		"by one request":                 {[]string{"gpu-0", "gpu-1"}, []string{"both", "both"}, "a share of device gpu-0, which is shared by MPS, and device gpu-1"},
		"by a request each":              {[]string{"gpu-0", "gpu-1"}, []string{"one", "two"}, ""},
		"of which one is not by MPS":     {[]string{"gpu-2", "gpu-0"}, []string{"both", "both"}, "a share of device gpu-0, which is shared by MPS, and device gpu-2"},
		"one not by MPS, a request each": {[]string{"gpu-2", "gpu-0"}, []string{"one", "two"}, ""},
		"twice of the same":              {[]string{"gpu-0", "gpu-0"}, []string{"both", "both"}, ""},
		"none of which is by MPS":        {[]string{"gpu-2", "gpu-3"}, []string{"both", "both"}, ""},
		"by one request among several":   {[]string{"gpu-2", "gpu-0", "gpu-1"}, []string{"one", "both", "both"}, "a share of device gpu-0, which is shared by MPS, and device gpu-1"},
	} {
		t.Run(name, func(t *testing.T) {
			c := r.partsClaim("a", "1Gi", test.devices, test.requests)
			_, errs, err := k.prepare("v1", c)
			if err != nil {
				t.Fatal(err)
			}
			if got := errs["uid-a"]; (got != nil) != (test.refused != "") || got != nil && !strings.Contains(got.Error(), "request both got "+test.refused) {
				t.Errorf("got %v", got)
			}
			if test.refused != "" && r.holders() != "" {
				t.Errorf("held %s", r.holders())
			}
			if _, err := k.unprepare("v1", c); err != nil {
				t.Fatal(err)
			}
			r.awaitFree(t)
		})
	}
}

// unprepares has the claim unprepared while it joins.
type unprepares struct {
	*fakePolicy
	unprepare func()
}

func (u *unprepares) Join(ctx context.Context, claim sharing.Claim, d device.Device, share device.Share) ([]string, error) {
	u.unprepare()
	return u.fakePolicy.Join(ctx, claim, d, share)
}

func TestUnpreparedWhileJoining(t *testing.T) {
	t.Parallel()
	inv := sharedMachine(1)
	inv.GPUs[0].Sharing.Strategy = device.MPS
	policy := &unprepares{fakePolicy: &fakePolicy{daemons: map[string]bool{inv.GPUs[0].UUID: true}}}
	r, _ := newSharingRig(t, inv, func(c *Config) { c.Policy = policy })
	k := r.ready()
	c := r.partsClaim("a", "1Gi", []string{"gpu-0"}, []string{"one"})
	policy.unprepare = func() {
		if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
			t.Error(err, errs)
		}
	}
	if _, errs, err := k.prepare("v1", c); err != nil || errs["uid-a"] == nil {
		t.Errorf("prepared without a hold: %v, held %q", err, r.holders())
	}
}

// What cannot be joined in time is given back: nothing that was begun needs it.
func TestPolicyDaemonNotReady(t *testing.T) {
	t.Parallel()
	r, _, policy := newPolicyRig(t, 1, 0)
	k := r.ready()
	for reason, change := range map[string]func(){
		reasonDaemonNotReady: func() { policy.late, policy.err = true, nil },
		reasonNotShared:      func() { policy.late, policy.err = false, errors.New("its sharing policy is being changed") },
	} {
		policy.set(change)
		c := r.partsClaim("late", "1Gi", []string{"gpu-0"}, []string{"one"})
		ctx, cancel := context.WithTimeout(t.Context(), shortCall)
		_, errs, err := k.prepareWith(ctx, "v1", c)
		cancel()
		if err != nil || errs["uid-late"] == nil {
			t.Fatal(err, errs)
		}
		if held := r.holders(); held != "" {
			t.Errorf("%s: held %s", reason, held)
		}
		if events := r.events.all(); !strings.Contains(events, "team-a/late "+reason) {
			t.Errorf("%s: events %s", reason, events)
		}
	}
}
