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

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// fakeSharing applies at once, or when it is told to, or never.
type fakeSharing struct {
	mu  sync.Mutex
	err error
	// wait keeps calls for MPS waiting until it is closed, or their context ends.
	wait    chan struct{}
	calls   []string
	applied map[sharing.Key]bool
	// onRecord is called when settings were recorded. Optional.
	onRecord func()
}

func (f *fakeSharing) Apply(ctx context.Context, g sharing.Group, reserved func() error) ([]string, error) {
	if f.onRecord != nil {
		f.onRecord()
	}
	if err := reserved(); err != nil {
		return nil, err
	}
	wait, err := f.apply(g)
	if g.Sharing.MPS == nil {
		return nil, err
	}
	if wait != nil {
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, fmt.Errorf("share: %w", &sharing.NotReadyError{Daemon: g.Claim.UID + "-0", State: "has not been started"})
		}
	}
	return []string{"k8s.gpu.nvidia.com/sharing=" + g.Claim.UID}, err
}

func (f *fakeSharing) apply(g sharing.Group) (wait chan struct{}, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := string(g.Sharing.Strategy)
	for _, d := range g.Devices {
		name += " " + d.UUID()
		f.applied[sharing.Key{Owner: sharing.OwnerOf(g.Claim.UID), Device: d.Ref()}] = g.Sharing.Strategy != ""
	}
	f.calls = append(f.calls, g.Claim.UID+": "+name)
	return f.wait, f.err
}

func (f *fakeSharing) Applied(claim string, ref device.Ref) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied[sharing.Key{Owner: sharing.OwnerOf(claim), Device: ref}]
}

func (f *fakeSharing) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeSharing) said() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(slices.Values(f.calls))
}

func newSharingRig(t *testing.T, inv device.Inventory, adapt ...func(*Config)) (*rig, *fakeSharing) {
	f := &fakeSharing{applied: map[sharing.Key]bool{}}
	return newRig(t, inv, append(adapt, func(c *Config) {
		c.Sharing = f
		c.DaemonTrouble = func(name string) string { return "image of " + name + " cannot be pulled" }
	})...).run(), f
}

const (
	claimSource = resourceapi.AllocationConfigSourceClaim

	gpuPlain  = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig"}`
	gpuSliced = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}}`

	gpuMPS = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":%s}}`
	migMPS = `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"MigDeviceConfig","sharing":{"strategy":"MPS","mpsConfig":%s}}`
)

// sharedClaim is a claim of which every device is for a request of its name.
func (r *rig) sharedClaim(name string, devices []string, entries ...resourceapi.DeviceAllocationConfiguration) *resourceapi.ResourceClaim {
	c := newClaim(name, devices...)
	for i := range c.Status.Allocation.Devices.Results {
		result := &c.Status.Allocation.Devices.Results[i]
		result.Request = "for-" + result.Device
		if strings.Contains(result.Device, "-mig-") {
			result.Pool = testNode + "/gpu-00"
		}
	}
	c.Status.Allocation.Devices.Config = entries
	r.api.put("resourceclaims", c)
	return c
}

func list(configs ...resourceapi.DeviceAllocationConfiguration) []resourceapi.DeviceAllocationConfiguration {
	return configs
}

// additional are the names of the CDI devices that containers get beside their GPUs, one for each GPU, empty for none.
func additional(devices []prepared) (names []string) {
	for _, d := range devices {
		_, name, _ := strings.Cut(strings.TrimSuffix(d.CDI, "]"), " k8s.gpu.nvidia.com/sharing=")
		names = append(names, name)
	}
	return names
}

// awaitSaid waits until a claim's status says exactly this of how its devices are shared.
func (r *rig) awaitSaid(t *testing.T, claim string, want []string) {
	t.Helper()
	eventually(t, "the claim's status", func() error {
		if diff := cmp.Diff(want, r.api.claimStatus(claim)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// awaitFree waits until no device has a holder.
func (r *rig) awaitFree(t *testing.T) {
	t.Helper()
	eventually(t, "all holds to end", func() error {
		if held := r.holders(); held != "" {
			return errors.New(held)
		}
		return nil
	})
}

// What containers share is set once the devices are reserved, entry by entry, and what they need is in the answer.
func TestPrepareSharedDevices(t *testing.T) {
	t.Parallel()
	limited := `{"defaultPinnedDeviceMemoryLimit":"10Gi","defaultPerDevicePinnedMemoryLimit":{"1":"2Gi"}}`
	for name, test := range map[string]struct {
		devices []string
		adapt   func(*resourceapi.ResourceClaim)
		entries []resourceapi.DeviceAllocationConfiguration
		calls   []string
		// cdi are the additional devices in the answer.
		cdi  []string
		said []string
	}{
		"nothing is shared": {devices: []string{"gpu-0"}, entries: list(parameters(claimSource, gpuPlain)), cdi: []string{""}, said: []string{}},
		"time-slicing": {
			devices: []string{"gpu-0"}, entries: list(parameters(claimSource, gpuSliced)),
			calls: []string{"uid-a: TimeSlicing " + uuidOf(0)}, cdi: []string{""},
			said: []string{"gpu-0 SharingApplied=True(TimeSlicing): processes take turns, time slice Long", "gpu-0 MemoryLimit=False(Advisory): processes that take turns share the memory without a limit"},
		},
		"MPS with limits": {
			devices: []string{"gpu-1", "gpu-0"}, entries: list(parameters(claimSource, fmt.Sprintf(gpuMPS, limited))),
			calls: []string{"uid-a: MPS " + uuidOf(1) + " " + uuidOf(0)}, cdi: []string{"uid-a", "uid-a"},
			said: []string{
				"gpu-1 SharingApplied=True(MPS): processes are clients of the claim's own MPS daemon", "gpu-1 MemoryLimit=True(Daemon): the claim's own MPS daemon limits each client to 2048 MiB, which clients that run as root in their container can change",
				"gpu-0 SharingApplied=True(MPS): processes are clients of the claim's own MPS daemon", "gpu-0 MemoryLimit=True(Daemon): the claim's own MPS daemon limits each client to 10240 MiB, which clients that run as root in their container can change",
			},
		},
		"several entries": {
			devices: []string{"gpu-0", "gpu-1", "gpu-2"}, entries: list(parameters(claimSource, fmt.Sprintf(gpuMPS, "{}"), "for-gpu-0"), parameters(claimSource, gpuSliced, "for-gpu-2")),
			calls: []string{"uid-a: MPS " + uuidOf(0), "uid-a: TimeSlicing " + uuidOf(2)}, cdi: []string{"uid-a", "", ""},
			said: []string{
				"gpu-0 SharingApplied=True(MPS): processes are clients of the claim's own MPS daemon", "gpu-0 MemoryLimit=False(None): no limit was requested",
				"gpu-2 SharingApplied=True(TimeSlicing): processes take turns, time slice Long", "gpu-2 MemoryLimit=False(Advisory): processes that take turns share the memory without a limit",
			},
		},
		"who only looks sets nothing": {
			devices: []string{"gpu-0"}, entries: list(parameters(claimSource, gpuSliced)), cdi: []string{""}, said: []string{},
			adapt: func(c *resourceapi.ResourceClaim) { c.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true) },
		},
		"all of a GPU that could be shared with others": {
			devices: []string{"gpu-0"}, entries: list(parameters(claimSource, gpuSliced)),
			adapt: func(c *resourceapi.ResourceClaim) {
				result := &c.Status.Allocation.Devices.Results[0]
				result.ShareID = ptr.To(types.UID("share"))
				result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("80Gi")}
			},
			calls: []string{"uid-a: TimeSlicing " + uuidOf(0)}, cdi: []string{""},
			said: []string{
				"gpu-0/share SharingApplied=True(TimeSlicing): processes take turns, time slice Long",
				"gpu-0/share MemoryLimit=False(Advisory): processes that take turns share the memory without a limit",
			},
		},
		"a partition made for it": {
			devices: []string{"gpu-0-mig-1g10gb-19-1"}, entries: list(parameters(claimSource, fmt.Sprintf(migMPS, `{"defaultPerDevicePinnedMemoryLimit":{"0":"1Gi"}}`))),
			calls: []string{"uid-a: MPS MIG-1+1"}, cdi: []string{"uid-a"},
			said: []string{"gpu-0-mig-1g10gb-19-1 SharingApplied=True(MPS): processes are clients of the claim's own MPS daemon", "gpu-0-mig-1g10gb-19-1 MemoryLimit=True(Daemon): the claim's own MPS daemon limits each client to 1024 MiB, which clients that run as root in their container can change"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, f := newSharingRig(t, dynamicMachine(3), func(c *Config) { c.Partitions = &fakePartitions{known: map[device.Ref]device.Partition{}} })
			k := r.ready()
			c := r.sharedClaim("a", test.devices, test.entries...)
			if test.adapt != nil {
				test.adapt(c)
			}
			for i, version := range []string{"v1", "v1beta1"} {
				got, errs, err := k.prepare(version, c)
				if err != nil || len(errs) > 0 {
					t.Fatal(err, errs)
				}
				if diff := cmp.Diff(test.cdi, additional(got["uid-a"])); diff != "" {
					t.Error(diff)
				}
				if diff := cmp.Diff(slices.Repeat(test.calls, i+1), f.said(), cmp.Transformer("sort", func(s []string) []string { return slices.Sorted(slices.Values(s)) })); diff != "" {
					t.Error(diff)
				}
			}
			r.awaitSaid(t, "a", test.said)
			// Nothing is said twice.
			updated := func() (n int) { r.api.set(func() { n = r.api.updated }); return n }
			// The second of the calls above may have been answered before the first was told.
			eventually(t, "a call of which nothing is to be told", func() error {
				before := updated()
				if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
					t.Fatal(err, errs)
				}
				if after := updated(); after != before || (after > 0) != (len(test.said) > 0) {
					return fmt.Errorf("updated %d times, then %d", before, after)
				}
				return nil
			})
			if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
		})
	}
}

// What cannot be had with these devices is refused before anything is taken.
func TestSharingRefusals(t *testing.T) {
	t.Parallel()
	inv := machine(2, func(g *device.GPU) { g.ComputeCapability, g.ProductName = "6.1", "Tesla P40" })
	for name, test := range map[string]struct {
		settings string
		adapt    func(*resourceapi.DeviceRequestAllocationResult)
		want     string
	}{
		"too old a GPU":  {settings: `{"multiUser":true}`, want: `spec.devices.config[0].opaque.parameters.sharing.mpsConfig.multiUser: Invalid value: true: needs compute capability 7.0`},
		"no such index":  {settings: `{"defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}}`, want: `mpsConfig.defaultPerDevicePinnedMemoryLimit[1]: Invalid value`},
		"another's UUID": {settings: `{"defaultPerDevicePinnedMemoryLimit":{"` + uuidOf(1) + `":"1Gi"}}`, want: `mpsConfig.defaultPerDevicePinnedMemoryLimit[` + uuidOf(1) + `]: Invalid value`},
		"only a part of the GPU": {settings: `{}`, want: `parameters.sharing: the claim has a share of device gpu-0 (1024Mi of 81920Mi) and requests other settings than the node's policy (none)`, adapt: func(r *resourceapi.DeviceRequestAllocationResult) {
			r.ShareID = ptr.To(types.UID("share"))
			r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("1Gi")}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, f := newSharingRig(t, inv)
			k := r.ready()
			c := r.sharedClaim("a", []string{"gpu-0"}, parameters(claimSource, fmt.Sprintf(gpuMPS, test.settings)))
			c.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: c.Status.Allocation.Devices.Config[0].DeviceConfiguration}}
			if test.adapt != nil {
				result := &c.Status.Allocation.Devices.Results[0]
				test.adapt(result)
				c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: result.Request, Exactly: &resourceapi.ExactDeviceRequest{
					Capacity: &resourceapi.CapacityRequirements{Requests: result.ConsumedCapacity},
				}}}
			}
			for range 2 {
				_, errs, err := k.prepare("v1", c)
				if err != nil || !strings.Contains(fmt.Sprint(errs["uid-a"]), test.want) || !strings.Contains(fmt.Sprint(errs["uid-a"]), "retrying does not help") {
					t.Errorf("%v %v, want %s", err, errs, test.want)
				}
			}
			if events := r.events.all(); !strings.Contains(events, reasonInvalidParameters) || r.holders() != "" || len(f.said()) > 0 {
				t.Errorf("events %s, held %s, calls %v", events, r.holders(), f.said())
			}
		})
	}
}

// Hardware that refuses leaves no hold behind, and the next attempt gets it.
func TestSharingFails(t *testing.T) {
	t.Parallel()
	r, f := newSharingRig(t, machine(1))
	k := r.ready()
	c := r.sharedClaim("a", []string{"gpu-0"}, parameters(claimSource, gpuSliced))
	f.set(func() { f.err = errors.New("nvidia-smi is not there") })
	for range 2 {
		_, errs, err := k.prepare("v1", c)
		if err != nil || !strings.Contains(fmt.Sprint(errs["uid-a"]), "retrying: nvidia-smi is not there") || r.holders() != "" {
			t.Fatal(err, errs, r.holders())
		}
	}
	if events := r.events.all(); !strings.Contains(events, "team-a/a "+reasonNotShared) {
		t.Error("events:", events)
	}
	f.set(func() { f.err = nil })
	if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	// The class was changed: what was shared is shared no more.
	c = c.DeepCopy()
	c.Status.Allocation.Devices.Config = nil
	r.api.put("resourceclaims", c)
	if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 || f.Applied("uid-a", refOf(0)) {
		t.Error(err, errs, f.said())
	}
}

// What the GPU turns out not to support is the author's to correct.
func TestSharingUnsupported(t *testing.T) {
	t.Parallel()
	r, f := newSharingRig(t, machine(1))
	k := r.ready()
	f.set(func() { f.err = fmt.Errorf("share gpu-0: %w", device.ErrUnsupported) })
	for settings, want := range map[string]string{
		gpuSliced:                 `timeSlicingConfig.interval: Invalid value: "Long"`,
		fmt.Sprintf(gpuMPS, "{}"): `strategy: Invalid value: "MPS"`,
	} {
		c := r.sharedClaim("a", []string{"gpu-0"}, parameters(claimSource, settings))
		_, errs, err := k.prepare("v1", c)
		got := fmt.Sprint(errs["uid-a"])
		for _, part := range []string{"opaque.parameters.sharing." + want, "share gpu-0", "retrying does not help"} {
			if err != nil || !strings.Contains(got, part) {
				t.Errorf("%v, %s lacks %q", err, got, part)
			}
		}
		events := r.events.all()
		if strings.Contains(got, "retrying:") || r.holders() != "" || !strings.Contains(events, "team-a/a "+reasonInvalidParameters) {
			t.Errorf("%s, held %s, events %s", got, r.holders(), events)
		}
	}
}

// A slow daemon delays no other claim. A claim whose wait ends too early keeps its device, and its next call finds the daemon ready.
func TestSlowDaemon(t *testing.T) {
	t.Parallel()
	r, f := newSharingRig(t, machine(3))
	k := r.ready()
	goOn := make(chan struct{})
	f.set(func() { f.wait = goOn })
	slow := r.sharedClaim("slow", []string{"gpu-0"}, parameters(claimSource, fmt.Sprintf(gpuMPS, "{}")))
	beside := r.sharedClaim("beside", []string{"gpu-2"})
	ctx, cancel := context.WithTimeout(t.Context(), shortCall)
	defer cancel()
	_, errs, err := k.prepareWith(ctx, "v1", slow, beside)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"retrying", "MPS daemon uid-slow-0 has not been started", "image of uid-slow-0 cannot be pulled"} {
		if !strings.Contains(fmt.Sprint(errs["uid-slow"]), want) {
			t.Errorf("%v lacks %q", errs["uid-slow"], want)
		}
	}
	if got := fmt.Sprint(errs["uid-beside"]); !strings.Contains(got, "not prepared because claim team-a/slow") {
		t.Error(got)
	}
	if got := r.holders(); got != "gpu-0: claim uid-slow held" {
		t.Errorf("held: %s", got)
	}
	if events := r.events.all(); !strings.Contains(events, "team-a/slow "+reasonDaemonNotReady) {
		t.Error("events:", events)
	}

	answered := make(chan map[string]error, 1)
	go func() {
		_, errs, err := k.prepare("v1", slow)
		if err != nil {
			errs = map[string]error{"call": err}
		}
		answered <- errs
	}()
	eventually(t, "the call to wait", func() error {
		if len(f.said()) < 2 {
			return errors.New("not yet")
		}
		return nil
	})
	if _, errs, err := k.prepare("v1", r.claim("quick", "gpu-1")); err != nil || len(errs) > 0 {
		t.Error("another claim waits:", err, errs)
	}
	select {
	case errs := <-answered:
		t.Fatal("answered before the daemon was ready:", errs)
	default:
	}
	close(goOn)
	if errs := <-answered; len(errs) > 0 {
		t.Error(errs)
	}
}

// What was begun for one entry of a claim's parameters is kept, whatever has become of another, in whichever order.
func TestSlowDaemonBesideAFailure(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"gpu-0", "gpu-1"} {
		t.Run(first+" first", func(t *testing.T) {
			t.Parallel()
			r, f := newSharingRig(t, machine(2))
			k := r.ready()
			f.set(func() { f.err, f.wait = errors.New("nvidia-smi fails"), make(chan struct{}) })
			sliced := parameters(claimSource, gpuSliced, "for-gpu-0")
			daemon := parameters(claimSource, fmt.Sprintf(gpuMPS, "{}"), "for-gpu-1")
			devices := []string{"gpu-0", "gpu-1"}
			if first == "gpu-1" {
				slices.Reverse(devices)
			}
			ctx, cancel := context.WithTimeout(t.Context(), shortCall)
			defer cancel()
			_, errs, err := k.prepareWith(ctx, "v1", r.sharedClaim("a", devices, sliced, daemon))
			if err != nil || errs["uid-a"] == nil {
				t.Fatal(err, errs)
			}
			if got, want := r.holders(), "gpu-0: claim uid-a held, gpu-1: claim uid-a held"; got != want {
				t.Errorf("held %q, want %q (%v)", got, want, errs)
			}
		})
	}
}

// An API server that does not take what is said of a claim is asked again, or not, and no pod waits for it.
func TestClaimStatusCannotBeWritten(t *testing.T) {
	t.Parallel()
	r, _ := newSharingRig(t, machine(2))
	k := r.ready()
	r.api.set(func() { r.api.failUpdate = apierrors.NewServiceUnavailable("not today") })
	c := r.sharedClaim("a", []string{"gpu-0"}, parameters(claimSource, gpuSliced))
	if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	tries := func(n int) func() error {
		return func() (err error) {
			r.api.set(func() {
				if r.api.updated < n {
					err = fmt.Errorf("%d tries", r.api.updated)
				}
			})
			return err
		}
	}
	eventually(t, "a try", tries(1))
	r.api.set(func() { r.api.failUpdate = nil })
	eventually(t, "what is said", func() error {
		if got := r.api.claimStatus("a"); len(got) != 2 {
			return fmt.Errorf("it says %q", got)
		}
		return nil
	})
	// Without the right to, it is left at that.
	r.api.set(func() {
		r.api.updated, r.api.failUpdate = 0, apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "b", errors.New("no"))
	})
	if _, errs, err := k.prepare("v1", r.sharedClaim("b", []string{"gpu-1"}, parameters(claimSource, gpuSliced))); err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	eventually(t, "the only try", tries(1))
	time.Sleep(2 * time.Second)
	r.api.set(func() {
		if r.api.updated != 1 {
			t.Errorf("%d tries", r.api.updated)
		}
	})
}

// Conditions are written whatever the encoding of the claim's parameters, and entries of other drivers stay.
func TestClaimStatusBesideOddParameters(t *testing.T) {
	t.Parallel()
	for name, raw := range map[string]string{
		"order":   `{"kind":"GpuConfig","apiVersion":"resource.nvidia.com/v1beta1","sharing":{"strategy":"TimeSlicing"}}`,
		"spaces":  `{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing"}}`,
		"escapes": `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"TimeSl\u0069cing"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, _ := newSharingRig(t, machine(1))
			k := r.ready()
			c := r.sharedClaim("a", []string{"gpu-0"}, parameters(claimSource, raw))
			c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
				Driver: "gpu.nvidia.com", Pool: testNode, Device: "gpu-0",
				Conditions: []metav1.Condition{{Type: ConditionReserved, Status: metav1.ConditionTrue, Reason: "Reserved"}},
			}}
			r.api.put("resourceclaims", c)
			others := sync.OnceFunc(func() {
				next := c.DeepCopy()
				next.Status.Devices = append(next.Status.Devices, resourceapi.AllocatedDeviceStatus{
					Driver: "nic.example.com", Pool: "nics", Device: "nic-0", Data: &runtime.RawExtension{Raw: []byte(`{"z": 1, "a": 2}`)},
					Conditions: []metav1.Condition{{Type: "Up", Status: metav1.ConditionTrue, Reason: "Up"}},
				})
				r.api.put("resourceclaims", next)
			})
			r.api.set(func() { r.api.beforeUpdate = others })
			if _, errs, err := k.prepare("v1", c); err != nil || len(errs) > 0 {
				t.Fatal(err, errs)
			}
			eventually(t, "what is said", func() error {
				want := []string{
					"gpu-0 tandem-gpu.dev/reserved=True(Reserved): ",
					"gpu-0 SharingApplied=True(TimeSlicing): processes take turns, time slice Default",
					"gpu-0 MemoryLimit=False(Advisory): processes that take turns share the memory without a limit",
					"nic-0 Up=True(Up): ",
				}
				if diff := cmp.Diff(want, r.api.claimStatus("a")); diff != "" {
					return errors.New(diff)
				}
				return nil
			})
			r.api.set(func() {
				claim := r.api.objects["resourceclaims"]["team-a/a"].(*resourceapi.ResourceClaim)
				if data := string(claim.Status.Devices[1].Data.Raw); data != `{"z": 1, "a": 2}` || r.api.updated != 2 {
					t.Errorf("the other driver's data are %s after %d updates", data, r.api.updated)
				}
			})
		})
	}
}

// A claim of the same name that came after it is none of its business.
func TestClaimStatusOfAnotherClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1))
	c := r.sharedClaim("a", []string{"gpu-0"}, parameters(claimSource, gpuSliced))
	s := claimStatus{uid: "uid-before", namespace: c.Namespace, name: c.Name, devices: []resourceapi.AllocatedDeviceStatus{{
		Driver: "gpu.nvidia.com", Pool: testNode, Device: "gpu-0", Conditions: []metav1.Condition{{Type: ConditionSharing, Status: metav1.ConditionTrue}},
	}}}
	if r.driver.writeClaimConditions(t.Context(), s); len(r.api.claimStatus("a")) > 0 {
		t.Errorf("%q", r.api.claimStatus("a"))
	}
}

// A claim that is unprepared after its settings were recorded gets no settings.
func TestUnpreparedBeforeApply(t *testing.T) {
	t.Parallel()
	r, f := newSharingRig(t, machine(1))
	k := r.ready()
	c := r.sharedClaim("a", []string{"gpu-0"}, parameters(claimSource, gpuSliced))
	f.onRecord = func() {
		if errs, err := k.unprepare("v1", c); err != nil || len(errs) > 0 {
			t.Error(err, errs)
		}
	}
	_, errs, err := k.prepare("v1", c)
	if err != nil || errs["uid-a"] == nil || !strings.Contains(errs["uid-a"].Error(), errUnprepared.Error()) || len(f.said()) > 0 {
		t.Errorf("got %v, %v; calls %q", err, errs, f.said())
	}
}
