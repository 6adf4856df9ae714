// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// world is what survives a process: the GPUs' settings, the CDI devices, the directories. Every change of it can fail, or be the
// last thing that the process does.
type world struct {
	t   *testing.T
	dir string

	mu     sync.Mutex
	modes  map[string]device.ComputeMode
	slices map[string]int
	cdi    map[string]specs.ContainerEdits
	calls  int
	execs  int
	step   func() error
	// gone is a GPU that the driver does not have.
	gone string

	// pods by the names of daemons, which the controller of the moment has; unfollow ends that.
	pods     map[string]pod
	unfollow func()
}

func newWorld(t *testing.T) *world {
	return &world{
		t: t, dir: t.TempDir(), pods: map[string]pod{}, slices: map[string]int{}, cdi: map[string]specs.ContainerEdits{}, step: func() error { return nil },
		modes: map[string]device.ComputeMode{"GPU-0": device.ComputeModeDefault, "GPU-1": device.ComputeModeDefault},
	}
}

func (w *world) at() error {
	w.calls++
	return w.step()
}

func (w *world) ComputeMode(_ context.Context, gpu string) (device.ComputeMode, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.modes[gpu], w.there(gpu)
}

// there fails for a GPU that the driver does not have.
func (w *world) there(gpu string) error {
	if gpu == w.gone {
		return fmt.Errorf("look up %s: %w", gpu, device.ErrNoGPU)
	}
	return w.at()
}

// remove makes a GPU disappear.
func (w *world) remove(gpu string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = gpu
	delete(w.modes, gpu)
	delete(w.slices, gpu)
}

func (w *world) SetComputeMode(_ context.Context, gpu string, mode device.ComputeMode) (device.ComputeMode, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.there(gpu); err != nil {
		return "", err
	}
	before := w.modes[gpu]
	w.modes[gpu] = mode
	return before, w.at()
}

func (w *world) SetTimeSlice(_ context.Context, gpu string, slice int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.there(gpu); err != nil {
		return err
	}
	w.execs++
	w.slices[gpu] = slice
	return w.at()
}

func (w *world) WriteClientDevice(name string, edits specs.ContainerEdits) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.at(); err != nil {
		return "", err
	}
	w.cdi[name] = edits
	return "cdi=" + name, w.at()
}

func (w *world) RemoveClientDevices(name string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.at(); err != nil {
		return err
	}
	maps.DeleteFunc(w.cdi, func(other string, _ specs.ContainerEdits) bool {
		return other == name || strings.HasPrefix(other, name+".")
	})
	return w.at()
}

func (w *world) ClientDevices(name string) (variants []string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for other := range w.cdi {
		if strings.HasPrefix(other, name+".") {
			variants = append(variants, other)
		}
	}
	return variants, nil
}

func (w *world) RetainClientDevices(names []string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name := range w.cdi {
		if base, _, _ := strings.Cut(name, "."); !slices.Contains(names, base) {
			delete(w.cdi, name)
		}
	}
	return nil
}

// state is everything that is not as it was at first.
func (w *world) state() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var parts []string
	for gpu, mode := range w.modes {
		if mode != device.ComputeModeDefault {
			parts = append(parts, fmt.Sprintf("%s %s", gpu, mode))
		}
	}
	for gpu, slice := range w.slices {
		if slice != 0 {
			parts = append(parts, fmt.Sprintf("%s slice %d", gpu, slice))
		}
	}
	for name := range w.cdi {
		parts = append(parts, "cdi "+name)
	}
	for _, below := range []string{"mps", "sharing"} {
		entries, _ := os.ReadDir(filepath.Join(w.dir, below))
		for _, e := range entries {
			parts = append(parts, below+" "+e.Name())
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// process is a Manager as a process has it after its start.
func (w *world) process() *Manager {
	w.t.Helper()
	r := NewRecords(filepath.Join(w.dir, "sharing"), "boot")
	if problems, err := r.Load(); err != nil || len(problems) > 0 {
		w.t.Fatal(err, problems)
	}
	return NewManager(Options{Records: r, RunDir: w.dir, DriverRoot: "/", Hardware: w, Specs: w})
}

// pod is that of a daemon, for as long as its context. end waits for its supervisor to be gone.
type pod struct {
	hash  string
	lives context.Context
	end   func()
}

// supervise plays the controller and the daemons' pods until ctx is done, the test ends, or stop is called: each daemon that is wanted
// has a pod, one of other settings another, and one that is not wanted none, unless it is doubtful. It has looked once when it
// returns. Where another agent takes the place of this one, the pods stay.
func (w *world) supervise(ctx context.Context, k *Manager) (stop func()) {
	if w.unfollow != nil {
		w.unfollow()
	}
	ctx, cancel := context.WithCancel(ctx)
	following, unfollow := context.WithCancel(ctx)
	var controller, pods sync.WaitGroup
	w.unfollow = func() { unfollow(); controller.Wait() }
	stop = func() { cancel(); controller.Wait(); pods.Wait() }
	w.t.Cleanup(stop)
	look := func() {
		wanted := map[string]bool{}
		for _, name := range k.UnknownDaemons() {
			wanted[name] = true
		}
		for _, d := range k.Daemons() {
			wanted[d.Name] = true
			hash := d.Settings.Hash()
			if before, there := w.pods[d.Name]; there {
				if before.hash == hash && before.lives.Err() == nil {
					continue
				}
				before.end()
			}
			lives, end := context.WithCancel(ctx)
			ended := make(chan struct{})
			w.pods[d.Name] = pod{hash, lives, func() { end(); <-ended }}
			pods.Go(func() { defer close(ended); w.serve(lives, d) })
		}
		for name, unwanted := range w.pods {
			if !wanted[name] {
				unwanted.end()
				delete(w.pods, name)
			}
		}
	}
	changed := k.Changed()
	look()
	controller.Go(func() {
		for {
			select {
			case <-changed:
			case <-following.Done():
				return
			}
			changed = k.Changed()
			look()
		}
	})
	return stop
}

// serve is one supervisor's life, and the next one's.
func (w *world) serve(ctx context.Context, d Daemon) {
	for ctx.Err() == nil {
		h, err := mps.Hold(ctx, mps.Dir(w.dir, d.Name))
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
			continue
		}
		if h.Publish(mps.Ready{Pod: "pod", Hash: d.Settings.Hash()}) == nil {
			_ = h.Await(ctx)
		}
		_ = h.Release()
	}
}

func gpuNamed(uuid string) device.Device {
	var minor int
	_, _ = fmt.Sscanf(uuid, "GPU-%d", &minor)
	return device.Device{GPU: device.GPU{UUID: uuid, Minor: minor, ComputeCapability: "9.0", ProductName: "NVIDIA H100"}}
}

func partitionOf(gpu, uuid string, start int) device.Device {
	d := gpuNamed(gpu)
	d.Partition = device.Partition{UUID: uuid, Ref: device.Ref{GPU: gpu, Placement: device.Placement{Start: start, Size: 1}}, Profile: "1g.10gb", ProfileID: 19}
	return d
}

func sliced(i parametersv1beta1.Interval) parametersv1beta1.Sharing {
	return parametersv1beta1.Sharing{Strategy: parametersv1beta1.TimeSlicing, Interval: i}
}

func withMPS(adapt ...func(*parametersv1beta1.MPS)) parametersv1beta1.Sharing {
	m := &parametersv1beta1.MPS{}
	for _, a := range adapt {
		a(m)
	}
	return parametersv1beta1.Sharing{Strategy: parametersv1beta1.MPSStrategy, MPS: m}
}

func group(uid string, s parametersv1beta1.Sharing, devices ...device.Device) Group {
	return Group{Claim: Claim{UID: uid, Namespace: "team-a", Name: "claim-" + uid}, Devices: devices, Sharing: s}
}

func always() bool { return true }

func never() bool { return false }

// apply calls the Manager as the DRA driver does.
func apply(ctx context.Context, m *Manager, g Group, held func() bool) ([]string, error) {
	return m.Apply(ctx, g, func() error {
		if !held() {
			return errCancelled
		}
		return nil
	})
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (k *Manager) revertAll(t *testing.T) {
	t.Helper()
	for _, key := range k.All() {
		if err := k.Revert(t.Context(), key, always); !errors.Is(err, ErrStillShared) {
			check(t, err)
		}
	}
	if left := k.All(); len(left) > 0 {
		t.Errorf("still applied: %v", left)
	}
}

func TestTimeSlicing(t *testing.T) {
	w := newWorld(t)
	w.modes["GPU-1"] = device.ComputeModeProhibited
	k := w.process()
	g := group("uid-a", sliced(parametersv1beta1.IntervalLong), gpuNamed("GPU-0"), gpuNamed("GPU-1"))
	for range 2 {
		devices, err := apply(t.Context(), k, g, always)
		if err != nil || len(devices) > 0 {
			t.Fatal(devices, err)
		}
	}
	if w.execs != 2 {
		t.Errorf("the driver's tool ran %d times for two GPUs", w.execs)
	}
	if want := "GPU-0 slice 3, GPU-1 slice 3, sharing uid-a~GPU-0, sharing uid-a~GPU-1"; w.state() != want {
		t.Errorf("set %s, want %s", w.state(), want)
	}
	first := Key{"uid-a", device.Ref{GPU: "GPU-0"}}
	check(t, k.Revert(t.Context(), first, never))
	if !k.Applied(first.Owner.Claim(), first.Device) {
		t.Error("undone while it is used")
	}
	// One device needs not the other.
	check(t, k.Revert(t.Context(), first, always))
	if want := "GPU-1 slice 3, sharing uid-a~GPU-1"; w.state() != want {
		t.Errorf("set %s, want %s", w.state(), want)
	}
	k.revertAll(t)
	if want := "GPU-1 Prohibited"; w.state() != want {
		t.Errorf("left %s, want %s", w.state(), want)
	}
	check(t, k.Revert(t.Context(), first, always))

	// Partitions take turns anyway.
	part := group("uid-a", sliced(""), partitionOf("GPU-0", "MIG-1", 0))
	if devices, err := apply(t.Context(), k, part, always); err != nil || len(devices)+len(k.All()) > 0 {
		t.Error(devices, err, k.All())
	}
}

func TestMPS(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	g := group("uid-a", withMPS(), gpuNamed("GPU-1"), gpuNamed("GPU-0"))
	var name string
	for range 2 {
		devices, err := apply(t.Context(), k, g, always)
		check(t, err)
		daemons := k.Daemons()
		if len(daemons) != 1 || !slices.Equal(daemons[0].Settings.Devices, []string{"GPU-0", "GPU-1"}) {
			t.Fatalf("daemons %+v", daemons)
		}
		name = daemons[0].Name
		if !slices.Equal(devices, []string{"cdi=" + name}) {
			t.Errorf("CDI devices %v", devices)
		}
	}
	dir := filepath.Join(w.dir, "mps", name)
	want := specs.ContainerEdits{
		Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		Mounts: []*specs.Mount{
			{HostPath: dir + "/shm", ContainerPath: "/dev/shm", Type: "bind", Options: []string{"rw", "nosuid", "nodev", "bind"}},
			{HostPath: dir + "/pipe", ContainerPath: "/tmp/nvidia-mps", Type: "bind", Options: []string{"rw", "nosuid", "nodev", "bind"}},
		},
	}
	if diff := cmp.Diff(want, w.cdi[name]); diff != "" {
		t.Error(diff)
	}
	all := "GPU-0 ExclusiveProcess, GPU-1 ExclusiveProcess, cdi " + name + ", mps " + name + ", sharing uid-a~GPU-0, sharing uid-a~GPU-1"
	if w.state() != all {
		t.Errorf("set %s, want %s", w.state(), all)
	}

	// The daemon is for both GPUs, and stays until both are left.
	if err := k.Revert(t.Context(), Key{"uid-a", device.Ref{GPU: "GPU-0"}}, always); !errors.Is(err, ErrStillShared) {
		t.Errorf("got %v", err)
	}
	if w.state() != all {
		t.Errorf("set %s, want %s", w.state(), all)
	}
	// Another holder came back.
	_, err := apply(t.Context(), k, g, always)
	check(t, err)
	if err := k.Revert(t.Context(), Key{"uid-a", device.Ref{GPU: "GPU-1"}}, always); !errors.Is(err, ErrStillShared) {
		t.Errorf("got %v", err)
	}
	if w.state() != all {
		t.Errorf("set %s, want %s", w.state(), all)
	}
	k.revertAll(t)
	if w.state() != "" || len(k.Daemons()) > 0 {
		t.Errorf("left %s, daemons %v", w.state(), k.Daemons())
	}
}

// The daemon of a partition that was made for the claim is named after its place: after a reboot it has another UUID, and kubelet
// asks for the CDI device of before as well.
func TestMPSOfPartition(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	boot := w.supervise(t.Context(), k)
	before, err := apply(t.Context(), k, group("uid-a", withMPS(), partitionOf("GPU-0", "MIG-1", 2)), always)
	check(t, err)
	if got := k.Daemons()[0].Settings.Devices; !slices.Equal(got, []string{"MIG-1"}) || w.modes["GPU-0"] != device.ComputeModeDefault {
		t.Errorf("the daemon has %v, the GPU is in mode %s", got, w.modes["GPU-0"])
	}
	boot()
	check(t, os.RemoveAll(w.dir))
	check(t, os.MkdirAll(w.dir, 0o755))
	next := w.process()
	w.supervise(t.Context(), next)
	after, err := apply(t.Context(), next, group("uid-a", withMPS(), partitionOf("GPU-0", "MIG-2", 2)), always)
	if err != nil || !slices.Equal(before, after) {
		t.Errorf("%v, before %v, after %v", err, before, after)
	}
}

// Two entries of a claim's parameters are two daemons.
func TestTwoGroups(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	one, err := apply(t.Context(), k, group("uid-a", withMPS(), gpuNamed("GPU-0")), always)
	check(t, err)
	two, err := apply(t.Context(), k, group("uid-a", withMPS(), gpuNamed("GPU-1")), always)
	if err != nil || one[0] == two[0] || len(k.Daemons()) != 2 {
		t.Errorf("%v, %v, %v, %v", err, one, two, k.Daemons())
	}
	check(t, k.Revert(t.Context(), Key{"uid-a", device.Ref{GPU: "GPU-0"}}, always))
	if len(k.Daemons()) != 1 || w.modes["GPU-0"] != device.ComputeModeDefault || w.modes["GPU-1"] != device.ComputeModeExclusiveProcess {
		t.Errorf("left %s", w.state())
	}
}

// A claim that was allocated anew, or of which the class has changed, is shared as it is said now.
func TestSharedOtherwise(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	both := []device.Device{gpuNamed("GPU-0"), gpuNamed("GPU-1")}
	percentage := 50
	first, err := apply(t.Context(), k, group("uid-a", withMPS(), both...), always)
	check(t, err)
	second, err := apply(t.Context(), k, group("uid-a", withMPS(func(m *parametersv1beta1.MPS) { m.ActiveThreadPercentage = &percentage }), gpuNamed("GPU-0")), always)
	check(t, err)
	if daemons := k.Daemons(); len(daemons) != 1 || "cdi="+daemons[0].Name != second[0] || first[0] == second[0] || w.modes["GPU-1"] != device.ComputeModeDefault {
		t.Errorf("daemons %v, state %s", daemons, w.state())
	}
	_, err = apply(t.Context(), k, group("uid-a", sliced(parametersv1beta1.IntervalShort), both...), always)
	check(t, err)
	if want := "GPU-0 slice 1, GPU-1 slice 1, sharing uid-a~GPU-0, sharing uid-a~GPU-1"; w.state() != want {
		t.Errorf("set %s, want %s", w.state(), want)
	}
	_, err = apply(t.Context(), k, group("uid-a", parametersv1beta1.Sharing{}, both...), always)
	if err != nil || w.state() != "" {
		t.Errorf("%v, left %s", err, w.state())
	}
}

// What another claim has is not touched, and waited for.
func TestAnotherClaimsSetting(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	_, err := apply(t.Context(), k, group("uid-a", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-0")), always)
	check(t, err)
	next := group("uid-b", sliced(parametersv1beta1.IntervalLong), gpuNamed("GPU-0"))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = apply(ctx, k, next, always)
	if err == nil || !strings.Contains(err.Error(), "wait until the settings of claim team-a/claim-uid-a on GPU-0 are reverted") || w.slices["GPU-0"] != 1 {
		t.Errorf("%v, %s", err, w.state())
	}
	done := make(chan error, 1)
	go func() { _, err := apply(t.Context(), k, next, always); done <- err }()
	check(t, k.Revert(t.Context(), Key{"uid-a", device.Ref{GPU: "GPU-0"}}, always))
	if err := <-done; err != nil || w.slices["GPU-0"] != 3 {
		t.Errorf("%v, %s", err, w.state())
	}
}

// A claim that is unprepared before its setting is recorded has let go of the GPU: nothing may be set on it.
func TestUnpreparedBeforeApply(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	g := group("uid-a", withMPS(), gpuNamed("GPU-0"))
	_, err := apply(t.Context(), k, g, func() bool {
		if !k.Applied("uid-a", device.Ref{GPU: "GPU-0"}) {
			t.Error("the reservation was checked before the settings were recorded")
		}
		return false
	})
	if !errors.Is(err, errCancelled) || w.modes["GPU-0"] != device.ComputeModeDefault || len(k.Daemons()) > 0 {
		t.Errorf("%v, %s", err, w.state())
	}
	k.revertAll(t)
	if w.state() != "" {
		t.Errorf("left %s", w.state())
	}
}

// A daemon that does not start delays no other claim, and the next attempt finds it when it has started.
func TestSlowDaemon(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	g := group("uid-a", withMPS(), gpuNamed("GPU-0"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := apply(ctx, k, g, always)
	late, ok := errors.AsType[*NotReadyError](err)
	if !ok || late.Daemon != k.Daemons()[0].Name || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "has not been started") {
		t.Fatalf("got %v", err)
	}
	if w.modes["GPU-0"] != device.ComputeModeExclusiveProcess {
		t.Error("what was begun was given up")
	}

	// A caller waits for it while other calls come and go, also for the same claim.
	waiting := make(chan error, 1)
	go func() { _, err := apply(t.Context(), k, g, always); waiting <- err }()
	other := group("uid-b", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-1"))
	_, err = apply(t.Context(), k, other, always)
	check(t, err)
	check(t, k.Revert(t.Context(), Key{"uid-b", device.Ref{GPU: "GPU-1"}}, always))

	// A supervisor that has not got its daemon up.
	h, err := mps.Hold(t.Context(), mps.Dir(w.dir, late.Daemon))
	check(t, err)
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := apply(soon, k, g, always); !strings.Contains(fmt.Sprint(err), "has started and is not ready (its log is "+w.dir) {
		t.Errorf("got %v", err)
	}
	check(t, h.Publish(mps.Ready{Hash: "another"}))
	soon, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := apply(soon, k, g, always); !strings.Contains(fmt.Sprint(err), "has other settings than were requested") {
		t.Errorf("got %v", err)
	}
	check(t, h.Retract())
	check(t, h.Publish(mps.Ready{Hash: k.Daemons()[0].Settings.Hash()}))
	check(t, <-waiting)
	check(t, h.Release())

	// It was killed: a caller waits for the next one, unless the claim ends.
	begun := make(chan struct{})
	go func() {
		_, err := apply(t.Context(), k, g, func() bool { close(begun); return true })
		waiting <- err
	}()
	<-begun
	check(t, k.Revert(t.Context(), Key{"uid-a", device.Ref{GPU: "GPU-0"}}, always))
	if err := <-waiting; !errors.Is(err, errCancelled) || w.state() != "" {
		t.Errorf("%v, left %s", err, w.state())
	}
}

// A daemon that does not end keeps its GPU.
func TestDaemonThatDoesNotEnd(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	g := group("uid-a", withMPS(), gpuNamed("GPU-0"))
	done := make(chan error, 1)
	go func() { _, err := apply(t.Context(), k, g, always); done <- err }()
	var daemons []Daemon
	for daemons = k.Daemons(); len(daemons) == 0; daemons = k.Daemons() {
		runtime.Gosched()
	}
	h, err := mps.Hold(t.Context(), mps.Dir(w.dir, daemons[0].Name))
	check(t, err)
	check(t, h.Publish(mps.Ready{Hash: daemons[0].Settings.Hash()}))
	check(t, <-done)
	key := Key{"uid-a", device.Ref{GPU: "GPU-0"}}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := k.Revert(ctx, key, always); err == nil || !k.Applied(key.Owner.Claim(), key.Device) || w.modes["GPU-0"] != device.ComputeModeExclusiveProcess {
		t.Errorf("%v, %s", err, w.state())
	}
	if len(k.Daemons()) > 0 {
		t.Error("a daemon that is to end is still asked for")
	}
	// Neither does the next process ask for it, nor take it for one that clients can have.
	next := w.process()
	if len(next.Daemons()) > 0 {
		t.Error("a daemon that is to end is asked for again")
	}
	again, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := apply(again, next, g, always); err == nil {
		t.Error("a daemon that ends was given to clients")
	}
	check(t, h.Release())
	w.supervise(t.Context(), next)
	_, err = apply(t.Context(), next, g, always)
	check(t, err)
	next.revertAll(t)
	if w.state() != "" {
		t.Errorf("left %s", w.state())
	}
}

// A process that dies at any step, or a driver or disk that fails at any, leaves what the next attempt finishes, or Undo undoes,
// and nothing else.
func TestFaultAtEveryStep(t *testing.T) {
	groups := map[string]Group{
		"MPS":          group("uid-a", withMPS(), gpuNamed("GPU-0"), gpuNamed("GPU-1")),
		"time-slicing": group("uid-a", sliced(parametersv1beta1.IntervalLong), gpuNamed("GPU-0"), gpuNamed("GPU-1")),
	}
	for name, g := range groups {
		for _, dies := range []bool{true, false} {
			for _, finishes := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s, dies %t, finishes %t", name, dies, finishes), func(t *testing.T) {
					for step := 1; ; step++ {
						if !faultAt(t, g, step, dies, finishes) {
							break
						}
					}
				})
			}
		}
	}
}

// faultAt reports whether there is such a step.
func faultAt(t *testing.T, g Group, step int, dies, finishes bool) bool {
	w := newWorld(t)
	w.modes["GPU-1"] = device.ComputeModeProhibited
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w.step = func() error {
		if w.calls != step {
			return nil
		}
		if dies {
			runtime.Goexit()
		}
		return errors.New("fault")
	}
	k := w.process()
	w.supervise(ctx, k)
	alone(func() {
		if _, err := apply(ctx, k, g, always); err != nil {
			return
		}
		for _, key := range k.All() {
			_ = k.Revert(ctx, key, always)
		}
	})
	w.mu.Lock()
	reached := w.calls >= step
	w.step = func() error { return nil }
	w.mu.Unlock()
	k = w.process()
	w.supervise(ctx, k)
	if finishes {
		if _, err := apply(ctx, k, g, always); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		if mode := w.modes["GPU-1"]; mode == device.ComputeModeProhibited || len(k.All()) != 2 {
			t.Fatalf("step %d: applied %v, GPU 1 is in mode %s", step, k.All(), mode)
		}
	}
	k.revertAll(t)
	if got := w.state(); got != "GPU-1 Prohibited" || len(k.Daemons()) > 0 {
		t.Fatalf("step %d: left %s, daemons %v", step, got, k.Daemons())
	}
	return reached
}

// alone runs what may end its goroutine, as a process that dies does.
func alone(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	<-done
}

// Hundreds of lives with random faults and deaths.
func TestCycles(t *testing.T) {
	w := newWorld(t)
	random := rand.New(rand.NewPCG(1, 2))
	both := []device.Device{gpuNamed("GPU-0"), gpuNamed("GPU-1")}
	groups := []Group{
		group("uid-a", withMPS(), both...), group("uid-a", withMPS(), both[0]), group("uid-a", sliced(parametersv1beta1.IntervalLong), both...),
		group("uid-a", sliced(parametersv1beta1.IntervalDefault), both[1]), group("uid-a", withMPS(), partitionOf("GPU-0", "MIG-1", 0)),
	}
	finished := 0
	for range 300 {
		ctx, cancel := context.WithCancel(t.Context())
		g := groups[random.IntN(len(groups))]
		at, dies := 1+random.IntN(16), random.IntN(2) == 0
		w.mu.Lock()
		w.calls = 0
		w.step = func() error {
			switch {
			case w.calls != at:
				return nil
			case dies:
				runtime.Goexit()
			}
			return errors.New("fault")
		}
		w.mu.Unlock()
		k := w.process()
		w.supervise(ctx, k)
		alone(func() {
			if _, err := apply(ctx, k, g, always); err != nil {
				return
			}
			finished++
			for _, key := range k.All() {
				_ = k.Revert(ctx, key, func() bool { return random.IntN(3) > 0 })
			}
		})
		cancel()
	}
	w.mu.Lock()
	w.step = func() error { return nil }
	w.mu.Unlock()
	k := w.process()
	k.revertAll(t)
	if w.state() != "" {
		t.Errorf("left %s", w.state())
	}
	if finished == 0 || finished == 300 {
		t.Errorf("%d of 300 were applied: the faults prove nothing", finished)
	}
}

// TestGenerations: a daemon has another generation than the next one of its name, in every call.
func TestGenerations(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	g := group("uid-a", withMPS(), gpuNamed("GPU-0"), gpuNamed("GPU-1"))
	generation := func() int64 {
		t.Helper()
		_, err := apply(t.Context(), k, g, always)
		check(t, err)
		daemons := k.Daemons()
		if len(daemons) != 1 {
			t.Fatalf("daemons %+v", daemons)
		}
		return daemons[0].Settings.Generation
	}
	first := generation()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if _, err := apply(t.Context(), k, g, always); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	k = w.process()
	if found := k.Daemons(); len(found) != 1 || found[0].Settings.Generation != first {
		t.Errorf("the next process finds %+v, not generation %d", found, first)
	}
	w.supervise(t.Context(), k)
	if again := generation(); again != first || first <= 0 {
		t.Errorf("generation %d was %d", again, first)
	}
	k.revertAll(t)
	if next := generation(); next == first {
		t.Errorf("generation %d once more", next)
	}
}

// The next process adopts the applied settings, also those that the driver or another process has reset, and removes stale ones.
func TestTakenUpAgain(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	_, err := apply(t.Context(), k, group("uid-a", withMPS(), gpuNamed("GPU-0")), always)
	check(t, err)
	_, err = apply(t.Context(), k, group("uid-b", sliced(parametersv1beta1.IntervalMedium), gpuNamed("GPU-1")), always)
	check(t, err)
	want, name := w.state(), k.Daemons()[0].Name
	for os.RemoveAll(filepath.Join(w.dir, "mps")) != nil { // its supervisor makes the lock anew
		runtime.Gosched()
	}
	w.mu.Lock()
	w.modes["GPU-0"], w.slices["GPU-1"] = device.ComputeModeDefault, 0
	clear(w.cdi)
	w.cdi["uid-c-01234567"] = specs.ContainerEdits{}
	w.mu.Unlock()
	check(t, mps.Make(mps.Dir(w.dir, "uid-c-01234567")))

	next := w.process()
	if daemons := next.Daemons(); len(daemons) != 1 || daemons[0].Name != name {
		t.Errorf("daemons %v", daemons)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- next.Run(ctx) }()
	check(t, next.Repair())
	for w.state() != want {
		if t.Context().Err() != nil {
			t.Fatalf("there is %s, want %s", w.state(), want)
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	check(t, <-done)

	// Records that are wiped under it are written anew.
	check(t, os.RemoveAll(filepath.Join(w.dir, "sharing")))
	check(t, next.Repair())
	if w.state() != want {
		t.Errorf("there is %s, want %s", w.state(), want)
	}
	next.revertAll(t)
	if w.state() != "" {
		t.Errorf("left %s", w.state())
	}
}

// Every pod of a claim after the first has it applied once more, which is no news.
func TestAppliedAgain(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	for _, g := range []Group{
		group("uid-a", withMPS(), gpuNamed("GPU-0")), group("uid-b", sliced(parametersv1beta1.IntervalMedium), gpuNamed("GPU-1")),
	} {
		changed := k.Changed()
		_, err := apply(t.Context(), k, g, always)
		check(t, err)
		select {
		case <-changed:
		default:
			t.Errorf("no event about %s", g.Claim.UID)
		}
		changed = k.Changed()
		_, err = apply(t.Context(), k, g, always)
		check(t, err)
		select {
		case <-changed:
			t.Errorf("another event about %s", g.Claim.UID)
		default:
		}
	}
	k.revertAll(t)
}

// A directory for a daemon of no claim is removed while the process runs, and no supervisor starts a daemon there.
func TestStrayDirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		k := w.process()
		done := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { done <- k.Run(ctx) }()
		synctest.Wait()
		dir := mps.Dir(w.dir, "uid-a-01234567")
		check(t, os.MkdirAll(filepath.Join(dir, mps.PipeDir), 0o755))
		short, stop := context.WithTimeout(t.Context(), resumeInterval/2)
		defer stop()
		if _, err := mps.Hold(short, dir); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a supervisor holds a directory that the agent has not made: %v", err)
		}
		time.Sleep(2 * resumeInterval)
		synctest.Wait()
		if w.state() != "" {
			t.Errorf("left %s", w.state())
		}
		cancel()
		check(t, <-done)
	})
}

// A directory that cannot be removed keeps no GPU from its next holder, and goes when it can.
func TestDirectoryThatCannotBeRemoved(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	stuck := errors.New("stuck")
	removeDir = func(string) error { return stuck }
	defer func() { removeDir = mps.Remove }()
	_, err := apply(t.Context(), k, group("uid-a", withMPS(), gpuNamed("GPU-0")), always)
	check(t, err)
	name := k.Daemons()[0].Name
	k.revertAll(t)
	if want := "mps " + name; w.state() != want {
		t.Errorf("left %s, want %s", w.state(), want)
	}
	if err := k.endStaleDaemons(t.Context()); !errors.Is(err, stuck) {
		t.Errorf("no event about it: %v", err)
	}
	// The same claim may come again.
	_, err = apply(t.Context(), k, group("uid-a", withMPS(), gpuNamed("GPU-0")), always)
	check(t, err)
	k.revertAll(t)
	removeDir = mps.Remove
	check(t, k.endStaleDaemons(t.Context()))
	if w.state() != "" {
		t.Errorf("left %s", w.state())
	}
}

// away is a driver that sets nothing.
type away struct{ *world }

func (away) SetComputeMode(context.Context, string, device.ComputeMode) (device.ComputeMode, error) {
	return "", errors.New("the driver is away")
}

// A directory that containerd makes anew where a daemon was, with its pod still there, goes also while what was recorded before
// cannot be set.
func TestStrayDirectoryWhileTheDriverIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		_, err := apply(t.Context(), w.process(), group("uid-b", sliced(parametersv1beta1.IntervalShort), gpuNamed("GPU-1")), always)
		check(t, err)
		k := w.process()
		k.Hardware = away{w}
		done := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { done <- k.Run(ctx) }()
		synctest.Wait()
		dir := mps.Dir(w.dir, "uid-a-01234567")
		check(t, mps.Make(dir))
		check(t, mps.Stop(t.Context(), dir))
		check(t, mps.Remove(dir))
		check(t, os.MkdirAll(filepath.Join(dir, mps.PipeDir), 0o755))
		time.Sleep(2 * resumeInterval)
		synctest.Wait()
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("it is still there: %v", err)
		}
		cancel()
		check(t, <-done)
	})
}

// A record that this version cannot read says that its claim is in use: its daemon runs on, and its clients' CDI device stays,
// until the claim is undone.
func TestUnreadableRecordOfARunningClaim(t *testing.T) {
	for name, change := range map[string]func([]byte) []byte{
		"torn":  func(text []byte) []byte { return text[:len(text)/2] },
		"empty": func([]byte) []byte { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			k := w.process()
			w.supervise(t.Context(), k)
			_, err := apply(t.Context(), k, group("uid-a", withMPS(), gpuNamed("GPU-0")), always)
			check(t, err)
			daemon, before := k.Daemons()[0].Name, w.state()
			path := filepath.Join(w.dir, "sharing", "uid-a~GPU-0")
			text, err := os.ReadFile(path)
			check(t, err)
			check(t, os.WriteFile(path, change(text), 0o600))
			// A stale directory beside it.
			check(t, mps.Make(mps.Dir(w.dir, "uid-b-01234567")))
			r := NewRecords(filepath.Join(w.dir, "sharing"), "boot")
			if problems, err := r.Load(); err != nil || len(problems) != 1 {
				t.Fatal(problems, err)
			}
			next := NewManager(Options{Records: r, RunDir: w.dir, DriverRoot: "/", Hardware: w, Specs: w})
			check(t, next.resume(t.Context(), r.Keys()))
			w.supervise(t.Context(), next)
			if _, alive, err := mps.Alive(mps.Dir(w.dir, daemon)); err != nil || !alive || w.state() != before {
				t.Errorf("alive %t, %v; there is %s, want %s", alive, err, w.state(), before)
			}
			next.revertAll(t)
			if unknownDaemons := next.UnknownDaemons(); w.state() != "" || len(unknownDaemons) > 0 {
				t.Errorf("left %s, doubtful %v", w.state(), unknownDaemons)
			}
		})
	}
}

// A record that cannot be read says still what is ours, and everything that could have been set is undone.
func TestUnreadableRecord(t *testing.T) {
	w := newWorld(t)
	k := w.process()
	w.supervise(t.Context(), k)
	_, err := apply(t.Context(), k, group("uid-a", withMPS(), gpuNamed("GPU-0"), gpuNamed("GPU-1")), always)
	check(t, err)
	dir := filepath.Join(w.dir, "sharing")
	for _, name := range []string{"uid-a~GPU-0", "uid-a~GPU-1"} {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte("{"), 0o600))
	}
	check(t, os.WriteFile(filepath.Join(dir, "nonsense"), nil, 0o600))
	r := NewRecords(dir, "boot")
	problems, err := r.Load()
	if err != nil || len(problems) != 3 {
		t.Fatal(err, problems)
	}
	next := NewManager(Options{Records: r, RunDir: w.dir, DriverRoot: "/", Hardware: w, Specs: w})
	next.revertAll(t)
	if w.state() != "sharing nonsense" {
		t.Errorf("left %s", w.state())
	}
	later := NewRecords(dir, "next boot")
	if _, err := later.Load(); err != nil || len(later.Keys()) > 0 {
		t.Errorf("a record outlived its boot: %v, %v", later.Keys(), err)
	}
}

// Nothing is restored on a GPU that is gone: its claim's settings end with the claim. The next process applies them again if the GPU comes
// back before that.
func TestGPUOfAClaimIsGone(t *testing.T) {
	for name, settings := range map[string]parametersv1beta1.Sharing{"MPS": withMPS(), "time slice": sliced(parametersv1beta1.IntervalLong)} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			k := w.process()
			stop := w.supervise(t.Context(), k)
			_, err := apply(t.Context(), k, group("uid-a", settings, gpuNamed("GPU-0")), always)
			check(t, err)
			w.remove("GPU-0")
			k = w.process()
			if err := k.resume(t.Context(), k.All()); !errors.Is(err, device.ErrNoGPU) {
				t.Errorf("resumed without the GPU: %v", err)
			}
			w.supervise(t.Context(), k)
			k.revertAll(t)
			check(t, k.resume(t.Context(), k.All()))
			stop()
			if got := w.state(); got != "" {
				t.Errorf("left: %s", got)
			}
		})
	}
}
