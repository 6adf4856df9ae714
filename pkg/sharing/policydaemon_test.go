// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	specs "tags.cncf.io/container-device-interface/specs-go"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// town is a node of one GPU with 16 GiB, whose policy may change, and whose agents come and go.
type town struct {
	*world
	book    *book
	manager *Manager
	policy  *Policy

	mu      sync.Mutex
	gpu     device.GPU
	removed bool
	changed chan struct{}
}

const townMemory = 16 << 30

func newTown(t *testing.T, s device.Sharing) *town {
	w := &town{world: newWorld(t), book: &book{}, changed: make(chan struct{}), gpu: gpuNamed("GPU-0").GPU}
	w.gpu.MemoryBytes = townMemory
	w.gpu.Sharing = s
	return w
}

func (w *town) Inventory() device.Inventory {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.removed {
		return device.Inventory{GPUs: []device.GPU{gpuNamed("GPU-1").GPU}}
	}
	return device.Inventory{GPUs: []device.GPU{w.gpu}}
}

func (w *town) Changed() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

func (w *town) shared(s device.Sharing) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gpu.Sharing = s
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *town) device() device.Device { return device.Device{GPU: w.Inventory().GPUs[0]} }

// agent is a new process, until the returned function is called or the test ends.
func (w *town) agent() (stop func()) {
	w.manager = w.process()
	w.policy = NewPolicy(w.manager, w, w.book, w.book)
	ctx, cancel := context.WithCancel(w.t.Context())
	var all sync.WaitGroup
	for _, run := range []func(context.Context) error{w.manager.Run, w.policy.Run} {
		all.Go(func() {
			if err := run(ctx); err != nil {
				w.t.Error(err)
			}
		})
	}
	w.supervise(w.t.Context(), w.manager) // daemons outlive the agent
	stop = sync.OnceFunc(func() { cancel(); all.Wait() })
	w.t.Cleanup(stop)
	return stop
}

func (w *town) described(name string) (specs.ContainerEdits, bool) {
	w.world.mu.Lock()
	defer w.world.mu.Unlock()
	edits, there := w.cdi[name]
	return edits, there
}

func (w *town) mode() device.ComputeMode {
	w.world.mu.Lock()
	defer w.world.mu.Unlock()
	return w.modes["GPU-0"]
}

// look has a policy of its own look once, beside the agent's.
func (w *town) look() error { return settleAll(w.t, NewPolicy(w.manager, w, w.book, w.book)) }

// eventually waits until the condition is true.
func (w *town) eventually(what string, done func() bool) {
	w.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: not within 20 s; the node is %s", what, w.state())
		}
		time.Sleep(time.Millisecond)
	}
}

func (w *town) awaitClient(share device.Share) Client {
	w.t.Helper()
	var c *Client
	w.eventually("a daemon that is ready", func() bool {
		var err error
		c, err = w.policy.Client(w.device(), share)
		return err == nil && c != nil
	})
	return *c
}

func (w *town) awaitState(want string) {
	w.t.Helper()
	w.eventually("the state "+want, func() bool { return w.state() == want })
}

func byMPS(replicas int, memoryShares bool) device.Sharing {
	s := device.Sharing{Strategy: device.MPS}
	if memoryShares {
		s.Claims = device.ByMemory
	}
	if replicas > 0 {
		s.Replicas = map[string]device.Replicas{"": {Count: replicas}}
	}
	return s
}

func shareOf(gib uint64) device.Share { return device.Share{Bytes: gib << 30, Of: townMemory} }

func holdOf(kind ledger.Kind, id string, share device.Share, state ledger.State) ledger.Hold {
	return ledger.Hold{Holder: ledger.Holder{Kind: kind, ID: id}, Device: device.Ref{GPU: "GPU-0"}, Share: share, State: state}
}

// The daemon limits clients if all have the same share; otherwise each client gets its own limit.
func TestPolicyClients(t *testing.T) {
	for name, test := range map[string]struct {
		policy   device.Sharing
		share    device.Share
		unknown  bool // the GPU's memory
		settings mps.Settings
		env      map[string]string
	}{
		"replicas": {
			policy: byMPS(4, false), share: shareOf(4),
			settings: mps.Settings{Devices: []string{"GPU-0"}, MultiUser: true, DriverRoot: "/", ActiveThreadPercentage: new(int32(25)), PinnedMemoryMiB: []int64{4096}},
		},
		"memory shares and replicas": {
			policy: byMPS(2, true), share: shareOf(8),
			settings: mps.Settings{Devices: []string{"GPU-0"}, MultiUser: true, DriverRoot: "/"},
			env:      map[string]string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"},
		},
		"replicas of unknown memory": {
			policy: byMPS(4, false), share: device.Replica(0, 4), unknown: true,
			settings: mps.Settings{Devices: []string{"GPU-0"}, MultiUser: true, DriverRoot: "/", ActiveThreadPercentage: new(int32(25))},
		},
		"memory shares and replicas of unknown memory": {
			policy: byMPS(2, true), share: device.Replica(0, 2), unknown: true,
			settings: mps.Settings{Devices: []string{"GPU-0"}, MultiUser: true, DriverRoot: "/"},
			env:      map[string]string{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTown(t, test.policy)
			if test.unknown {
				w.gpu.MemoryBytes = 0
			}
			w.agent()
			c := w.awaitClient(test.share)
			daemons := w.manager.Daemons()
			if len(daemons) != 1 {
				t.Fatalf("daemons %+v", daemons)
			}
			if diff := cmp.Diff(test.settings, daemons[0].Settings, cmpopts.IgnoreFields(mps.Settings{}, "Generation")); diff != "" {
				t.Error(diff)
			}
			dir := mps.Dir(w.dir, daemons[0].Name)
			want := Client{Env: map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}, Mounts: map[string]string{"/tmp/nvidia-mps": dir + "/pipe", "/dev/shm": dir + "/shm"}}
			for variable, value := range test.env {
				want.Env[variable] = value
			}
			if diff := cmp.Diff(want, c); diff != "" {
				t.Error(diff)
			}
			if mode := w.mode(); mode != device.ComputeModeExclusiveProcess {
				t.Errorf("compute mode %s", mode)
			}
			w.shared(device.Sharing{})
			w.awaitState("")
			w.eventually("a GPU that is not shared", func() bool {
				c, err := w.policy.Client(w.device(), device.Share{})
				return c == nil && err == nil
			})
		})
	}
}

// A claim with several shares may have all of the memory. One that was allocated a share without memory, under another policy, would have no
// limit and is refused.
func TestPolicyJoinWithoutMemory(t *testing.T) {
	w := newTown(t, byMPS(0, true))
	w.agent()
	for name, c := range map[string]struct {
		share device.Share
		want  error
	}{"all": {device.Share{}, nil}, "none": {shareOf(0), errNoMemory}} {
		w.book.set(holdOf(ledger.KindClaim, "uid-a", c.share, ledger.StateHeld))
		if _, err := w.policy.Join(t.Context(), Claim{"uid-a", "team-a", "a"}, w.device(), c.share); !errors.Is(err, c.want) {
			t.Errorf("a share of %s of the memory: %v, want %v", name, err, c.want)
		}
	}
}

// A claim that has a part of a GPU is a client from the first daemon on, and finds what it needs again after the agent was started
// anew.
func TestPolicyJoin(t *testing.T) {
	w := newTown(t, byMPS(0, true))
	stop := w.agent()
	w.book.set(holdOf(ledger.KindClaim, "uid-a", shareOf(10), ledger.StateHeld))
	join := func() string {
		t.Helper()
		devices, err := w.policy.Join(t.Context(), Claim{"uid-a", "team-a", "a"}, w.device(), shareOf(10))
		check(t, err)
		if len(devices) != 1 {
			t.Fatalf("CDI devices %v", devices)
		}
		return strings.TrimPrefix(devices[0], "cdi=")
	}
	name := join()
	daemon := w.manager.Daemons()[0].Name
	if name != daemon+".10240m" {
		t.Errorf("CDI device %s of daemon %s", name, daemon)
	}
	dir := mps.Dir(w.dir, daemon)
	options := []string{"rw", "nosuid", "nodev", "bind"}
	want := specs.ContainerEdits{
		Env: []string{"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M", "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"},
		Mounts: []*specs.Mount{
			{HostPath: dir + "/shm", ContainerPath: "/dev/shm", Type: "bind", Options: options},
			{HostPath: dir + "/pipe", ContainerPath: "/tmp/nvidia-mps", Type: "bind", Options: options},
		},
	}
	if edits, _ := w.described(name); cmp.Diff(want, edits) != "" {
		t.Error(cmp.Diff(want, edits))
	}
	stop()
	delete(w.cdi, name) // by another process, while no agent ran
	w.agent()
	w.eventually("the CDI device of before", func() bool { _, there := w.described(name); return there })
	if again := join(); again != name {
		t.Errorf("CDI device %s, and %s after a restart", name, again)
	}
	w.book.set(holdOf(ledger.KindClaim, "uid-b", shareOf(2), ledger.StateHeld))
	w.eventually("unneeded client devices to go", func() bool {
		_, there := w.described(name)
		_, other := w.described(daemon + ".2048m")
		return !there && other
	})
	w.shared(device.Sharing{})
	w.eventually("new clients to be kept away", func() bool {
		_, err := w.policy.Client(w.device(), device.Share{})
		return err != nil && strings.Contains(err.Error(), "changes after its last holder has ended")
	})
	if held, err := mps.Held(dir); err != nil || !held {
		t.Fatalf("the daemon of a client has ended: %v", err)
	}
	w.book.set()
	w.awaitState("")
}

// A daemon starts when no holder uses the GPU without it. Waiting holders, and those restored from before a reboot, do not count.
func TestPolicyBeginsAlone(t *testing.T) {
	w := newTown(t, byMPS(2, true))
	w.book.set(holdOf(ledger.KindPod, "GPU-0::0", shareOf(8), ledger.StateDraining))
	w.agent()
	joined := make(chan error, 1)
	go func() {
		_, err := w.policy.Join(t.Context(), Claim{"uid-a", "team-a", "a"}, w.device(), shareOf(4))
		joined <- err
	}()
	w.eventually("a waiting holder", func() bool {
		w.policy.mu.Lock()
		defer w.policy.mu.Unlock()
		return len(w.policy.joining) == 1
	})
	waits := holdOf(ledger.KindClaim, "uid-a", shareOf(4), ledger.StateHeld)
	w.book.set(holdOf(ledger.KindPod, "GPU-0::0", shareOf(8), ledger.StateHeld), waits)
	if err := w.look(); !errors.Is(err, errInUse) || !strings.Contains(err.Error(), "GPU-0::0") {
		t.Errorf("got %v", err)
	}
	if w.state() != "" {
		t.Errorf("set while the GPU is in use: %s", w.state())
	}
	select {
	case err := <-joined:
		t.Fatalf("joined what is not there: %v", err)
	default:
	}
	w.book.set(holdOf(ledger.KindPod, "GPU-0::1", shareOf(8), ledger.StateRestored), waits)
	check(t, <-joined)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w.shared(byMPS(4, true))
	w.shared(device.Sharing{})
	w.book.set(waits)
	if _, err := w.policy.Join(ctx, Claim{"uid-b", "team-a", "b"}, w.device(), shareOf(4)); err == nil || !strings.Contains(err.Error(), "claim team-a/b") {
		t.Errorf("joined what is about to end: %v", err)
	}
	w.book.set()
	w.awaitState("")
}

// A caller that asks for client settings just after the GPU was found unused does not get those of a daemon that is about to end.
func TestPolicyEndsAlone(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.agent()
	w.awaitClient(shareOf(4))
	planned := w.device()
	var answers []error
	w.book.mu.Lock()
	w.book.asked = func() {
		_, err := w.policy.Client(planned, shareOf(4))
		answers = append(answers, err)
	}
	w.book.mu.Unlock()
	w.shared(device.Sharing{})
	w.awaitState("")
	w.book.mu.Lock()
	defer w.book.mu.Unlock()
	last := len(answers) - 1
	if last < 1 || answers[last-1] != nil || answers[last] == nil || !strings.Contains(answers[last].Error(), "being changed") {
		t.Errorf("told %v", answers)
	}
}

// Who has the GPU as a whole has it without a daemon, and the policy holds again afterwards.
func TestPolicyAndAnExclusiveClaim(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.agent()
	w.awaitClient(shareOf(4))
	// It is written after the daemon is ready.
	w.eventually("a client device", func() bool { return strings.Contains(w.state(), "cdi ") })
	daemon := w.state()
	w.book.set(holdOf(ledger.KindClaim, "uid-a", device.Share{}, ledger.StateHeld))
	if !w.policy.ByDaemon(w.device().GPU) {
		t.Error("no report of the daemon")
	}
	for range 2 {
		_, err := apply(t.Context(), w.manager, Group{Claim: Claim{"uid-a", "team-a", "a"}, Devices: []device.Device{w.device()}, Sharing: parametersv1beta1.Sharing{Strategy: Exclusive}}, always)
		check(t, err)
		if want := "sharing uid-a~GPU-0"; w.state() != want {
			t.Fatalf("an exclusive claim finds %s, want %s", w.state(), want)
		}
	}
	check(t, w.look())
	if _, err := w.policy.Client(w.device(), shareOf(4)); err == nil {
		t.Error("a client of a daemon that does not exist")
	}
	check(t, w.manager.Revert(t.Context(), Key{"uid-a", device.Ref{GPU: "GPU-0"}}, always))
	w.book.set()
	w.awaitClient(shareOf(4))
	w.awaitState(daemon)
	w.shared(device.Sharing{})
	w.awaitState("")
}

// A claim whose pods run shares the GPU as they do, whatever policy says by then: a later pod of it ends no daemon and begins none.
func TestPolicyAndALaterPod(t *testing.T) {
	byTime := device.Sharing{Strategy: device.TimeSlicing, Claims: "memory"}
	for name, policies := range map[string][2]device.Sharing{"ends": {byMPS(0, true), byTime}, "begins": {byTime, byMPS(0, true)}} {
		t.Run(name, func(t *testing.T) {
			w := newTown(t, policies[0])
			w.agent()
			w.book.set(holdOf(ledger.KindClaim, "uid-a", shareOf(4), ledger.StateHeld))
			join := func() []string {
				t.Helper()
				devices, err := w.policy.Join(t.Context(), Claim{"uid-a", "team-a", "a"}, w.device(), shareOf(4))
				check(t, err)
				return devices
			}
			first := join()
			before := w.state()
			w.book.mu.Lock()
			w.book.busy = map[string]bool{"uid-a": true}
			w.book.mu.Unlock()
			w.shared(policies[1])
			if later := join(); cmp.Diff(first, later) != "" || w.state() != before {
				t.Errorf("the first pod got %v, a later one %v; before %s, now %s", first, later, before, w.state())
			}
			w.book.set()
			w.shared(device.Sharing{})
			w.awaitState("")
		})
	}
}

// What is known of a holder only by its record, or not even by that, keeps the daemon where it may have a process.
func TestPolicyAndDoubtfulHolders(t *testing.T) {
	unreadable := holdOf(ledger.KindPod, "GPU-0::0", device.Share{}, ledger.StateRestored)
	unreadable.Unreadable = true
	running := holdOf(ledger.KindClaim, "uid-a", shareOf(4), ledger.StateRestored)
	for _, h := range []ledger.Hold{unreadable, running} {
		w := newTown(t, byMPS(4, false))
		w.agent()
		w.awaitClient(shareOf(4))
		w.book.set(h)
		w.book.mu.Lock()
		w.book.busy = map[string]bool{"uid-a": true}
		w.book.mu.Unlock()
		before := w.state()
		w.shared(device.Sharing{})
		if err := w.look(); !errors.Is(err, errInUse) || w.state() != before {
			t.Errorf("%s: %v; before %s, now %s", h, err, before, w.state())
		}
		w.book.set()
		w.awaitState("")
	}
}

// clientOfBefore is the CDI device of a claim that became a client while an agent ran that has ended.
func (w *town) clientOfBefore() string {
	stop := w.agent()
	defer stop()
	w.book.set(holdOf(ledger.KindClaim, "uid-a", shareOf(4), ledger.StateHeld))
	devices, err := w.policy.Join(w.t.Context(), Claim{"uid-a", "team-a", "a"}, w.device(), shareOf(4))
	check(w.t, err)
	return strings.TrimPrefix(devices[0], "cdi=")
}

// What clients need is there as long as they are, also while their daemon is to end.
func TestPolicyChangesBesideClients(t *testing.T) {
	for _, next := range []device.Sharing{byMPS(2, false), {}} {
		w := newTown(t, byMPS(0, true))
		name := w.clientOfBefore()
		w.shared(next)
		check(t, w.RemoveClientDevices(name))
		w.agent()
		w.eventually("the CDI device of a client", func() bool { _, there := w.described(name); return there })
		w.book.set()
		w.shared(device.Sharing{})
		w.awaitState("")
	}
}

// eventful has something happen before a CDI device is made, or is removed, and counts how often it is asked about them.
type eventful struct {
	*world
	describe, forget func()
	asked            int
}

func (e *eventful) happen(once *func()) {
	e.asked++
	if do := *once; do != nil {
		*once = nil
		do()
	}
}

func (e *eventful) WriteClientDevice(name string, edits specs.ContainerEdits) (string, error) {
	e.happen(&e.describe)
	return e.world.WriteClientDevice(name, edits)
}

func (e *eventful) RemoveClientDevices(name string) error {
	e.happen(&e.forget)
	return e.world.RemoveClientDevices(name)
}

func (e *eventful) ClientDevices(name string) ([]string, error) {
	e.asked++
	return e.world.ClientDevices(name)
}

// restarted is the town after an agent that ended, in the hands of a test.
func (w *town) restarted() *eventful {
	w.manager = w.process()
	w.policy = NewPolicy(w.manager, w, w.book, w.book)
	e := &eventful{world: w.world}
	w.manager.Specs = e
	return e
}

// meanwhile does something elsewhere, and waits for it if that is not kept waiting itself; done waits in any case.
func (w *town) meanwhile(do func() error) (begin, done func()) {
	ended := make(chan error, 1)
	done = sync.OnceFunc(func() { check(w.t, <-ended) })
	begin = func() {
		go func() { ended <- do() }()
		if w.manager.mu.TryLock() {
			w.manager.mu.Unlock()
			done()
		}
	}
	return begin, done
}

// A holder that comes while an unneeded client device is removed keeps the one that it found.
func TestPolicyPrunesNothingNew(t *testing.T) {
	w := newTown(t, byMPS(0, true))
	name := w.clientOfBefore()
	w.book.set()
	e := w.restarted()
	begin, done := w.meanwhile(func() error {
		w.book.set(holdOf(ledger.KindClaim, "uid-b", shareOf(4), ledger.StateHeld))
		_, err := w.policy.Join(t.Context(), Claim{"uid-b", "team-a", "b"}, w.device(), shareOf(4))
		return err
	})
	e.forget = begin
	check(t, settleAll(t, w.policy))
	done()
	if _, there := w.described(name); !there {
		t.Errorf("%s is not there", name)
	}
}

// TestPolicyKeepsClientsOfRestoredClaims: while the share of a claim is not known, no client device is removed: its containers may need it.
func TestPolicyKeepsClientsOfRestoredClaims(t *testing.T) {
	w := newTown(t, byMPS(0, true))
	name := w.clientOfBefore()
	w.restarted()
	restored := holdOf(ledger.KindClaim, "uid-a", device.Share{}, ledger.StateRestored)
	unreadable := holdOf(ledger.KindClaim, "uid-a", device.Share{}, ledger.StateHeld)
	unreadable.Unreadable = true
	for what, hold := range map[string]ledger.Hold{"restored": restored, "unreadable": unreadable} {
		w.book.set(hold)
		check(t, settleAll(t, w.policy))
		if _, there := w.described(name); !there {
			t.Errorf("%s: %s is not there", what, name)
		}
	}
	w.book.set(holdOf(ledger.KindClaim, "uid-b", shareOf(2), ledger.StateHeld))
	check(t, settleAll(t, w.policy))
	if _, there := w.described(name); there {
		t.Errorf("%s is there, and no claim has it", name)
	}
}

// A client device that is written after its claim was unprepared goes again.
func TestPolicyPrunesLateClient(t *testing.T) {
	w := newTown(t, byMPS(0, true))
	stop := w.agent()
	w.awaitClient(device.Share{})
	stop()
	w.restarted()
	check(t, settleAll(t, w.policy))
	changed := w.manager.Changed()
	devices, err := w.policy.Join(t.Context(), Claim{"uid-a", "team-a", "a"}, w.device(), shareOf(4))
	check(t, err)
	select {
	case <-changed:
	default:
		t.Error("the policy is not told of a new client device")
	}
	check(t, settleAll(t, w.policy))
	if _, there := w.described(strings.TrimPrefix(devices[0], "cdi=")); there {
		t.Errorf("%s is there, and no claim has it", devices[0])
	}
}

// What clients need is not made for a daemon that has ended meanwhile.
func TestPolicyDescribesNothingThatEnds(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	stop := w.agent()
	w.awaitClient(shareOf(4))
	stop()
	e := w.restarted()
	begin, done := w.meanwhile(func() error {
		exclusive := parametersv1beta1.Sharing{Strategy: Exclusive}
		_, err := apply(t.Context(), w.manager, Group{Claim: Claim{"uid-a", "team-a", "a"}, Devices: []device.Device{w.device()}, Sharing: exclusive}, always)
		return err
	})
	e.describe = begin
	check(t, settleAll(t, w.policy))
	done()
	if want := "sharing uid-a~GPU-0"; w.state() != want {
		t.Errorf("an exclusive claim finds %s, want %s", w.state(), want)
	}
}

// Holders that come and go, and need nothing that is not there, cost no look at the disk.
func TestPolicyDescribesOnce(t *testing.T) {
	w := newTown(t, byMPS(2, true))
	stop := w.agent()
	w.awaitClient(shareOf(8))
	stop()
	e := w.restarted()
	first := holdOf(ledger.KindClaim, "uid-a", shareOf(2), ledger.StateHeld)
	for _, step := range []struct {
		holds []ledger.Hold
		free  bool
	}{
		{holds: []ledger.Hold{first}},
		{holds: []ledger.Hold{first}, free: true},
		{holds: []ledger.Hold{first, holdOf(ledger.KindPod, "GPU-0::0", shareOf(8), ledger.StateHeld)}, free: true},
		{holds: []ledger.Hold{first, holdOf(ledger.KindClaim, "uid-b", shareOf(2), ledger.StateHeld)}, free: true},
		{holds: []ledger.Hold{first, holdOf(ledger.KindClaim, "uid-b", shareOf(4), ledger.StateHeld)}},
		{holds: []ledger.Hold{first}},
		{holds: []ledger.Hold{first}, free: true},
	} {
		before := e.asked
		w.book.set(step.holds...)
		check(t, settleAll(t, w.policy))
		if asked := e.asked - before; asked == 0 != step.free {
			t.Errorf("asked %d times about the CDI devices for %v", asked, step.holds)
		}
	}
}

// stuckGPU has one that does not answer.
type stuckGPU struct{ *world }

func (s stuckGPU) ComputeMode(ctx context.Context, gpu string) (device.ComputeMode, error) {
	if gpu == "GPU-1" {
		<-ctx.Done()
		return "", context.Cause(ctx)
	}
	return s.world.ComputeMode(ctx, gpu)
}

// two GPUs, both by MPS.
type two struct{ *town }

func (n two) Inventory() device.Inventory {
	inv := n.town.Inventory()
	other := gpuNamed("GPU-1").GPU
	other.Sharing = inv.GPUs[0].Sharing
	return device.Inventory{GPUs: []device.GPU{other, inv.GPUs[0]}}
}

func TestPolicyBesideAStuckGPU(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.manager = w.process()
	w.manager.Hardware = stuckGPU{w.world}
	w.policy = NewPolicy(w.manager, two{w}, w.book, w.book)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	all.Go(func() { _ = w.policy.Run(ctx) })
	w.supervise(ctx, w.manager)
	w.awaitClient(shareOf(4))
}

// A daemon that was ended for a claim is not ready before it is so again.
func TestPolicyForgetsReadiness(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.manager = w.process()
	w.policy = NewPolicy(w.manager, w, w.book, w.book)
	check(t, settleAll(t, w.policy))
	d := w.manager.Daemons()[0]
	h, err := mps.Hold(t.Context(), mps.Dir(w.dir, d.Name))
	check(t, err)
	check(t, h.Publish(mps.Ready{Pod: "pod", Hash: d.Settings.Hash()}))
	w.policy.checkDaemons()
	w.awaitClient(shareOf(4))
	ended := make(chan struct{})
	go func() { defer close(ended); _ = h.Await(t.Context()); _ = h.Release() }()
	_, err = apply(t.Context(), w.manager, Group{Claim: Claim{"uid-a", "team-a", "a"}, Devices: []device.Device{w.device()}, Sharing: parametersv1beta1.Sharing{Strategy: Exclusive}}, always)
	check(t, err)
	<-ended
	check(t, w.manager.Revert(t.Context(), Key{"uid-a", device.Ref{GPU: "GPU-0"}}, always))
	check(t, settleAll(t, w.policy))
	if c, err := w.policy.Client(w.device(), shareOf(4)); err == nil {
		t.Errorf("a daemon that does not run has client %v", c)
	}
	// The pod of before is still being deleted, and its supervisor was started once more.
	h, err = mps.Hold(t.Context(), mps.Dir(w.dir, w.manager.Daemons()[0].Name))
	check(t, err)
	check(t, h.Publish(mps.Ready{Pod: "pod", Hash: d.Settings.Hash()}))
	w.policy.checkDaemons()
	if c, err := w.policy.Client(w.device(), shareOf(4)); err == nil {
		t.Errorf("the daemon of before, which is about to be killed, has client %v", c)
	}
	check(t, h.Release())
}

// A waiting claim never delays the daemon that it waits for: the next check would come late.
func TestPolicyIsNotKeptByWhoWaits(t *testing.T) {
	w := newTown(t, byMPS(0, true))
	w.manager = w.process()
	w.policy = NewPolicy(w.manager, w, w.book, w.book)
	w.supervise(t.Context(), w.manager)
	w.book.set(holdOf(ledger.KindClaim, "uid-a", shareOf(4), ledger.StateHeld))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	asked := 0
	w.book.asked = func() {
		// The claim looks for itself a second time once it has said that it waits.
		if asked++; asked == 2 {
			if err := w.policy.apply(ctx, "GPU-0"); err != nil {
				t.Errorf("a claim that waits is in the way: %v", err)
				cancel()
			}
		}
	}
	if _, err := w.policy.Join(ctx, Claim{"uid-a", "team-a", "a"}, w.device(), shareOf(4)); err != nil && !t.Failed() {
		t.Error(err)
	}

	// It waits no more.
	w.book.asked = nil
	w.shared(device.Sharing{})
	if err := w.policy.apply(ctx, "GPU-0"); !errors.Is(err, errInUse) {
		t.Errorf("a daemon ends under a client: %v", err)
	}
}

// A claim that waits for what turns out not to be supported is told so then.
func TestPolicyTellsWhoWaits(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.gpu.ComputeCapability = "6.1"
	w.manager = w.process()
	w.policy = NewPolicy(w.manager, w, w.book, w.book)
	w.book.set(holdOf(ledger.KindClaim, "uid-a", shareOf(4), ledger.StateHeld))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	joined := make(chan error, 1)
	go func() {
		_, err := w.policy.Join(ctx, Claim{"uid-a", "team-a", "a"}, w.device(), shareOf(4))
		joined <- err
	}()
	w.eventually("a waiting holder", func() bool {
		w.policy.mu.Lock()
		defer w.policy.mu.Unlock()
		return len(w.policy.joining) == 1
	})
	changed := w.manager.Changed()
	check(t, w.policy.apply(t.Context(), "GPU-0"))
	select {
	case <-changed:
	default:
		t.Error("no report that the GPU cannot be shared")
		cancel()
	}
	if err := <-joined; !errors.Is(err, device.ErrUnsupported) {
		t.Errorf("told %v", err)
	}
}

// A daemon that cannot be ended is tried again, and not with every pod that comes or goes elsewhere.
func TestPolicyThatCannotEndADaemon(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.agent()
	w.awaitClient(shareOf(4))
	calls := func() int {
		w.world.mu.Lock()
		defer w.world.mu.Unlock()
		return w.calls
	}
	before := calls()
	w.world.mu.Lock()
	w.step = func() error { return errors.New("no answer") }
	w.world.mu.Unlock()
	w.shared(device.Sharing{})
	w.eventually("an attempt", func() bool { return calls() > before })
	elsewhere := holdOf(ledger.KindPod, "GPU-1", device.Share{}, ledger.StateHeld)
	elsewhere.Device.GPU = "GPU-1"
	for end := time.After(200 * time.Millisecond); ; {
		select {
		case <-end:
			if n := calls() - before; n > 4 {
				t.Errorf("tried %d times", n)
			}
			return
		case <-time.After(time.Millisecond):
			w.book.set(elsewhere)
		}
	}
}

// A setting that a GPU does not support is an error for the claim that requests it.
func TestPolicyOfAnOldGPU(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.gpu.ComputeCapability = "6.1"
	w.agent()
	w.eventually("the reason", func() bool {
		_, err := w.policy.Client(w.device(), shareOf(4))
		return errors.Is(err, device.ErrUnsupported) && strings.Contains(err.Error(), "compute capability 7.0")
	})
	if w.state() != "" {
		t.Errorf("set %s", w.state())
	}
}

// A daemon that dies is told of, and its successor.
func TestPolicyDaemonDies(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.manager = w.process()
	w.policy = NewPolicy(w.manager, w, w.book, w.book)
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	all.Go(func() { _ = w.policy.Run(ctx) })
	w.eventually("a daemon to be asked for", func() bool { return len(w.manager.Daemons()) == 1 })
	d := w.manager.Daemons()[0]
	for range 2 {
		h, err := mps.Hold(ctx, mps.Dir(w.dir, d.Name))
		check(t, err)
		if c, err := w.policy.Client(w.device(), shareOf(4)); err == nil {
			t.Errorf("a daemon that is not ready has client %v", c)
		}
		check(t, h.Publish(mps.Ready{Pod: "pod", Hash: d.Settings.Hash()}))
		w.awaitClient(shareOf(4))
		check(t, h.Release())
		w.eventually("the daemon to be missed", func() bool {
			_, err := w.policy.Client(w.device(), shareOf(4))
			return err != nil && strings.Contains(err.Error(), "is not ready")
		})
	}
}

// Policies, holders and agents come and go: who has joined a daemon keeps it as long as it has a part of the GPU, who has the GPU
// otherwise finds none, and nothing is left.
func TestPolicyLives(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(seed, 1))
			w := newTown(t, device.Sharing{})
			stop := w.agent()
			policies := []device.Sharing{
				{}, byMPS(2, false), byMPS(4, true), byMPS(0, true), {Strategy: device.TimeSlicing, Interval: "Long", Claims: "memory"},
			}
			// daemons of those that have a part, empty for those without one.
			daemons := map[string]string{}
			hold := func() {
				var holds []ledger.Hold
				for id := range daemons {
					holds = append(holds, holdOf(ledger.KindClaim, id, shareOf(1), ledger.StateHeld))
				}
				w.book.set(holds...)
			}
			joined, alone := 0, 0
			for step := range 60 {
				switch random.IntN(5) {
				case 0:
					w.shared(policies[random.IntN(len(policies))])
				case 1:
					stop()
					stop = w.agent()
				case 2, 3:
					id := fmt.Sprintf("uid-%d", step)
					daemons[id] = "?"
					hold()
					ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
					devices, err := w.policy.Join(ctx, Claim{id, "team-a", id}, w.device(), shareOf(1))
					cancel()
					delete(daemons, id)
					if err == nil {
						daemons[id] = ""
						if alone++; len(devices) > 0 {
							joined++
							alone--
							daemons[id], _, _ = strings.Cut(strings.TrimPrefix(devices[0], "cdi="), ".")
						}
					}
					hold()
				default:
					for id := range daemons {
						delete(daemons, id)
						break
					}
					hold()
				}
				for id, daemon := range daemons {
					mode := w.mode()
					if daemon == "" {
						if mode != device.ComputeModeDefault {
							t.Fatalf("step %d: %s has no daemon, and the GPU is %s", step, id, mode)
						}
						continue
					}
					held, err := mps.Held(mps.Dir(w.dir, daemon))
					if err != nil || !held || mode != device.ComputeModeExclusiveProcess {
						t.Fatalf("step %d: %s is a client of %s: alive %v, %v, GPU %s", step, id, daemon, held, err, mode)
					}
				}
			}
			t.Logf("%d joined, %d without a daemon", joined, alone)
			if joined == 0 {
				t.Error("no client joined")
			}
			clear(daemons)
			hold()
			w.shared(device.Sharing{})
			w.awaitState("")
		})
	}
}

// While the driver is paused, a daemon without clients ends, because its servers keep the GPU open, and comes back afterwards. One with
// clients ends after the last of them.
func TestPausedGPU(t *testing.T) {
	for name, held := range map[string]bool{"no holder": false, "a holder": true} {
		t.Run(name, func(t *testing.T) {
			w := newTown(t, byMPS(4, false))
			w.agent()
			share := device.Replica(townMemory, 4)
			w.awaitClient(share)
			if held {
				w.book.set(ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "a"}, Device: w.gpu.Ref(), Share: share, State: ledger.StateHeld})
			}
			w.healthy(device.Health{Reason: device.ReasonPaused})
			if held {
				if err := w.look(); !errors.Is(err, errInUse) || len(w.manager.Daemons()) != 1 {
					t.Fatalf("%v; daemons %v, want one: a pod uses it", err, w.manager.Daemons())
				}
				w.book.set()
			}
			w.eventually("no daemon", func() bool {
				left, err := mps.Held(w.manager.dir(daemonOf(t, w.device())))
				return err == nil && !left && len(w.manager.Daemons()) == 0
			})
			if c, err := w.policy.Client(w.device(), share); err == nil {
				t.Errorf("a pod would get %v", c)
			}
			w.healthy(device.Health{})
			w.awaitClient(share)
			if mode := w.mode(); mode != device.ComputeModeExclusiveProcess {
				t.Errorf("compute mode %s", mode)
			}
		})
	}
}

// The daemon of a GPU that is gone, or that is in MIG mode, ends with its last client, and leaves nothing. When the GPU is back, the policy is
// applied again.
func TestGPUThatIsGone(t *testing.T) {
	for name, test := range map[string]struct {
		vanish   func(w *town)
		restarts bool
	}{
		"missing":              {vanish: func(w *town) { w.remove("GPU-0"); w.healthy(device.Health{Reason: device.ReasonMissing}) }},
		"not in the inventory": {vanish: func(w *town) { w.remove("GPU-0"); w.change(func() { w.removed = true }) }},
		"not in the inventory of the next agent": {
			vanish: func(w *town) { w.remove("GPU-0"); w.change(func() { w.removed = true }) }, restarts: true,
		},
		"in MIG mode": {vanish: func(w *town) { w.change(func() { w.gpu.MIGEnabled = true }) }},
	} {
		for _, held := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, held: %t", name, held), func(t *testing.T) {
				w := newTown(t, byMPS(4, false))
				stop := w.agent()
				share := device.Replica(townMemory, 4)
				w.awaitClient(share)
				if held {
					w.book.set(ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "a"}, Device: w.gpu.Ref(), Share: share, State: ledger.StateHeld})
				}
				if test.restarts {
					stop()
				}
				test.vanish(w)
				if test.restarts {
					w.agent()
				}
				if held {
					if err := w.policy.apply(t.Context(), "GPU-0"); !errors.Is(err, errInUse) || len(w.manager.Daemons()) != 1 {
						t.Fatalf("%v; daemons %v, want one: a pod uses it", err, w.manager.Daemons())
					}
					w.book.set()
				}
				w.awaitState("")
				w.world.mu.Lock()
				w.gone, w.modes["GPU-0"] = "", device.ComputeModeDefault
				w.world.mu.Unlock()
				w.change(func() { w.removed, w.gpu.MIGEnabled, w.gpu.Health = false, false, device.Health{} })
				w.awaitClient(share)
				if mode := w.mode(); mode != device.ComputeModeExclusiveProcess {
					t.Errorf("compute mode %s", mode)
				}
			})
		}
	}
}

// While the driver is away, daemons stay as they are.
func TestDaemonWithoutADriver(t *testing.T) {
	w := newTown(t, byMPS(4, false))
	w.agent()
	w.awaitClient(device.Replica(townMemory, 4))
	p := NewPolicy(w.manager, noGPUs{}, w.book, w.book)
	if err := p.apply(t.Context(), "GPU-0"); err != nil || len(w.manager.Daemons()) != 1 {
		t.Errorf("%v; daemons %v", err, w.manager.Daemons())
	}
}

type noGPUs struct{ node }

func (noGPUs) Inventory() device.Inventory { return device.Inventory{} }

func daemonOf(t *testing.T, d device.Device) string {
	t.Helper()
	name, err := daemonName(policyGroup(d))
	check(t, err)
	return name
}

func (w *town) healthy(h device.Health) { w.change(func() { w.gpu.Health = h }) }

func (w *town) change(do func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	do()
	close(w.changed)
	w.changed = make(chan struct{})
}
