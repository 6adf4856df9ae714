// SPDX-License-Identifier: Apache-2.0

package partition

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

const gpuUUID = "GPU-0"

// hardware is a fake H100. Its calls can fail, or end the process.
type hardware struct {
	mu      sync.Mutex
	gpu     device.GPU
	serial  int
	calls   int
	changed chan struct{}
	// step is called before and after each effect of a call. Its error makes the call fail there.
	step func(name string) error
	// held are the GPU instances that a process uses.
	held map[device.Placement]bool
}

func newHardware() *hardware {
	places := func(size int, starts ...int) []device.Placement {
		var all []device.Placement
		for _, start := range starts {
			all = append(all, device.Placement{Start: start, Size: size})
		}
		return all
	}
	return &hardware{
		gpu: device.GPU{
			UUID: gpuUUID, MIGCapable: true, ComputeCapability: "9.0",
			Profiles: []device.Profile{
				{ID: 9, Name: "3g.40gb", Placements: places(4, 0, 4)},
				{ID: 19, Name: "1g.10gb", Placements: places(1, 0, 1, 2, 3, 4, 5, 6)},
			},
		},
		changed: make(chan struct{}), step: func(string) error { return nil }, held: map[device.Placement]bool{},
	}
}

func (h *hardware) at(name string) error {
	h.calls++
	return h.step(name)
}

func (h *hardware) Inventory() device.Inventory {
	h.mu.Lock()
	defer h.mu.Unlock()
	gpu := h.gpu
	gpu.Partitions = slices.Clone(gpu.Partitions)
	return device.Inventory{GPUs: []device.GPU{gpu}}
}

func (h *hardware) Changed() <-chan struct{} { return h.changed }

func (h *hardware) EnableMIG(context.Context, string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.at("enable"); err != nil {
		return err
	}
	h.gpu.MIGEnabled = true
	return nil
}

func (h *hardware) DisableMIG(context.Context, string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.at("disable"); err != nil {
		return err
	}
	if len(h.gpu.Partitions) > 0 {
		return errors.New("in use")
	}
	h.gpu.MIGEnabled = false
	return nil
}

func (h *hardware) Create(_ context.Context, ref device.Ref, profile device.Profile) (device.Partition, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.gpu.MIGEnabled {
		return device.Partition{}, errors.New("not in MIG mode")
	}
	for _, p := range h.gpu.Partitions {
		if p.Ref.Overlaps(ref) {
			return device.Partition{}, fmt.Errorf("%s is in the way", p.Ref)
		}
	}
	if err := h.at("create"); err != nil {
		return device.Partition{}, err
	}
	h.serial++
	p := device.Partition{Ref: ref, Profile: profile.Name, ProfileID: profile.ID, GPUInstance: h.serial}
	h.gpu.Partitions = append(h.gpu.Partitions, p)
	last := &h.gpu.Partitions[len(h.gpu.Partitions)-1]
	if err := h.at("create compute instance"); err != nil {
		h.gpu.Partitions = h.gpu.Partitions[:len(h.gpu.Partitions)-1]
		return device.Partition{}, err
	}
	last.UUID = fmt.Sprintf("MIG-%d", h.serial)
	return *last, h.at("created")
}

func (h *hardware) Destroy(_ context.Context, ref device.Ref) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	at := func(p device.Partition) bool { return p.Ref.Placement == ref.Placement }
	if h.held[ref.Placement] {
		return errors.New("in use by another client")
	}
	if err := h.at("destroy"); err != nil {
		return err
	}
	if i := slices.IndexFunc(h.gpu.Partitions, at); i >= 0 {
		h.gpu.Partitions[i].UUID = ""
	}
	if err := h.at("destroy GPU instance"); err != nil {
		return err
	}
	h.gpu.Partitions = slices.DeleteFunc(h.gpu.Partitions, at)
	return h.at("destroyed")
}

func (h *hardware) Partitions(context.Context, string) ([]device.Partition, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.gpu.Partitions), h.at("list")
}

// put creates a partition as an administrator.
func (h *hardware) put(ref device.Ref, profile string, id int) device.Partition {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.serial++
	h.gpu.MIGEnabled = true
	p := device.Partition{UUID: fmt.Sprintf("MIG-%d", h.serial), Ref: ref, Profile: profile, ProfileID: id}
	h.gpu.Partitions = append(h.gpu.Partitions, p)
	return p
}

func (h *hardware) uuids() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var uuids []string
	for _, p := range h.gpu.Partitions {
		uuids = append(uuids, p.UUID)
	}
	return uuids
}

// process returns a Maker as in a process that has just started.
func process(t *testing.T, dir string, h *hardware) *Maker {
	t.Helper()
	records := NewRecords(dir, "boot")
	problems, err := records.Load()
	if err != nil || len(problems) > 0 {
		t.Fatal(err, problems)
	}
	return NewMaker(records, h, Policy{
		Dynamic: func(device.GPU) bool { return true },
		Sharing: func(device.GPU) device.Sharing { return device.Sharing{} },
	})
}

func wanted(profile string, id, start, size int) device.Partition {
	return device.Partition{
		Ref: device.Ref{GPU: gpuUUID, Placement: device.Placement{Start: start, Size: size}}, Profile: profile, ProfileID: id,
	}
}

func always() bool { return true }

var errUnreserved = errors.New("not reserved any more")

// create calls the Maker as the DRA driver does.
func create(ctx context.Context, m *Maker, want device.Partition, reserved func() bool) (device.Partition, error) {
	return m.Create(ctx, Request{
		Partition: want,
		Reserved: func() error {
			if !reserved() {
				return errUnreserved
			}
			return nil
		},
		Publish: func(context.Context, device.Partition) error { return nil },
	})
}

func TestMakeAndDestroy(t *testing.T) {
	h := newHardware()
	m := process(t, t.TempDir(), h)
	want := wanted("3g.40gb", 9, 4, 4)
	first, err := create(t.Context(), m, want, always)
	if err != nil {
		t.Fatal(err)
	}
	again, err := create(t.Context(), m, want, always)
	if err != nil || again.UUID != first.UUID || !again.Made {
		t.Fatalf("made again: %+v, %v; want the one that is there, %s", again, err, first.UUID)
	}
	if !m.Complete(want.Ref) {
		t.Error("the partition is not complete")
	}
	if found, ok := m.Inventory().ByName(first.Name()); !ok || !found.Partition.Made {
		t.Errorf("the inventory has %+v, want it marked as made", found.Partition)
	}
	if err := m.Destroy(t.Context(), want.Ref, func() bool { return false }); err != nil || len(h.uuids()) != 1 {
		t.Fatalf("destroyed although it is in use: %v, %v left", err, h.uuids())
	}
	for range 2 {
		if err := m.Destroy(t.Context(), want.Ref, always); err != nil {
			t.Fatal(err)
		}
	}
	if left := h.uuids(); len(left) > 0 || m.Made(want.Ref) {
		t.Errorf("left %v, recorded %v", left, m.Made(want.Ref))
	}
	idle := m.IdleMIGMode()
	if len(idle) != 1 {
		t.Fatalf("GPUs in idle MIG mode: %v", idle)
	}
	lost := errors.New("the claim is gone")
	if err := m.EnsureWhole(t.Context(), gpuUUID, func() error { return lost }); !errors.Is(err, lost) || !h.Inventory().GPUs[0].MIGEnabled {
		t.Errorf("MIG mode was switched off for a claim that has lost the GPU: %v", err)
	}
	if err := m.EndIdleMIGMode(t.Context(), idle[0], func() bool { return false }); err != nil || !h.Inventory().GPUs[0].MIGEnabled {
		t.Errorf("MIG mode of a held GPU was switched off: %v", err)
	}
	if err := m.EndIdleMIGMode(t.Context(), idle[0], always); err != nil || h.Inventory().GPUs[0].MIGEnabled || len(m.IdleMIGMode()) > 0 {
		t.Errorf("a free GPU stays in MIG mode: %v", err)
	}
}

// An unmanaged partition makes others unavailable, and is never changed.
func TestUnmanagedPartition(t *testing.T) {
	h := newHardware()
	dir := t.TempDir()
	m := process(t, dir, h)
	theirs := h.put(device.Ref{GPU: gpuUUID, Placement: device.Placement{Start: 5, Size: 1}}, "1g.10gb", 19)
	_, err := create(t.Context(), m, wanted("3g.40gb", 9, 4, 4), always)
	if unmanaged, ok := errors.AsType[*UnmanagedError](err); !ok || unmanaged.Unmanaged.UUID != theirs.UUID {
		t.Fatalf("got %v, want a UnmanagedError about %s", err, theirs.UUID)
	}
	if _, err := create(t.Context(), m, wanted("1g.10gb", 19, 5, 1), always); err == nil {
		t.Fatal("adopted a partition that an administrator made")
	}
	if err := m.Destroy(t.Context(), theirs.Ref, always); err != nil || !slices.Equal(h.uuids(), []string{theirs.UUID}) {
		t.Fatalf("%v; left %v, want %s", err, h.uuids(), theirs.UUID)
	}
	made := theirs
	made.UUID = "MIG-another at the same placement"
	for p, want := range map[*device.Partition]bool{&theirs: true, &made: false} {
		if there, err := m.Exists(t.Context(), *p); err != nil || there != want {
			t.Errorf("%s exists: %t, %v", p.UUID, there, err)
		}
	}
	if unmanaged, ok := errors.AsType[*UnmanagedError](m.EnsureWhole(t.Context(), gpuUUID, func() error { return nil })); !ok || unmanaged.Unmanaged.UUID != theirs.UUID {
		t.Error("a GPU with an unmanaged partition was made whole")
	}
	if idle := m.IdleMIGMode(); len(idle) > 0 {
		t.Errorf("a GPU with a partition counts as in idle MIG mode")
	}
	if err := m.EndIdleMIGMode(t.Context(), h.Inventory().GPUs[0], always); err == nil || !h.Inventory().GPUs[0].MIGEnabled {
		t.Error("MIG mode was switched off under a partition", err)
	}

	// An administrator destroys ours and makes one in its place.
	ours, err := create(t.Context(), m, wanted("1g.10gb", 19, 0, 1), always)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Destroy(t.Context(), ours.Ref); err != nil {
		t.Fatal(err)
	}
	next := h.put(ours.Ref, "1g.10gb", 19)
	if _, err := create(t.Context(), m, wanted("1g.10gb", 19, 0, 1), always); err == nil {
		t.Error("adopted a partition of another UUID")
	}
	if err := process(t, dir, h).Destroy(t.Context(), ours.Ref, always); err != nil || !slices.Contains(h.uuids(), next.UUID) {
		t.Errorf("%v; left %v, want %s among them", err, h.uuids(), next.UUID)
	}
}

// The driver may give the UUID of Tandem's partition to another one that an administrator made at its placement. Nothing tells them apart:
// it serves the claim, and ends with it.
func TestReplacedWithTheSameUUID(t *testing.T) {
	h := newHardware()
	m := process(t, t.TempDir(), h)
	want := wanted("1g.10gb", 19, 0, 1)
	ours, err := create(t.Context(), m, want, always)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Destroy(t.Context(), ours.Ref); err != nil {
		t.Fatal(err)
	}
	h.serial--
	if next := h.put(ours.Ref, "1g.10gb", 19); next.UUID != ours.UUID {
		t.Fatalf("UUID %s, want %s again", next.UUID, ours.UUID)
	}
	if again, err := create(t.Context(), m, want, always); err != nil || again.UUID != ours.UUID {
		t.Errorf("%v, %v", again, err)
	}
	if err := m.Destroy(t.Context(), ours.Ref, always); err != nil || len(h.uuids()) > 0 || m.Made(ours.Ref) {
		t.Errorf("%v; left %v", err, h.uuids())
	}
}

// MIG mode of a GPU that is no longer dynamic ends with the last partition that Tandem created, unless it has an unmanaged one.
func TestLastPartitionOfAStaticGPU(t *testing.T) {
	for name, test := range map[string]struct{ dynamic, unmanaged, want bool }{
		"still dynamic":                            {dynamic: true, want: true},
		"no longer dynamic":                        {},
		"no longer dynamic, with an unmanaged one": {unmanaged: true, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHardware()
			dynamic := true
			m := process(t, t.TempDir(), h)
			m.policy.Dynamic = func(device.GPU) bool { return dynamic }
			first, second := wanted("1g.10gb", 19, 0, 1), wanted("1g.10gb", 19, 1, 1)
			for _, want := range []device.Partition{first, second} {
				if _, err := create(t.Context(), m, want, always); err != nil {
					t.Fatal(err)
				}
			}
			if test.unmanaged {
				h.put(device.Ref{GPU: gpuUUID, Placement: device.Placement{Start: 4, Size: 4}}, "3g.40gb", 9)
			}
			dynamic = test.dynamic
			for _, want := range []device.Partition{first, second} {
				if !h.gpu.MIGEnabled {
					t.Fatalf("MIG mode is off before %s is gone", want.Name())
				}
				if err := m.Destroy(t.Context(), want.Ref, always); err != nil {
					t.Fatal(err)
				}
			}
			if h.gpu.MIGEnabled != test.want {
				t.Errorf("MIG mode on: %t, want %t", h.gpu.MIGEnabled, test.want)
			}
		})
	}
}

// A partition that a process keeps busy stays recorded until it is destroyed.
func TestBusyPartition(t *testing.T) {
	h := newHardware()
	dir := t.TempDir()
	m := process(t, dir, h)
	want := wanted("1g.10gb", 19, 2, 1)
	if _, err := create(t.Context(), m, want, always); err != nil {
		t.Fatal(err)
	}
	h.held[want.Ref.Placement] = true
	if err := m.Destroy(t.Context(), want.Ref, always); err == nil || !m.Made(want.Ref) {
		t.Fatalf("got %v, recorded %v", err, m.Made(want.Ref))
	}
	if _, err := create(t.Context(), m, wanted("1g.10gb", 19, 3, 1), always); err != nil {
		t.Errorf("a busy partition blocks another placement: %v", err)
	}
	delete(h.held, want.Ref.Placement)
	if err := process(t, dir, h).Destroy(t.Context(), want.Ref, always); err != nil || len(h.uuids()) != 1 {
		t.Errorf("%v; left %v", err, h.uuids())
	}
}

// A process that dies at any step, or a driver that fails at any step, leaves only what the next attempt completes or Destroy removes.
func TestFaultAtEveryStep(t *testing.T) {
	for _, dies := range []bool{true, false} {
		for _, finishes := range []bool{true, false} {
			for step := 1; ; step++ {
				h := newHardware()
				dir := t.TempDir()
				theirs := h.put(device.Ref{GPU: gpuUUID, Placement: device.Placement{Start: 6, Size: 1}}, "1g.10gb", 19)
				h.calls = 0
				h.step = func(string) error {
					if h.calls != step {
						return nil
					}
					if dies {
						runtime.Goexit()
					}
					return errors.New("fault")
				}
				m := process(t, dir, h)
				want := wanted("3g.40gb", 9, 0, 4)
				alone(func() {
					if _, err := create(t.Context(), m, want, always); err == nil {
						_ = m.Destroy(t.Context(), want.Ref, always)
					}
				})
				reached := h.calls >= step
				h.step = func(string) error { return nil }
				m = process(t, dir, h)
				if finishes {
					p, err := create(t.Context(), m, want, always)
					if err != nil || p.UUID == "" || !slices.Equal(h.uuids(), []string{theirs.UUID, p.UUID}) {
						t.Fatalf("dies %v at step %d: made %q, %v; there is %q", dies, step, p.UUID, err, h.uuids())
					}
				}
				for _, ref := range m.All() {
					if err := m.Destroy(t.Context(), ref, always); err != nil {
						t.Fatal(err)
					}
				}
				if left := h.uuids(); !slices.Equal(left, []string{theirs.UUID}) || len(m.All()) > 0 {
					t.Fatalf("dies %v at step %d: left %q and records of %v, want only %s", dies, step, left, m.All(), theirs.UUID)
				}
				if !reached {
					break
				}
			}
		}
	}
}

// alone runs do in a goroutine that do may end, as a dying process would.
func alone(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	<-done
}

// A thousand cycles with random faults and deaths.
func TestCycles(t *testing.T) {
	h := newHardware()
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(1, 2))
	theirs := h.put(device.Ref{GPU: gpuUUID, Placement: device.Placement{Start: 6, Size: 1}}, "1g.10gb", 19)
	wants := []device.Partition{
		wanted("3g.40gb", 9, 0, 4), wanted("1g.10gb", 19, 0, 1), wanted("1g.10gb", 19, 3, 1), wanted("1g.10gb", 19, 4, 1), wanted("1g.10gb", 19, 5, 1),
	}
	m := process(t, dir, h)
	finished := 0
	for range 1000 {
		want := wants[random.IntN(len(wants))]
		for _, ref := range m.All() {
			if ref.Overlaps(want.Ref) && ref != want.Ref {
				// The ledger reserves a placement only after the partition there is gone.
				if err := m.Destroy(t.Context(), ref, always); err != nil {
					t.Fatal(err)
				}
			}
		}
		at, dies := 1+random.IntN(14), random.IntN(2) == 0
		h.calls = 0
		h.step = func(string) error {
			switch {
			case h.calls != at:
				return nil
			case dies:
				runtime.Goexit()
			}
			return errors.New("fault")
		}
		alone(func() {
			if _, err := create(t.Context(), m, want, always); err == nil {
				finished++
				_ = m.Destroy(t.Context(), want.Ref, func() bool { return random.IntN(3) > 0 })
			}
		})
		h.step = func(string) error { return nil }
		if dies {
			m = process(t, dir, h)
		}
		if !slices.Contains(h.uuids(), theirs.UUID) {
			t.Fatal("the unmanaged partition is gone")
		}
	}
	for _, ref := range m.All() {
		if err := m.Destroy(t.Context(), ref, always); err != nil {
			t.Fatal(err)
		}
	}
	if left := h.uuids(); !slices.Equal(left, []string{theirs.UUID}) {
		t.Errorf("left %q, want only %s", left, theirs.UUID)
	}
	if finished == 0 || finished == 1000 {
		t.Errorf("%d of 1000 were made: the faults prove nothing", finished)
	}
}

func TestRecords(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "partitions")
	open := func(boot string) (*Records, []error) {
		t.Helper()
		r := NewRecords(dir, boot)
		problems, err := r.Load()
		if err != nil {
			t.Fatal(err)
		}
		return r, problems
	}
	ref := device.Ref{GPU: "GPU-a/b", Placement: device.Placement{Start: 1, Size: 2}}
	r, _ := open("boot")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	names := (*Records).created
	p := device.Partition{Ref: ref, ProfileID: 14}
	must(r.put(p))
	p.UUID = "MIG-1"
	must(r.put(p))
	again, problems := open("boot")
	if len(problems) > 0 || !names(again, p) || names(again, device.Partition{Ref: ref, ProfileID: 14, UUID: "MIG-2"}) ||
		names(again, device.Partition{Ref: ref, ProfileID: 19, UUID: "MIG-1"}) {
		t.Errorf("read %v, %v", again.All(), problems)
	}
	must(os.RemoveAll(dir))
	must(r.Repair())
	if again, _ := open("boot"); !again.Made(ref) {
		t.Error("what was wiped is not repaired")
	}
	must(os.WriteFile(filepath.Join(dir, fileName(ref)), []byte("{"), 0o600))
	must(os.WriteFile(filepath.Join(dir, "GPU-1"), []byte("{}"), 0o600))
	again, problems = open("boot")
	if len(problems) != 2 || !names(again, p) {
		t.Errorf("an unreadable record counts as made: %v, %v", again.All(), problems)
	}
	must(os.Remove(filepath.Join(dir, fileName(ref))))
	must(again.Repair())
	if again, _ := open("boot"); !names(again, p) {
		t.Error("what cannot be read and is wiped is not repaired")
	}
	must(os.Remove(filepath.Join(dir, fileName(ref))))
	must(r.Repair())
	if again, _ := open("next"); again.Made(ref) {
		t.Error("a record outlived its boot")
	}
	must(r.store.Drop(ref))
	must(r.store.Drop(ref))
}

// A claim that was unprepared before its partition was recorded has released the placement: nothing may be created there.
func TestUnpreparedBeforeCreate(t *testing.T) {
	h := newHardware()
	m := process(t, t.TempDir(), h)
	want := wanted("3g.40gb", 9, 0, 4)
	checked := false
	_, err := create(t.Context(), m, want, func() bool {
		checked = true
		if !m.Made(want.Ref) {
			t.Error("the reservation was checked before the partition was recorded")
		}
		return false
	})
	if err == nil || !checked || len(h.uuids()) > 0 {
		t.Errorf("got %v, there is %v", err, h.uuids())
	}
}

// Tandem's own partition that overlaps is about to be destroyed: the error is worth a retry.
func TestOwnPartitionOverlaps(t *testing.T) {
	h := newHardware()
	m := process(t, t.TempDir(), h)
	if _, err := create(t.Context(), m, wanted("1g.10gb", 19, 1, 1), always); err != nil {
		t.Fatal(err)
	}
	_, err := create(t.Context(), m, wanted("3g.40gb", 9, 0, 4), always)
	if _, unmanaged := errors.AsType[*UnmanagedError](err); err == nil || unmanaged {
		t.Errorf("got %v, want another try", err)
	}
	if _, unmanaged := errors.AsType[*UnmanagedError](m.EnsureWhole(t.Context(), gpuUUID, func() error { return nil })); unmanaged {
		t.Error("Tandem's own partition counts as unmanaged")
	}
}

// A claim may be allocated another profile at the placement of its earlier partition, which is not destroyed yet. It is not given that one,
// whose record stays: without it the partition would be unmanaged, and never destroyed.
func TestAnotherProfileAtThePlacement(t *testing.T) {
	for name, prepare := range map[string]func(h *hardware, dir string, ref device.Ref) error{
		"complete": func(*hardware, string, device.Ref) error { return nil },
		"without a compute instance": func(h *hardware, _ string, _ device.Ref) error {
			h.gpu.Partitions[0].UUID = ""
			return nil
		},
		"with an unreadable record": func(_ *hardware, dir string, ref device.Ref) error {
			return os.WriteFile(filepath.Join(dir, fileName(ref)), []byte("{"), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, dir := newHardware(), t.TempDir()
			h.gpu.Profiles = append(h.gpu.Profiles, device.Profile{ID: 20, Name: "1g.10gb+me", Placements: h.gpu.Profiles[1].Placements})
			m := process(t, dir, h)
			before, next := wanted("1g.10gb", 19, 2, 1), wanted("1g.10gb+me", 20, 2, 1)
			made, err := create(t.Context(), m, before, always)
			if err != nil {
				t.Fatal(err)
			}
			if err := prepare(h, dir, made.Ref); err != nil {
				t.Fatal(err)
			}
			m = NewMaker(NewRecords(dir, "boot"), h, m.policy)
			if _, err := m.Load(); err != nil {
				t.Fatal(err)
			}
			_, err = create(t.Context(), m, next, always)
			if _, unmanaged := errors.AsType[*UnmanagedError](err); err == nil || unmanaged {
				t.Errorf("got %v, want another try", err)
			}
			if there, _ := h.Partitions(t.Context(), gpuUUID); len(there) != 1 || !m.created(there[0]) {
				t.Fatalf("%v is not Tandem's any more", there)
			}
			if err := m.Destroy(t.Context(), before.Ref, always); err != nil || len(h.uuids()) > 0 || m.Made(before.Ref) {
				t.Fatalf("%v; left %v", err, h.uuids())
			}
			if p, err := create(t.Context(), m, next, always); err != nil || p.ProfileID != 20 {
				t.Errorf("%v, %v", p, err)
			}
		})
	}
}

// A record of which there is no partition, because the process ended before it was created, keeps no other profile from the placement.
func TestAnotherProfileAfterAnIntent(t *testing.T) {
	h := newHardware()
	h.gpu.Profiles = append(h.gpu.Profiles, device.Profile{ID: 20, Name: "1g.10gb+me", Placements: h.gpu.Profiles[1].Placements})
	m := process(t, t.TempDir(), h)
	if _, _, err := m.record(t.Context(), wanted("1g.10gb", 19, 2, 1)); err != nil {
		t.Fatal(err)
	}
	if p, err := create(t.Context(), m, wanted("1g.10gb+me", 20, 2, 1), always); err != nil || !m.created(p) {
		t.Errorf("%v, %v", p, err)
	}
}

// gone is a driver that does not have the GPU any more.
type gone struct{ *hardware }

func (gone) Inventory() device.Inventory { return device.Inventory{} }
func (gone) Partitions(context.Context, string) ([]device.Partition, error) {
	return nil, fmt.Errorf("list the partitions: %w", device.ErrNoGPU)
}

func TestPartitionOfAGPUThatIsGone(t *testing.T) {
	h := newHardware()
	m := process(t, t.TempDir(), h)
	ours := wanted("1g.10gb", 19, 0, 1)
	if _, err := create(t.Context(), m, ours, always); err != nil {
		t.Fatal(err)
	}
	m.hardware = gone{h}
	if err := m.Destroy(t.Context(), ours.Ref, always); err != nil || m.Made(ours.Ref) {
		t.Errorf("the record stays: %v", err)
	}
}

// opened is a GPU that is no longer dynamic, and that a monitor has open: MIG mode cannot be switched off with its last partition, ours, which is
// destroyed. The record ends all the same.
func opened(t *testing.T) (h *hardware, m *Maker, ours device.Partition, idle device.GPU) {
	t.Helper()
	h = newHardware()
	dynamic := true
	m = process(t, t.TempDir(), h)
	m.policy.Dynamic = func(device.GPU) bool { return dynamic }
	ours, err := create(t.Context(), m, wanted("1g.10gb", 19, 0, 1), always)
	if err != nil {
		t.Fatal(err)
	}
	dynamic = false
	h.step = func(name string) error {
		if name == "disable" {
			return errors.New("the GPU is in use")
		}
		return nil
	}
	if err := m.Destroy(t.Context(), ours.Ref, always); err != nil || m.Made(ours.Ref) || len(h.uuids()) > 0 {
		t.Fatalf("destroyed: %v, left %v", err, h.uuids())
	}
	all := m.IdleMIGMode()
	if len(all) != 1 || m.EndIdleMIGMode(t.Context(), all[0], always) == nil {
		t.Fatalf("idle are %v", all)
	}
	h.step = func(string) error { return nil }
	return h, m, ours, all[0]
}

// A partition that an administrator creates afterwards stays, although the driver gives it the same UUID. From then on the GPU is the
// administrator's.
func TestModeOfAStaticGPUThatStays(t *testing.T) {
	h, m, ours, _ := opened(t)
	h.serial--
	if theirs := h.put(ours.Ref, "1g.10gb", 19); theirs.UUID != ours.UUID {
		t.Fatal(theirs.UUID)
	}
	if err := m.Destroy(t.Context(), ours.Ref, always); err != nil || len(h.uuids()) != 1 || len(m.IdleMIGMode()) > 0 {
		t.Errorf("destroyed again: %v, left %v, idle %v", err, h.uuids(), m.IdleMIGMode())
	}
	if err := h.Destroy(t.Context(), ours.Ref); err != nil {
		t.Fatal(err)
	}
	if idle := m.IdleMIGMode(); len(idle) > 0 {
		t.Errorf("the administrator has the GPU, and idle are %v", idle)
	}
}

// Once the monitor closes the GPU, its MIG mode is switched off.
func TestModeOfAStaticGPUEndsLater(t *testing.T) {
	_, m, _, idle := opened(t)
	if err := m.EndIdleMIGMode(t.Context(), idle, always); err != nil || len(m.IdleMIGMode()) > 0 {
		t.Errorf("switched off: %v, idle %v", err, m.IdleMIGMode())
	}
}

// A process that dies at any step of the last Destroy of such a GPU, or a driver that fails there, leaves neither a partition nor a record.
func TestLastDestroyAtEveryStep(t *testing.T) {
	for _, dies := range []bool{true, false} {
		for step := 1; ; step++ {
			h, dir := newHardware(), t.TempDir()
			dynamic := true
			m := process(t, dir, h)
			m.policy.Dynamic = func(device.GPU) bool { return dynamic }
			ours, err := create(t.Context(), m, wanted("1g.10gb", 19, 0, 1), always)
			if err != nil {
				t.Fatal(err)
			}
			dynamic, h.calls = false, 0
			h.step = func(string) error {
				switch {
				case h.calls != step:
					return nil
				case dies:
					runtime.Goexit()
				}
				return errors.New("fault")
			}
			alone(func() { _ = m.Destroy(t.Context(), ours.Ref, always) })
			reached := h.calls >= step
			h.step = func(string) error { return nil }
			if dies {
				m = process(t, dir, h)
				m.policy.Dynamic = func(device.GPU) bool { return false }
			}
			err = m.Destroy(t.Context(), ours.Ref, always)
			for _, gpu := range m.IdleMIGMode() {
				err = errors.Join(err, m.EndIdleMIGMode(t.Context(), gpu, always))
			}
			if err != nil || len(h.uuids()) > 0 || len(m.All()) > 0 || h.gpu.MIGEnabled {
				t.Fatalf("dies %v at step %d: %v; left %q, records of %v, MIG mode on: %t", dies, step, err, h.uuids(), m.All(), h.gpu.MIGEnabled)
			}
			if !reached {
				break
			}
		}
	}
}

// beforeReset still has the inventory from before a reset, which has ended MIG mode (from Hopper on, MIG mode is not persistent).
type beforeReset struct{ *hardware }

func (b beforeReset) Inventory() device.Inventory {
	inv := b.hardware.Inventory()
	inv.GPUs[0].MIGEnabled = true
	return inv
}

func TestCreateAfterAReset(t *testing.T) {
	h := newHardware()
	m := process(t, t.TempDir(), h)
	m.hardware = beforeReset{h}
	if _, err := create(t.Context(), m, wanted("1g.10gb", 19, 0, 1), always); err != nil {
		t.Error(err)
	}
}
