// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func cdi(minor int) string { return "k8s.gpu.nvidia.com/gpu=" + uuidOf(minor) }

func TestPrepareTwiceAndUnprepareTwice(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"v1", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, machine(8)).run()
			k := r.ready()
			if !slices.Contains(k.services, version+".DRAPlugin") {
				t.Fatalf("announced services %v lack %s", k.services, version)
			}
			c := r.claim("a", "gpu-2", "gpu-3")
			want := map[string][]prepared{"uid-a": {
				{[]string{"gpus"}, testNode, "gpu-2", cdi(2)},
				{[]string{"gpus"}, testNode, "gpu-3", cdi(3)},
			}}
			for range 2 {
				got, errs, err := k.prepare(version, c)
				if err != nil || len(errs) > 0 {
					t.Fatal(err, errs)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Error(diff)
				}
				if got := r.holders(); got != "gpu-2: claim uid-a held, gpu-3: claim uid-a held" {
					t.Error("held:", got)
				}
			}
			if pods := r.ledger.Holds()[0].Pods; !slices.Equal(pods, []ledger.Pod{{UID: "pod-uid-a", Namespace: "team-a", Name: "pod-a"}}) {
				t.Error("pods:", pods)
			}
			for range 2 {
				if errs, err := k.unprepare(version, c); err != nil || len(errs) > 0 {
					t.Fatal(err, errs)
				}
				if got := r.holders(); got != "" {
					t.Error("still held:", got)
				}
			}
		})
	}
}

func TestPrepareRequests(t *testing.T) {
	t.Parallel()
	admin := func(c *resourceapi.ResourceClaim) {
		for i := range c.Status.Allocation.Devices.Results {
			c.Status.Allocation.Devices.Results[i].AdminAccess = ptr.To(true)
		}
	}
	tests := map[string]struct {
		claim *resourceapi.ResourceClaim
		adapt func(*resourceapi.ResourceClaim)
		want  []prepared
		held  string
	}{
		"subrequest of firstAvailable is answered for the main request": {
			claim: newClaim("a", "gpu-1"),
			adapt: func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Request = "gpu/large" },
			want:  []prepared{{[]string{"gpu"}, testNode, "gpu-1", cdi(1)}},
			held:  "gpu-1: claim uid-a held",
		},
		"several requests": {
			claim: newClaim("a", "gpu-1", "gpu-0"),
			adapt: func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[1].Request = "other" },
			want:  []prepared{{[]string{"gpus"}, testNode, "gpu-1", cdi(1)}, {[]string{"other"}, testNode, "gpu-0", cdi(0)}},
			held:  "gpu-0: claim uid-a held, gpu-1: claim uid-a held",
		},
		"admin access holds nothing": {
			claim: newClaim("a", "gpu-0", "gpu-1"), adapt: admin,
			want: []prepared{{[]string{"gpus"}, testNode, "gpu-0", cdi(0)}, {[]string{"gpus"}, testNode, "gpu-1", cdi(1)}},
		},
		"the same device with admin access and without": {
			claim: newClaim("a", "gpu-0", "gpu-0"),
			adapt: func(c *resourceapi.ResourceClaim) {
				c.Status.Allocation.Devices.Results[1].AdminAccess = ptr.To(true)
				c.Status.Allocation.Devices.Results[1].Request = "watch"
			},
			want: []prepared{{[]string{"gpus"}, testNode, "gpu-0", cdi(0)}, {[]string{"watch"}, testNode, "gpu-0", cdi(0)}},
			held: "gpu-0: claim uid-a held",
		},
		"admin access to a broken device shows the others": {
			claim: newClaim("a", "gpu-6", "gpu-7"), adapt: admin,
			want: []prepared{{[]string{"gpus"}, testNode, "gpu-6", cdi(6)}, {[]string{"gpus"}, testNode, "gpu-7", ""}},
		},
		"results of other drivers are not ours": {
			claim: newClaim("a", "gpu-0", "nic-0"),
			adapt: func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[1].Driver = "nic.example.com" },
			want:  []prepared{{[]string{"gpus"}, testNode, "gpu-0", cdi(0)}},
			held:  "gpu-0: claim uid-a held",
		},
		"nothing of ours": {
			claim: newClaim("a", "nic-0"),
			adapt: func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Driver = "nic.example.com" },
			want:  []prepared{},
		},
		"default parameters": {
			claim: newClaim("a", "gpu-0"),
			adapt: func(c *resourceapi.ResourceClaim) {
				c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{
					parameters(resourceapi.AllocationConfigSourceClaim, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`),
				}
			},
			want: []prepared{{[]string{"gpus"}, testNode, "gpu-0", cdi(0)}},
			held: "gpu-0: claim uid-a held",
		},
	}
	inv := machine(8)
	inv.GPUs[7].Health = device.Health{Reason: device.ReasonLost, Message: "gone"}
	r := newRig(t, inv).run()
	k := r.ready()
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.adapt != nil {
				test.adapt(test.claim)
			}
			r.api.put("resourceclaims", test.claim)
			for _, version := range []string{"v1", "v1beta1"} {
				got, errs, err := k.prepare(version, test.claim)
				if err != nil || len(errs) > 0 {
					t.Fatal(err, errs)
				}
				if diff := cmp.Diff(map[string][]prepared{"uid-a": test.want}, got); diff != "" {
					t.Error(diff)
				}
				if got := r.holders(); got != test.held {
					t.Errorf("held %q, want %q", got, test.held)
				}
			}
			if errs, err := k.unprepare("v1", test.claim); err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
		})
	}
}

func parameters(source resourceapi.AllocationConfigSource, raw string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: "gpu.nvidia.com", Parameters: apiruntime.RawExtension{Raw: []byte(raw)},
		}},
	}
}

func TestPrepareRefusals(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		claim *resourceapi.ResourceClaim
		adapt func(*resourceapi.ResourceClaim)
		want  []string
		event string
	}{
		"device that does not exist": {
			claim: newClaim("a", "gpu-0", "gpu-9"),
			want:  []string{"claim team-a/a", "request gpus", "device gpu-9 of pool node1", "does not exist on this node"},
			event: "team-a/a UnknownDevice: device gpu-9",
		},
		"pool of another node": {
			claim: newClaim("a", "gpu-0"),
			adapt: func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].Pool = "node2" },
			want:  []string{"pool node2", "serves pool node1 only"},
			event: "team-a/a UnknownDevice:",
		},
		"unhealthy device": {
			claim: newClaim("a", "gpu-7"),
			want:  []string{"device gpu-7", uuidOf(7), "request gpus", "Lost: gone"},
			event: "team-a/a DeviceUnhealthy:",
		},
		"parameters": {
			claim: newClaim("a", "gpu-0"),
			adapt: func(c *resourceapi.ResourceClaim) {
				c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{
					parameters(resourceapi.AllocationConfigSourceClaim, `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPI"}}`),
				}
			},
			want:  []string{"config[0].opaque.parameters.sharing.strategy", `"MPI": supported values`, "retrying does not help"},
			event: "team-a/a InvalidParameters:",
		},
	}
	inv := machine(8)
	inv.GPUs[7].Health = device.Health{Reason: device.ReasonLost, Message: "gone"}
	r := newRig(t, inv).run()
	k := r.ready()
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if test.adapt != nil {
				test.adapt(test.claim)
			}
			r.api.put("resourceclaims", test.claim)
			for range 2 {
				devices, errs, err := k.prepare("v1", test.claim)
				if err != nil || len(devices) > 0 {
					t.Fatal(err, devices)
				}
				for _, part := range test.want {
					if text := fmt.Sprint(errs["uid-a"]); !strings.Contains(text, part) {
						t.Errorf("error %q lacks %q", text, part)
					}
				}
				if held := r.holders(); held != "" {
					t.Error("held after a refusal:", held)
				}
			}
			if !strings.Contains(r.events.all(), test.event) {
				t.Errorf("events %q lack %q", r.events.all(), test.event)
			}
		})
	}
}

// A claim whose GPU broke or vanished between allocation and Prepare heals as one whose GPU has another holder: after a moment, because
// the inventory of an agent that has just started may lack a GPU. A pod without an owner waits, and the event says what to do.
func TestUnusableDevice(t *testing.T) {
	t.Parallel()
	broken := machine(2)
	broken.GPUs[1].Health = device.Health{Reason: device.ReasonLost, Message: "gone"}
	inMIGMode := machine(2)
	inMIGMode.GPUs[1].MIGEnabled = true
	for name, inv := range map[string]device.Inventory{"broken": broken, "vanished": machine(1), "in MIG mode": inMIGMode} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, inv)
			r.pods.movable.Store(true)
			c := newClaim("a", "gpu-1")
			plan := func(after time.Duration) error {
				p := r.driver.plan(t.Context(), c, r.inventory.Inventory(), nil)
				r.driver.recordUnusable(t.Context(), []*preparation{p}, time.Unix(1000, 0).Add(after))
				return p.err
			}
			for _, after := range []time.Duration{0, 9 * time.Second} {
				if err := plan(after); err == nil || len(r.ledger.Conflicts()) > 0 {
					t.Fatalf("after %v: error %v, conflicts %+v", after, err, r.ledger.Conflicts())
				}
			}
			// kubelet's next call comes after 60 to 90 s.
			if err := plan(90 * time.Second); err == nil || !strings.Contains(err.Error(), "the pod is evicted") {
				t.Error(err)
			}
			conflicts := r.ledger.Conflicts()
			if len(conflicts) != 1 || !conflicts[0].PendingEviction || !slices.Equal(conflicts[0].Names, []string{"gpu-1"}) || len(conflicts[0].Pods) != 1 {
				t.Errorf("conflicts: %+v", conflicts)
			}
			if held := r.holders(); held != "" {
				t.Error("held:", held)
			}

			// Its owner is not known to replace it.
			r.ledger.ClearConflict("uid-a")
			r.pods.movable.Store(false)
			if err := plan(90 * time.Second); err == nil || !strings.Contains(err.Error(), "delete it and create it again") {
				t.Error(err)
			}

			// The device was usable meanwhile, or nothing was asked for long.
			r.inventory.set(machine(2))
			if err := plan(90 * time.Second); err != nil {
				t.Error(err)
			}
			r.inventory.set(inv)
			r.ledger.ClearConflict("uid-a")
			for _, after := range []time.Duration{2 * time.Minute, time.Hour} {
				if err := plan(after); err == nil || len(r.ledger.Conflicts()) > 0 {
					t.Errorf("after %v: error %v, conflicts %+v", after, err, r.ledger.Conflicts())
				}
			}

			// A monitor holds nothing.
			admin := true
			c.Status.Allocation.Devices.Results[0].AdminAccess = &admin
			_, _ = plan(2*time.Hour), plan(2*time.Hour+90*time.Second)
			if conflicts := r.ledger.Conflicts(); len(conflicts) > 0 {
				t.Errorf("conflicts of admin access: %+v", conflicts)
			}
		})
	}
}

// TestRemovedPartition: an administrator has removed a partition since the last scan. A claim that the scheduler has just given it is refused, and
// in conflict when kubelet asks again. A claim that has it is not, and neither is one of which the driver does not say.
func TestRemovedPartition(t *testing.T) {
	t.Parallel()
	inv := dynamicMachine(1)
	inv.GPUs[0].Dynamic = false
	theirs := cut(&inv.GPUs[0], "1g.10gb", 0)
	parts := &fakePartitions{removed: map[string]bool{theirs.UUID: true}}
	r := newRig(t, inv, func(c *Config) { c.Partitions = parts })
	r.pods.movable.Store(true)
	claim := newClaim("a", theirs.Name())
	plan := func(after time.Duration) error {
		p := r.driver.plan(t.Context(), claim, r.inventory.Inventory(), nil)
		r.driver.recordUnusable(t.Context(), []*preparation{p}, time.Unix(1000, 0).Add(after))
		return p.err
	}
	if err := plan(0); err == nil || !strings.Contains(err.Error(), "was removed: retrying") {
		t.Error(err)
	}
	if err := plan(90 * time.Second); err == nil || !strings.Contains(err.Error(), "the pod is evicted") || len(r.ledger.Conflicts()) != 1 {
		t.Errorf("error %v, conflicts %+v", err, r.ledger.Conflicts())
	}
	r.ledger.ClearConflict("uid-a")
	parts.unsaid = errors.New("the GPU does not answer")
	if err := plan(91 * time.Second); err != nil {
		t.Error(err)
	}
	parts.unsaid = nil
	if _, err := r.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "uid-a", Devices: []device.Ref{theirs.Ref}}); err != nil {
		t.Fatal(err)
	}
	if err := plan(92 * time.Second); err != nil {
		t.Error(err)
	}
}

// What a claim's owner is told must not name what lives in another namespace.
func TestPrepareConflict(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		pod    *ledger.Pod
		want   string
		hidden string
	}{
		"own namespace":     {&ledger.Pod{UID: "p", Namespace: "team-a", Name: "trainer"}, "held by pod team-a/trainer by its nvidia.com/gpu limit", "another"},
		"another namespace": {&ledger.Pod{UID: "p", Namespace: "team-b", Name: "secret"}, "held by a pod in another namespace by its resource limits", "secret"},
		"not known yet":     {nil, "held by a pod by its resource limits", "secret"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, machine(8)).run()
			k := r.ready()
			r.takeByPod(1, test.pod)
			c := r.claim("a", "gpu-0", "gpu-1")
			devices, errs, err := k.prepare("v1", c)
			if err != nil || len(devices) > 0 {
				t.Fatal(err, devices)
			}
			for what, text := range map[string]string{"error": fmt.Sprint(errs["uid-a"]), "events": r.events.all()} {
				if !strings.Contains(text, "device gpu-1 ("+uuidOf(1)+") is "+test.want) || strings.Contains(text, test.hidden) {
					t.Errorf("%s: %q", what, text)
				}
			}
			if !strings.Contains(r.events.all(), "team-a/a DeviceHeld: ") {
				t.Error("no DeviceHeld event:", r.events.all())
			}
			if held := r.holders(); held != "gpu-1: pod "+uuidOf(1)+" held" {
				t.Error("held:", held)
			}
			if n := r.metric("tandem_prepare_conflicts_total"); n != 1 {
				t.Error("conflicts counted:", n)
			}
		})
	}
}

func TestDescribeHolderOfClaims(t *testing.T) {
	hold := func(namespace string, state ledger.State) ledger.Hold {
		return ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "u"}, Namespace: namespace, Name: "c", State: state}
	}
	for want, h := range map[string]ledger.Hold{
		"claim team-a/c":                                  hold("team-a", ledger.StateHeld),
		"claim team-a/c, which is draining":               hold("team-a", ledger.StateDraining),
		"a claim in another namespace":                    hold("team-b", ledger.StateHeld),
		"a claim in another namespace, which is draining": hold("team-b", ledger.StateDraining),
		"a claim": hold("", ledger.StateHeld),
	} {
		if got := describeHolder(h, "team-a"); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// A pod starts with all of its claims or not at all.
func TestPrepareAllClaimsOfACallOrNone(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	k := r.ready()
	r.takeByPod(5, nil)
	shared, fresh, blocked, last := r.claim("shared", "gpu-0"), r.claim("fresh", "gpu-1"), r.claim("blocked", "gpu-5"), r.claim("last", "gpu-2")
	if _, errs, err := k.prepare("v1", shared); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	before := r.holders()
	devices, errs, err := k.prepare("v1", shared, fresh, blocked, last)
	if err != nil || len(devices) > 0 || len(errs) != 4 {
		t.Fatal(err, devices, errs)
	}
	for uid, want := range map[string]string{
		"uid-blocked": "is held by",
		"uid-fresh":   "not prepared because claim team-a/blocked of the same pod was not",
		"uid-shared":  "not prepared because claim team-a/blocked of the same pod was not",
		"uid-last":    "not prepared because claim team-a/blocked of the same pod was not",
	} {
		if !strings.Contains(fmt.Sprint(errs[uid]), want) {
			t.Errorf("%s: %v", uid, errs[uid])
		}
	}
	if got := r.holders(); got != before {
		t.Errorf("held %q, before %q", got, before)
	}
	// A claim that is wrong in itself stops the others before anything is reserved.
	wrong := r.claim("wrong", "gpu-77")
	if _, errs, err = k.prepare("v1", fresh, wrong); err != nil || len(errs) != 2 || r.holders() != before {
		t.Error(err, errs, r.holders())
	}
	r.releasePodHold(5)
	if devices, errs, err = k.prepare("v1", shared, fresh, blocked, last); err != nil || len(errs) > 0 || len(devices) != 4 {
		t.Error(err, errs, devices)
	}
}

// What a call took and another pod was told meanwhile that it has is not given back when that call fails.
func TestAFailedCallLeavesASharedClaimToTheOtherPod(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	k := r.ready()
	r.takeByPod(5, nil)
	r.podstate.set(uuidOf(5), ledger.Terminating)
	shared, blocked := r.claim("shared", "gpu-0"), r.claim("blocked", "gpu-5")
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error)
	go func() {
		_, _, err := k.prepareWith(ctx, "v1", shared, blocked)
		failed <- err
	}()
	eventually(t, "the first call has the shared claim", func() error {
		if got := r.holders(); !strings.Contains(got, "uid-shared held") {
			return errors.New(got)
		}
		return nil
	})
	if _, errs, err := k.prepare("v1", shared); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	cancel()
	if err := <-failed; err == nil {
		t.Fatal("the first call got its claims")
	}
	// Stopping waits until the call has tidied up behind itself.
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if got := r.holders(); !strings.Contains(got, "gpu-0: claim uid-shared held") {
		t.Error("held:", got)
	}
}

func TestPrepareGivesBackWithoutSpecs(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	k := r.ready()
	old, fresh := r.claim("old", "gpu-0"), r.claim("new", "gpu-1")
	if _, errs, err := k.prepare("v1", old); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	r.specs.fail(errors.New("no space left"))
	_, errs, err := k.prepare("v1", old, fresh)
	if err != nil || !strings.Contains(fmt.Sprint(errs["uid-new"]), "no space left") || !strings.Contains(fmt.Sprint(errs["uid-old"]), "no space left") {
		t.Error(err, errs)
	}
	if got := r.holders(); got != "gpu-0: claim uid-old held" {
		t.Error("held:", got)
	}
}

func TestPrepareWaitsForAHolderThatGoes(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	k := r.ready()
	r.podstate.set("uid-old", ledger.Running)
	old, next := r.claim("old", "gpu-0"), r.claim("next", "gpu-0")
	if _, errs, err := k.prepare("v1", old); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	if errs, err := k.unprepare("v1", old); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	if got := r.holders(); got != "gpu-0: claim uid-old draining" {
		t.Fatal("held:", got)
	}
	answered := make(chan map[string]error, 1)
	go func() {
		_, errs, err := k.prepare("v1", next)
		if err != nil {
			errs = map[string]error{"call": err}
		}
		answered <- errs
	}()
	eventually(t, "the slice to say that the GPU drains", func() error {
		if !strings.Contains(r.published()+" ", "gpu-0!draining ") {
			return errors.New(r.published())
		}
		return nil
	})
	select {
	case errs := <-answered:
		t.Fatal("answered while the other one drains:", errs)
	default:
	}
	r.releasePodHold(0)
	if errs := <-answered; len(errs) > 0 {
		t.Error(errs)
	}
	if got := r.holders(); got != "gpu-0: claim uid-next held" {
		t.Error("held:", got)
	}
}

// kubelet must hear the reason, not run into its own deadline.
func TestPrepareAnswersBeforeTheDeadline(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	k := r.ready()
	r.takeByPod(0, nil)
	r.podstate.set(uuidOf(0), ledger.Terminating)
	ctx, cancel := context.WithTimeout(context.Background(), shortCall)
	defer cancel()
	_, errs, err := k.prepareWith(ctx, "v1", r.claim("a", "gpu-0"))
	if err != nil || !strings.Contains(fmt.Sprint(errs["uid-a"]), "is held by") {
		t.Error(err, errs)
	}
}

func TestUnprepareAbortsAWaitingPrepare(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(8)).run()
	k := r.ready()
	r.takeByPod(0, nil)
	r.podstate.set(uuidOf(0), ledger.Terminating)
	c := r.claim("a", "gpu-0")
	answered := make(chan string, 1)
	go func() {
		_, errs, err := k.prepare("v1", c)
		answered <- fmt.Sprint(err, errs)
	}()
	for {
		if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
			t.Fatal(err, errs)
		}
		select {
		case text := <-answered:
			if !strings.Contains(text, ledger.ErrCancelled.Error()) {
				t.Error(text)
			}
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func TestPrepareConcurrently(t *testing.T) {
	t.Parallel()
	const gpus, contenders = 8, 64
	r := newRig(t, machine(gpus)).run()
	k := r.ready()
	claims := make([]*resourceapi.ResourceClaim, contenders)
	for i := range claims {
		claims[i] = r.claim(fmt.Sprintf("c%d", i), fmt.Sprintf("gpu-%d", i%gpus))
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	winners := map[string][]string{}
	for _, c := range claims {
		for _, version := range []string{"v1", "v1beta1"} {
			wg.Go(func() {
				devices, errs, err := k.prepare(version, c)
				if err != nil || len(devices)+len(errs) != 1 {
					t.Error(err, devices, errs)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				for uid, d := range devices {
					if !slices.Contains(winners[d[0].Device], uid) {
						winners[d[0].Device] = append(winners[d[0].Device], uid)
					}
				}
			})
		}
	}
	wg.Wait()
	if len(winners) != gpus {
		t.Errorf("%d devices given out, want %d", len(winners), gpus)
	}
	for name, uids := range winners {
		if len(uids) != 1 {
			t.Errorf("%s has owners %v", name, uids)
		}
	}
}

func TestMalformedRequests(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2)).run()
	k := r.ready()
	replaced := newClaim("replaced", "gpu-0")
	r.api.put("resourceclaims", replaced.DeepCopy())
	replaced.UID = "another"
	unallocated := newClaim("unallocated")
	unallocated.Status.Allocation = nil
	r.api.put("resourceclaims", unallocated)
	for name, claims := range map[string][]*resourceapi.ResourceClaim{
		"no such claim":      {newClaim("nowhere", "gpu-0")},
		"replaced claim":     {replaced},
		"unallocated claim":  {unallocated},
		"nameless claim":     {{}},
		"path in the name":   {newClaim("../../nodes/node1", "gpu-0")},
		"one good, one gone": {r.claim("good", "gpu-0"), newClaim("nowhere", "gpu-1")},
	} {
		for _, version := range []string{"v1", "v1beta1"} {
			if devices, _, err := k.prepare(version, claims...); err == nil {
				t.Errorf("%s, %s: answered %v", name, version, devices)
			}
		}
		if held := r.holders(); held != "" {
			t.Errorf("%s: held %s", name, held)
		}
	}
	if devices, errs, err := k.prepare("v1"); err != nil || len(devices)+len(errs) > 0 {
		t.Error("no claims:", devices, errs, err)
	}
	for _, version := range []string{"v1", "v1beta1"} {
		if errs, err := k.unprepare(version, newClaim("never-seen"), &resourceapi.ResourceClaim{}); err != nil || len(errs) > 0 {
			t.Error(errs, err)
		}
	}
	if _, errs, err := k.prepare("v1", r.claim("good", "gpu-0")); err != nil || len(errs) > 0 {
		t.Error("after all that:", errs, err)
	}
}

func TestStopFinishesWaitingCallsAndLeavesNothing(t *testing.T) {
	r := newRig(t, machine(2)).run()
	k := r.ready()
	r.takeByPod(0, nil)
	r.podstate.set(uuidOf(0), ledger.Terminating)
	c := r.claim("a", "gpu-0")
	answered := make(chan string, 1)
	go func() {
		_, errs, err := k.prepare("v1", c)
		answered <- fmt.Sprint(err, errs)
	}()
	eventually(t, "the call to wait", func() error {
		if n := r.metric("tandem_prepare_duration_seconds"); n != 0 {
			return errors.New("already answered")
		}
		if r.podstate.questions() == 0 {
			return errors.New("not there yet")
		}
		return nil
	})
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	if text := <-answered; !strings.Contains(text, "is held by") {
		t.Error(text)
	}
	if left := socketsBelow(t, r.dir); len(left) > 0 {
		t.Error("left behind:", left)
	}
	eventually(t, "every goroutine of the driver to end", func() error {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		for stack := range strings.SplitSeq(string(stacks), "\n\n") {
			for _, ours := range []string{"pkg/driver.(*", "kubeletplugin.", "resourceslice.", "reflector"} {
				if strings.Contains(stack, ours) && !strings.Contains(stack, "pkg/driver.(*fakeAPI)") {
					return errors.New(stack)
				}
			}
		}
		return nil
	})
	if r.published() == "" {
		t.Error("slices were removed: a restart would disturb the scheduler")
	}
}

// TestStopWaitsForTheAnswer covers an answer that gRPC writes late. TestStopDoesNotSleep fails if writes go unnoticed.
func TestStopWaitsForTheAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		answered time.Duration // before the stop
		writes   []time.Duration
		want     time.Duration
	}{
		"late":               {0, []time.Duration{300 * time.Millisecond}, 300*time.Millisecond + writeTime},
		"never":              {0, nil, firstWriteTime},
		"long ago":           {time.Minute, nil, 0},
		"no calls":           {time.Since(time.Unix(0, 0)), nil, 0},
		"at once":            {0, []time.Duration{time.Millisecond}, time.Millisecond + writeTime},
		"one of two is late": {0, []time.Duration{time.Millisecond, 15 * time.Millisecond}, 15*time.Millisecond + writeTime},
		"clock set back":     {-time.Hour, nil, firstWriteTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, start := &session{}, time.Now()
				s.answered.Store(max(0, start.Add(-c.answered).UnixNano()))
				for _, after := range c.writes {
					time.AfterFunc(after, func() { s.service.written.Store(time.Now().UnixNano()) })
				}
				s.finishCalls()
				if took := time.Since(start); took < c.want || took > c.want+2*time.Millisecond {
					t.Errorf("waited %v, want %v", took, c.want)
				}
			})
		})
	}
}

// Stopping waits until answers are on the socket, and not much longer. On a busy machine not each stop is that quick.
func TestStopDoesNotSleep(t *testing.T) {
	shortest := time.Hour
	for deadline := time.Now().Add(patience); shortest > 100*time.Millisecond && time.Now().Before(deadline); {
		r := newRig(t, machine(2)).run()
		k := r.ready()
		if _, errs, err := k.prepare("v1", r.claim("a", "gpu-0")); err != nil || len(errs) > 0 {
			t.Fatal(err, errs)
		}
		start := time.Now()
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		shortest = min(shortest, time.Since(start))
	}
	if shortest > 100*time.Millisecond {
		t.Errorf("stopped after %v", shortest)
	} else {
		t.Logf("stopped after %v", shortest)
	}
}
