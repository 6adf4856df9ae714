// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"github.com/prometheus/client_golang/prometheus"
	"maps"
	"slices"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func TestAssess(t *testing.T) {
	healthy := device.GPU{UUID: "GPU-a"}
	lost := device.GPU{UUID: "GPU-a", Health: device.Health{Reason: device.ReasonLost}}
	hold := func(kind ledger.Kind, state ledger.State, ref device.Ref) []ledger.Hold {
		return []ledger.Hold{{Holder: ledger.Holder{Kind: kind, ID: "GPU-a"}, State: state, Device: ref, Resource: whole.GPU}}
	}
	replica, byAnother := hold(ledger.KindPod, ledger.StateRestored, healthy.Ref()), hold(ledger.KindPod, ledger.StateHeld, healthy.Ref())
	replica[0].Holder.ID, byAnother[0].Resource = "GPU-a::2", "nvidia.com/mig-1g.10gb"
	partition := device.Ref{GPU: "GPU-a", Placement: device.Placement{Start: 2, Size: 1}}
	for name, test := range map[string]struct {
		gpu             device.GPU
		holds           []ledger.Hold
		want, allocated state // without and with the GPU being allocated to a claim
	}{
		"free":                        {healthy, nil, stateHealthy, stateWithdrawn},
		"another is held":             {healthy, hold(ledger.KindClaim, ledger.StateHeld, device.Ref{GPU: "GPU-b"}), stateHealthy, stateWithdrawn},
		"claim expected":              {healthy, hold(ledger.KindClaim, ledger.StateRestored, healthy.Ref()), stateWithdrawn, stateWithdrawn},
		"claim held":                  {healthy, hold(ledger.KindClaim, ledger.StateHeld, healthy.Ref()), stateWithdrawn, stateWithdrawn},
		"claim draining":              {healthy, hold(ledger.KindClaim, ledger.StateDraining, healthy.Ref()), stateWithdrawn, stateWithdrawn},
		"claim holds a partition":     {healthy, hold(ledger.KindClaim, ledger.StateHeld, partition), stateWithdrawn, stateWithdrawn},
		"limit expected":              {healthy, hold(ledger.KindPod, ledger.StateRestored, healthy.Ref()), stateHealthy, stateHealthy},
		"limit held":                  {healthy, hold(ledger.KindPod, ledger.StateHeld, healthy.Ref()), stateHealthy, stateHealthy},
		"limit draining":              {healthy, hold(ledger.KindPod, ledger.StateDraining, healthy.Ref()), stateWithdrawn, stateWithdrawn},
		"limit holds a partition":     {healthy, hold(ledger.KindPod, ledger.StateHeld, partition), stateWithdrawn, stateWithdrawn},
		"limit of another plugin":     {healthy, replica, stateWithdrawn, stateWithdrawn},
		"limit by another resource":   {healthy, byAnother, stateWithdrawn, stateWithdrawn},
		"lost":                        {lost, nil, stateUnhealthy, stateUnhealthy},
		"lost while a pod holds it":   {lost, hold(ledger.KindPod, ledger.StateHeld, healthy.Ref()), stateUnhealthy, stateUnhealthy},
		"lost while a claim holds it": {lost, hold(ledger.KindClaim, ledger.StateHeld, healthy.Ref()), stateUnhealthy, stateUnhealthy},
	} {
		t.Run(name, func(t *testing.T) {
			c := devicesOf(test.gpu)
			pendingOn := func(gpu string) Allocations { return allocations{newObservable([]device.Ref{{GPU: gpu}})} }
			conflict := []ledger.Conflict{{Devices: []device.Ref{healthy.Ref()}}}
			for why, about := range map[string]struct {
				usage usage
				want  state
			}{
				"without allocations":  {usageOf(fixedLedger{holds: test.holds}, noAllocations), test.want},
				"allocated to a claim": {usageOf(fixedLedger{holds: test.holds}, pendingOn("GPU-a")), test.allocated},
				"another is allocated": {usageOf(fixedLedger{holds: test.holds}, pendingOn("GPU-b")), test.want},
				"a claim waits for it": {usageOf(fixedLedger{holds: test.holds, conflicts: conflict}, noAllocations), test.allocated},
			} {
				if got := c.states(about.usage); got[0] != about.want {
					t.Errorf("%s: got %s, want %s", why, got[0], about.want)
				}
			}
		})
	}
}

// What no new holder can get stays healthy for the pod that holds it: kubelet, when it restarts, fails a pod otherwise.
func TestHeldDevicesStayHealthy(t *testing.T) {
	held := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-a"}, State: ledger.StateHeld, Device: device.Ref{GPU: "GPU-a"}, Resource: whole.GPU}
	for _, reason := range []string{device.ReasonNotClean, device.ReasonNotInjectable, device.ReasonNotRecordable} {
		unusable := device.Health{Reason: reason}
		c := devicesOf(device.GPU{UUID: "GPU-a", Health: unusable}, device.GPU{UUID: "GPU-b", Minor: 1, Health: unusable})
		got := c.states(usageOf(fixedLedger{holds: []ledger.Hold{held}}, noAllocations))
		if want := []state{stateHealthy, stateUnhealthy}; !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", reason, got, want)
		}
	}
}

// fixedLedger is a ledger that says what a test wants.
type fixedLedger struct {
	Ledger
	holds     []ledger.Hold
	conflicts []ledger.Conflict
	// outstanding is how many devices bound limits pods ask for.
	outstanding int
}

func (s fixedLedger) Unwritable() error   { return nil }
func (fixedLedger) Withheld() error       { return nil }
func (fixedLedger) Withholds(string) bool { return false }

func (s fixedLedger) Holds() []ledger.Hold         { return s.holds }
func (s fixedLedger) Conflicts() []ledger.Conflict { return s.conflicts }

func (s fixedLedger) Outstanding() (devices map[string]int, changed <-chan struct{}) {
	return map[string]int{whole.GPU: s.outstanding, "nvidia.com/mig-1g.10gb": 9}, nil
}

// whole offers whole GPUs.
var whole = device.Resources{GPU: "nvidia.com/gpu"}

// listsOf offers whole GPUs of an inventory without CDI.
func listsOf(gpus ...device.GPU) *lists {
	return &lists{
		Config: &Config{
			Resources: whole, Inventory: fakeInventory{newObservable(device.Inventory{GPUs: gpus})},
			Sharing: newFakeSharing(), Allocations: noAllocations,
		},
		metrics: newMetrics(prometheus.NewRegistry()), pendingSince: map[pendingClaim]time.Time{},
	}
}

// devicesOf is that of whole GPUs.
func devicesOf(gpus ...device.GPU) *resourceDevices {
	return listsOf(gpus...).build(usage{}, &deviceTable{}, time.Now()).of[whole.GPU]
}

// Devices that are only allocated to claims stay on offer for as many as limits pods ask for that kubelet is about to admit, those
// last that the scheduler gives away last; what a claim has does not.
func TestAssessLeavesBoundPodsTheirDevices(t *testing.T) {
	gpus := []device.GPU{{UUID: "GPU-0"}, {UUID: "GPU-1"}, {UUID: "GPU-2"}, {UUID: "GPU-3", Health: device.Health{Reason: device.ReasonLost}}}
	c := devicesOf(gpus...)
	allocated := allocations{newObservable([]device.Ref{gpus[0].Ref(), gpus[1].Ref(), gpus[3].Ref()})}
	taken := []ledger.Hold{{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "x"}, State: ledger.StateHeld, Device: gpus[1].Ref()}}
	limit := []ledger.Hold{{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-2"}, State: ledger.StateHeld, Device: gpus[2].Ref(), Resource: whole.GPU}}
	const ok, away, bad = stateHealthy, stateWithdrawn, stateUnhealthy
	for name, test := range map[string]struct {
		ledger fixedLedger
		want   []state
	}{
		"none is bound":               {fixedLedger{}, []state{away, away, ok, bad}},
		"one, and one is free":        {fixedLedger{outstanding: 1}, []state{away, away, ok, bad}},
		"two, and one is free":        {fixedLedger{outstanding: 2}, []state{away, ok, ok, bad}},
		"one, and none is free":       {fixedLedger{outstanding: 1, holds: limit}, []state{away, ok, ok, bad}},
		"more than there are":         {fixedLedger{outstanding: 9}, []state{ok, ok, ok, bad}},
		"not what a claim has by now": {fixedLedger{outstanding: 9, holds: taken}, []state{ok, away, ok, bad}},
	} {
		if got := c.states(usageOf(test.ledger, allocated)); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// allocations say what a test wants.
type allocations struct{ *observable[[]device.Ref] }

var noAllocations = allocations{newObservable[[]device.Ref](nil)}

func (a allocations) Allocated() []ledger.Hold {
	var holds []ledger.Hold
	for _, ref := range a.get() {
		holds = append(holds, ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim}, Device: ref})
	}
	return holds
}

func (a allocations) OutOfService() func(device.Device) string { return allInService }

func allInService(device.Device) string { return "" }

func (a allocations) put(gpus ...int) {
	a.set(func([]device.Ref) []device.Ref {
		var refs []device.Ref
		for _, i := range gpus {
			refs = append(refs, device.Ref{GPU: uuid(i)})
		}
		return refs
	})
}

func TestCatalogKeepsOrderAndIDs(t *testing.T) {
	all := &deviceTable{}
	gpu := func(id string, minor int) device.GPU { return device.GPU{UUID: id, Minor: minor} }
	for _, step := range []struct {
		gpus []device.GPU
		want []string
	}{
		{[]device.GPU{gpu("GPU-b", 1), gpu("GPU-a", 0)}, []string{"GPU-a", "GPU-b"}},
		{[]device.GPU{gpu("GPU-b", 1)}, []string{"GPU-a Missing", "GPU-b"}},
		{[]device.GPU{gpu("GPU-c", 0), gpu("GPU-b", 1)}, []string{"GPU-a Missing", "GPU-c", "GPU-b"}}, // a replaced board
		{nil, []string{"GPU-a Missing", "GPU-c Missing", "GPU-b Missing"}},
		{[]device.GPU{gpu("GPU-a", 3)}, []string{"GPU-c Missing", "GPU-b Missing", "GPU-a"}},
	} {
		all = listsOf(step.gpus...).build(usage{}, all, time.Now())
		c := all.of[whole.GPU]
		var got []string
		for i, item := range c.items {
			g := item.GPU
			text := g.UUID
			if !g.Health.Healthy() {
				text += " " + g.Health.Reason
			}
			got = append(got, text)
			if c.index[g.UUID] != i {
				t.Errorf("%s is indexed at %d, not %d", g.UUID, c.index[g.UUID], i)
			}
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("devices are %v, want %v", got, step.want)
		}
	}
}

// The device of a pending claim is withdrawn after a delay, so that the watch has reported pods that were bound before; not in
// the first list, and not if a claim waits for the device.
func TestPendingClaimsAreDebounced(t *testing.T) {
	gpus := []device.GPU{{UUID: uuid(0)}, {UUID: uuid(1)}}
	allocated := allocations{newObservable[[]device.Ref](nil)}
	book := &fixedLedger{}
	r := listsOf(gpus...)
	r.Ledger, r.Allocations = book, allocated
	r.table.Store(&deviceTable{})
	r.rebuild(time.Now())
	began := time.Now()
	const ok, away = stateHealthy, stateWithdrawn
	step := func(ms int, again time.Duration, want ...state) {
		t.Helper()
		got := r.publish(began.Add(time.Duration(ms) * time.Millisecond))
		list := r.current()[whole.GPU]
		var states []state
		for _, d := range list.response.GetDevices() {
			states = append(states, stateHealthy)
			if slices.Contains(list.withdrawn, d.ID) {
				states[len(states)-1] = stateWithdrawn
			}
		}
		if got != again || !slices.Equal(states, want) {
			t.Errorf("at %d ms: %v, again in %v; want %v, %v", ms, states, got, want, again)
		}
	}
	allocated.put(0)
	step(0, 0, away, ok) // the first
	allocated.put(0, 1)
	step(100, pendingDelay, away, ok)
	step(300, pendingDelay-200*time.Millisecond, away, ok)
	step(400, 0, away, away)
	allocated.put(0)
	step(500, 0, away, ok)
	allocated.put(0, 1)
	book.conflicts = []ledger.Conflict{{Devices: []device.Ref{gpus[1].Ref()}}}
	step(600, 0, away, away)
}

// What a limit has stays listed though the inventory does not have it, also when it was never listed by this process.
func TestWhatALimitHasIsListed(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.config.Resources.Strategy = device.MIGStrategyMixed
	f.inventory.cut(2, false, part(2, 0, "1g.10gb"))
	take := func(id, resource string, ref device.Ref) {
		t.Helper()
		if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: id, Resource: resource, Device: ref}}); err != nil {
			t.Fatal(err)
		}
	}
	take("MIG-2-5", oneSlice, device.Ref{GPU: uuid(2), Placement: device.Placement{Start: 5, Size: 1}})
	take("MIG-9-4", half, device.Ref{GPU: "GPU-lost", Placement: device.Placement{Start: 4, Size: 4}})
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	look := func(after time.Duration, resource string, want map[string]string) {
		t.Helper()
		lists, _ := p.Refresh(began.Add(after))
		got := map[string]string{}
		for _, d := range lists[resource].GetDevices() {
			got[d.ID] = d.Health
		}
		if !maps.Equal(got, want) {
			t.Errorf("after %v %s are %v, want %v", after, resource, got, want)
		}
	}
	look(0, oneSlice, map[string]string{"MIG-2-0": "Healthy", "MIG-2-5": "Unhealthy"})
	look(0, half, map[string]string{"MIG-9-4": "Unhealthy"})
	// One that is restored while the agent runs is told of without a change of the inventory.
	take("GPU-7::1", whole.GPU, device.Ref{GPU: "GPU-7"})
	p.lists.publish(began.Add(time.Second))
	if list := p.lists.current()[whole.GPU]; !slices.ContainsFunc(list.response.Devices, func(d *pluginapi.Device) bool {
		return d.ID == "GPU-7::1" && d.Health == "Unhealthy"
	}) {
		t.Errorf("lists %v", list.response.Devices)
	}
	for _, id := range []string{"MIG-2-5", "MIG-9-4", "GPU-7::1"} {
		f.ledger.release(id)
	}
	look(2*time.Second, oneSlice, map[string]string{"MIG-2-0": "Healthy", "MIG-2-5": "Unhealthy"})
	look(time.Hour, oneSlice, map[string]string{"MIG-2-0": "Healthy"})
	look(time.Hour, half, map[string]string{})
	if _, listed := p.lists.devices(whole.GPU).index["GPU-7::1"]; listed {
		t.Error("an ID without a holder and without a GPU stays listed")
	}
}

// A pod that was adopted has its device under the ID of another plugin. It stays healthy while its GPU is.
func TestAdoptedIDIsListedAsItsGPU(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: "nvidia5", Resource: whole.GPU, Device: device.Ref{GPU: uuid(5)}}}); err != nil {
		t.Fatal(err)
	}
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	health := func(at int, id string) string {
		lists, _ := p.Refresh(began.Add(time.Duration(at) * time.Second))
		for _, d := range lists[whole.GPU].GetDevices() {
			if d.ID == id {
				return d.Health
			}
		}
		return "not listed"
	}
	for at := range 3 {
		if got := health(at, "nvidia5"); got != pluginapi.Healthy {
			t.Errorf("at %d s it is %s", at, got)
		}
	}
	if got := health(3, uuid(5)); got != pluginapi.Unhealthy {
		t.Errorf("its GPU is %s for others", got)
	}
	f.inventory.setHealth(uuid(5), device.Health{Reason: device.ReasonLost})
	if got := health(4, "nvidia5"); got != pluginapi.Unhealthy {
		t.Errorf("with a lost GPU it is %s", got)
	}
}

// Partitions that are on their way out do not keep whole GPUs from being chosen by their links.
func TestPlannerBesideWhatLeaves(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.config.Resources.Strategy = device.MIGStrategySingle
	f.inventory.set(func(device.Inventory) device.Inventory { return islands(4, 2, 6) })
	for gpu := range 3 {
		f.inventory.cut(gpu, false, part(gpu, 0, "1g.10gb"))
	}
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	p.Refresh(time.Now())
	if p.lists.devices(whole.GPU).wholeGPUs {
		t.Error("partitions are chosen by the links of their GPUs")
	}
	f.inventory.set(func(device.Inventory) device.Inventory { return islands(4, 2, 6) })
	p.Refresh(time.Now())
	if items := len(p.lists.devices(whole.GPU).items); items != 4+3 {
		t.Errorf("%d items are listed", items)
	}
	answer := p.Preferred(whole.GPU, &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: []string{uuid(0), uuid(1), uuid(3)}, AllocationSize: 2},
	}})
	ids := answer.GetContainerResponses()[0].GetDeviceIDs()
	if slices.Sort(ids); !slices.Equal(ids, []string{uuid(0), uuid(1)}) {
		t.Errorf("prefers %v, which have no links", ids)
	}
}
