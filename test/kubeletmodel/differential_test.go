// SPDX-License-Identifier: Apache-2.0

package kubeletmodel

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

var (
	sequencesFlag = flag.Int("sequences", 0, "how many random sequences to play for each version")
	versionsFlag  = flag.String("versions", binaries.DefaultKubernetes, "versions of Kubernetes, with commas between; all for one of each minor version")
	seedFlag      = flag.Uint64("seed", 0, "seed of the first sequence; 0 for one from the clock")
)

// TestKubelet plays random sequences to kubelet's own device manager and to the model. It fails at the first difference.
func TestKubelet(t *testing.T) {
	if *sequencesFlag == 0 {
		t.Skip("make kubelet-model runs it: it builds kubelet's device manager")
	}
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano()) % 1_000_000_000
	}
	began, played, versions := time.Now(), 0, versionsOf(*versionsFlag)
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			program, err := binaries.DeviceManager(t.Context(), version, t.Output())
			if err != nil {
				t.Fatal(err)
			}
			own := startKubelet(t, program)
			for i := range uint64(*sequencesFlag) {
				// kubelet keeps connections that it has forgotten: their goroutines would become many.
				if i%50 == 49 {
					own.stop()
					own = startKubelet(t, program)
				}
				s := newSequence(t, own, version, seed+i)
				if difference := s.play(); difference != "" {
					t.Fatalf("%s\n%s\ndifference at sequence %d: %s\nreplay: make kubelet-model VERSIONS=%s SEED=%d SEQUENCES=1",
						version, strings.Join(s.steps, "\n"), seed+i, difference, version, seed+i)
				}
				played++
			}
		})
	}
	if !t.Failed() {
		fmt.Printf("kubelet-model: seed=%d took=%s\nkubelet-model: versions=%d sequences=%d differences=0\n",
			seed, time.Since(began).Round(time.Millisecond), len(versions), played)
	}
}

// versionsOf are the versions of a flag; all are the newest known of each minor version.
func versionsOf(list string) []string {
	if list != "all" {
		return strings.Split(list, ",")
	}
	newest := map[int]string{}
	for _, version := range binaries.KnownKubernetes {
		newest[minorOf(version)] = version // oldest first
	}
	return slices.Sorted(maps.Values(newest))
}

func minorOf(version string) (minor int) {
	_, _ = fmt.Sscanf(version, "v1.%d.", &minor)
	return minor
}

// sequence is one random history.
type sequence struct {
	t       *testing.T
	rand    *rand.Rand
	minor   int
	kubelet *kubelet
	model   *Manager
	steps   []string
	found   string

	written  *Checkpoint
	active   map[string]bool
	ready    bool
	ran      [][2]string
	chosen   []string // what kubelet chose
	unseen   bool     // kubelet made no call from which its choice is seen
	pods     map[string][]Container
	admitted map[string]bool
	streams  []*Endpoint
	gone     map[string]bool // sockets whose plugin has ended
	known    map[string]int  // how many devices were ever listed
	names    int
}

func newSequence(t *testing.T, own *kubelet, version string, seed uint64) *sequence {
	s := &sequence{
		t: t, rand: rand.New(rand.NewPCG(seed, 0)), minor: minorOf(version), kubelet: own, active: map[string]bool{}, ready: true,
		pods: map[string][]Container{}, admitted: map[string]bool{}, known: map[string]int{}, gone: map[string]bool{},
	}
	s.boot(request{Op: "new", Ready: true})
	return s
}

// boot starts both with what is on the disk.
func (s *sequence) boot(r request) {
	s.streams, s.ran, s.ready = nil, r.Running, r.Ready
	if r.Damage || r.Op == "new" {
		s.written = nil
	}
	s.model = New(Config{
		Minor: s.minor, Active: func(uid string) bool { return s.active[uid] }, SourcesReady: func() bool { return s.ready },
		Ran:    func(uid, container string) bool { return slices.Contains(s.ran, [2]string{uid, container}) },
		Write:  func(c Checkpoint) { s.written = &c },
		Choose: s.choose,
	}, s.written)
	r.Active = slices.Sorted(maps.Keys(s.active))
	s.send(r, "")
}

// choose repeats kubelet's choice.
func (s *sequence) choose(candidates []string, n int) []string {
	ids := slices.DeleteFunc(slices.Clone(candidates), func(id string) bool { return !slices.Contains(s.chosen, id) })
	if s.unseen {
		return candidates[:n] // the call failed: nothing is left of the choice
	}
	if len(ids) != n {
		s.differ("kubelet chose %q, the model takes %d of %q", s.chosen, n, candidates)
		return candidates[:n]
	}
	return ids
}

func (s *sequence) differ(format string, args ...any) {
	if s.found == "" {
		s.found = fmt.Sprintf(format, args...)
	}
}

func (s *sequence) chance(oneIn int) bool { return s.rand.IntN(oneIn) == 0 }

func pick[T any](s *sequence, from []T) T { return from[s.rand.IntN(len(from))] }

// send gives kubelet a command and compares its error and state with the model's, which was given the same before.
func (s *sequence) send(r request, failure string) response {
	answer := s.give(r)
	if answer.Error != failure {
		s.differ("kubelet answers %q, the model %q", answer.Error, failure)
	}
	s.compare(answer)
	return answer
}

// give gives kubelet a command.
func (s *sequence) give(r request) response {
	line, err := json.Marshal(r)
	if err != nil {
		s.t.Fatal(err)
	}
	s.steps = append(s.steps, string(line))
	return s.kubelet.ask(r)
}

func (s *sequence) compare(answer response) {
	want := s.model.State()
	got := State{
		Healthy: answer.State.Healthy, Unhealthy: answer.State.Unhealthy, Allocated: answer.State.Allocated, Pods: answer.State.Pods,
		Stopped: map[string]bool{},
	}
	for resource, e := range answer.State.Endpoints {
		got.Stopped[resource] = e.Stopped
	}
	if !reflect.DeepEqual(want, got) {
		s.differ("the model (-) and kubelet (+):\n%s", cmp.Diff(want, got))
	}
	written := Checkpoint{Pods: PodDevices{}, Registered: ByResource{}}
	if s.written != nil {
		written = *s.written
	}
	if !reflect.DeepEqual(written, answer.State.Checkpoint) {
		s.differ("checkpoint of the model (-) and of kubelet (+):\n%s", cmp.Diff(written, answer.State.Checkpoint))
	}
}

var resources = []string{"nvidia.com/gpu", "nvidia.com/mig"}

// play plays the sequence and returns the first difference.
func (s *sequence) play() string {
	s.register()
	s.list()
	for range 10 + s.rand.IntN(25) {
		if s.found != "" {
			return s.found
		}
		switch s.rand.IntN(20) {
		case 0, 1:
			s.register()
		case 2, 3, 4:
			s.list()
		case 5:
			s.stop(nil)
		case 6:
			s.restart()
		case 7:
			s.start()
		default:
			if !s.aside() {
				s.admit()
			}
		}
	}
	return s.found
}

// aside is what may happen while an Allocate is in flight.
func (s *sequence) aside() bool {
	switch s.rand.IntN(12) {
	case 0, 1:
		s.endPod()
	case 2, 3:
		s.model.Update()
		s.send(request{Op: "update"}, "")
	case 4:
		s.capacity()
	case 5:
		if s.chance(3) {
			for _, resource := range resources {
				if e := s.model.Endpoint(resource); e != nil {
					e.Expire()
				}
			}
			s.send(request{Op: "age"}, "")
		}
		s.capacity()
	case 6:
		s.list()
	case 7:
		s.ready = !s.ready || s.chance(2)
		s.tell()
	default:
		return false
	}
	return true
}

func (s *sequence) tell() {
	s.send(request{Op: "active", Active: slices.Sorted(maps.Keys(s.active)), Ready: s.ready}, "")
}

func (s *sequence) endPod() {
	if pods := slices.Sorted(maps.Keys(s.active)); len(pods) > 0 {
		delete(s.active, pick(s, pods))
		s.tell()
	}
}

func (s *sequence) capacity() {
	want := s.model.Capacity()
	if difference := cmp.Diff(want, s.send(request{Op: "capacity"}, "").Capacity); difference != "" {
		s.differ("capacity of the model (-) and of kubelet (+):\n%s", difference)
	}
}

// register registers a plugin, under a new socket name or one that kubelet has seen.
func (s *sequence) register() {
	resource, preferred := pick(s, resources), !s.chance(4)
	// Where several are left when one ends, kubelet takes any.
	if len(s.model.store[resource]) > 1 {
		return
	}
	s.names++
	socket := fmt.Sprintf("p%d.sock", s.names)
	if len(s.streams) > 0 && s.chance(6) {
		again := pick(s, s.streams)
		resource, socket, preferred = again.Resource, again.Socket, again.Preferred
		if len(s.model.store[resource]) > 1 {
			return
		}
	}
	failure := ""
	e, err := s.model.Register(resource, socket, preferred)
	if err != nil {
		failure = err.Error() + ": "
	} else {
		s.streams = append(s.streams, e)
	}
	r := request{Op: "register", Resource: resource, Socket: socket, Preferred: preferred}
	answer := s.give(r)
	if (failure == "") != (answer.Error == "") || !strings.HasPrefix(answer.Error, failure) {
		s.differ("kubelet answers %q, the model %q", answer.Error, failure)
	}
	s.compare(answer)
}

// list sends a device list. It names every device that was ever named: kubelet dereferences the IDs of an Allocate after the answer.
func (s *sequence) list() {
	live := slices.DeleteFunc(slices.Clone(s.streams), func(e *Endpoint) bool { return e.dropped })
	if len(live) == 0 {
		return
	}
	e := pick(s, live)
	// A plugin has one stream for each of its registrations, and sends on the last one.
	for _, other := range live {
		if other.Socket == e.Socket {
			e = other
		}
	}
	s.known[e.Resource] = max(s.known[e.Resource], 1+s.rand.IntN(5))
	r := request{Op: "list", Resource: e.Resource, Socket: e.Socket}
	sick := s.chance(2)
	for i := range s.known[e.Resource] {
		id := fmt.Sprintf("%s%d", e.Resource[len("nvidia.com/"):], i)
		if sick && s.chance(3) {
			r.Unhealthy = append(r.Unhealthy, id)
		} else {
			r.Healthy = append(r.Healthy, id)
		}
	}
	s.model.List(e.Resource, r.Healthy, r.Unhealthy)
	s.send(r, "")
}

// stop ends the process of a plugin. It reports whether that ends the call in flight.
func (s *sequence) stop(inFlight *Ask) (broken bool) {
	live := slices.DeleteFunc(slices.Clone(s.streams), func(e *Endpoint) bool { return e.dropped })
	if len(live) == 0 {
		return false
	}
	socket := pick(s, live).Socket
	s.gone[socket] = true
	gone := map[*Endpoint]bool{}
	for _, e := range s.streams {
		if e.Socket == socket {
			gone[e] = true
		}
	}
	for _, e := range s.streams {
		if gone[e] {
			if dropped := s.model.StreamEnded(e); dropped != nil && inFlight != nil && dropped == inFlight.Endpoint {
				broken = true
			}
			broken = broken || inFlight != nil && e == inFlight.Endpoint
		}
	}
	s.streams = slices.DeleteFunc(s.streams, func(e *Endpoint) bool { return gone[e] })
	left := len(slices.DeleteFunc(slices.Clone(s.streams), func(e *Endpoint) bool { return e.dropped }))
	if r := (request{Op: "stop", Socket: socket, Left: left}); broken {
		s.give(r) // what becomes of the call is seen next
	} else {
		s.send(r, "")
	}
	return broken
}

// restart is a restart of kubelet, with its checkpoint or with a damaged one.
func (s *sequence) restart() {
	r := request{Op: "restart", Ready: s.chance(2), Damage: s.chance(6)}
	for _, uid := range slices.Sorted(maps.Keys(s.admitted)) {
		for _, c := range s.pods[uid] {
			if s.active[uid] && s.chance(2) {
				r.Running = append(r.Running, [2]string{uid, c.Name})
			}
		}
	}
	s.boot(r)
}

// admit admits a new pod, or one that kubelet admitted before it restarted.
func (s *sequence) admit() {
	s.names++
	uid := fmt.Sprintf("pod-%d", s.names)
	if again := slices.Sorted(maps.Keys(s.active)); len(again) > 0 && s.chance(4) {
		uid = pick(s, again)
	}
	if s.pods[uid] == nil {
		s.pods[uid] = s.containers()
	}
	if !s.active[uid] {
		s.active[uid] = true
		s.tell()
	}
	for _, c := range s.pods[uid] {
		if s.allocate("allocate", uid, c) != nil || s.found != "" {
			return
		}
	}
	s.admitted[uid] = true
}

func (s *sequence) containers() (made []Container) {
	resource := pick(s, resources)
	for i := range s.rand.IntN(3) {
		made = append(made, Container{Name: fmt.Sprintf("init-%d", i), Count: s.rand.IntN(3), Init: true, Sidecar: s.chance(3)})
	}
	for i := range 1 + s.rand.IntN(2) {
		made = append(made, Container{Name: fmt.Sprintf("main-%d", i), Count: s.rand.IntN(3)})
	}
	for i := range made {
		if made[i].Resource = resource; s.chance(8) {
			made[i].Resource = pick(s, resources)
		}
	}
	return made
}

// start starts a container, which allocates again where its devices are not known.
func (s *sequence) start() {
	if pods := slices.Sorted(maps.Keys(s.admitted)); len(pods) > 0 {
		uid := pick(s, pods)
		_ = s.allocate("start", uid, pick(s, s.pods[uid]))
	}
}

var errCall = errors.New("rpc error")

// allocate plays what kubelet does for one container, with other things between its calls and their answers.
func (s *sequence) allocate(op, uid string, c Container) error {
	began := s.give(request{Op: op, Pod: uid, Containers: s.pods[uid], Container: c.Name})
	s.see(began)
	var a *Allocation
	if op == "start" {
		a = s.model.Start(uid, c)
	} else {
		a = s.model.Allocate(uid, c)
	}
	for answer := began; ; {
		for a.Ask != nil && s.gone[a.Ask.Endpoint.Socket] {
			a.Answer(nil, errCall)
		}
		if s.check(a, answer); a.Done || answer.Done || s.found != "" {
			s.drain(answer)
			return a.Err
		}
		for s.chance(2) && s.found == "" {
			s.aside()
		}
		if s.chance(12) && s.stop(a.Ask) {
			answer = s.give(request{Op: "next"})
			s.see(answer)
			a.Answer(nil, errCall)
			continue
		}
		r := request{Op: "answer", Fail: s.chance(12)}
		if a.Ask.Preferred {
			r.IDs = s.preferred(a.Ask)
		}
		answer = s.give(r)
		s.see(answer)
		if r.Fail {
			a.Answer(nil, errCall)
		} else {
			a.Answer(r.IDs, nil)
		}
	}
}

// see keeps what kubelet has chosen, before the model chooses.
func (s *sequence) see(answer response) {
	if s.chosen = nil; answer.Ask != nil && !answer.Ask.Preferred {
		s.chosen = answer.Ask.IDs
	}
	if answer.Ask != nil && answer.Ask.Preferred {
		s.chosen = answer.Ask.MustInclude
	}
	s.unseen = answer.Done
}

// preferred is what a plugin may answer: enough, too few, too many, or nothing useful.
func (s *sequence) preferred(a *Ask) (ids []string) {
	for _, id := range a.Available {
		if s.chance(2) || slices.Contains(a.MustInclude, id) {
			ids = append(ids, id)
		}
	}
	return append(ids, "unknown")
}

func (s *sequence) check(a *Allocation, answer response) {
	failure := ""
	if a.Err != nil {
		failure = a.Err.Error()
	}
	switch {
	case a.Done != answer.Done, (failure == "") != (answer.Error == ""), !strings.Contains(answer.Error, failure):
		s.differ("kubelet: done %v, error %q; the model: done %v, error %q", answer.Done, answer.Error, a.Done, failure)
	case a.Ask != nil:
		got := Ask{Endpoint: a.Ask.Endpoint, Preferred: answer.Ask.Preferred, Available: answer.Ask.Available, MustInclude: answer.Ask.MustInclude,
			IDs: answer.Ask.IDs, Size: answer.Ask.Size}
		if answer.Ask.Socket != a.Ask.Endpoint.Socket {
			s.differ("kubelet calls %s, the model %s", answer.Ask.Socket, a.Ask.Endpoint.Socket)
		}
		if difference := cmp.Diff(describe(*a.Ask), describe(got)); difference != "" {
			s.differ("call of the model (-) and of kubelet (+):\n%s", difference)
		}
	}
	s.compare(answer)
}

func describe(a Ask) string {
	return fmt.Sprintf("preferred %v, available %q, must include %q, IDs %q, size %d", a.Preferred, a.Available, a.MustInclude, a.IDs, a.Size)
}

// drain lets kubelet end what the model has ended: there is a difference already.
func (s *sequence) drain(answer response) {
	for !answer.Done {
		answer = s.kubelet.ask(request{Op: "answer", Fail: true})
	}
}
