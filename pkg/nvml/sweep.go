// SPDX-License-Identifier: Apache-2.0

// One scan of all GPUs: each is read within its own time limit.

package nvml

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/filewatch"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// sweep is one pass over all GPUs that NVML enumerates. A failure of one GPU affects no other.
type sweep struct {
	node   *Node
	reader *reader
	count  int
	// before is the known state at the start. It does not change: a visit may outlive the sweep.
	before map[string]knownGPU

	seen      map[string]bool
	endpoints []endpoint
	// failed is the health for an index whose identity could not be read.
	failed map[int]gpu.Health
	// silent is set if a GPU that is not identified has not answered yet: it may be any that was not seen.
	silent bool
}

// errSilent means that a call that concerns no single GPU has not returned.
var errSilent = &NoDriverError{Cause: errors.New("the driver does not answer")}

// startSweep opens the session and reads what concerns all GPUs. After an error the session is closed. A driver that does not answer
// gets no other call until it does.
func (n *Node) startSweep() (*sweep, error) {
	r := &reader{options: n.options, attachment: n.attachment}
	count, err := attempt(n, wholeDriver, nil, func() (int, error) {
		if err := r.session.tryOpen(); err != nil {
			return 0, err
		}
		count, err := r.readDriver()
		if err != nil {
			r.session.close()
		}
		return count, err
	}, func(int) { r.session.close() })
	if errors.Is(err, errNoAnswer) {
		err = errSilent
	}
	if err != nil {
		return nil, err
	}
	before := make(map[string]knownGPU, len(n.known))
	for uuid, known := range n.known {
		before[uuid] = *known
	}
	return &sweep{node: n, reader: r, count: count, before: before, seen: map[string]bool{}, failed: map[int]gpu.Health{}}, nil
}

// whyNoScan returns why no scan can begin now.
func (n *Node) whyNoScan() error {
	if n.session != nil && n.session.suspended.Load() {
		return errSuspended
	}
	if paused := n.paused.Load(); paused != nil {
		return paused
	}
	return n.whyNoCall()
}

// whyNoCall returns errSilent while a call that concerns no single GPU has not returned.
func (n *Node) whyNoCall() error {
	if n.callEnded(wholeDriver) {
		return nil
	}
	return errSilent
}

// readDriver reads the versions and counts the GPUs.
func (r *reader) readDriver() (count int, err error) {
	library := r.session.library
	version, ret := library.SystemGetDriverVersion()
	if ret != gonvml.SUCCESS {
		return 0, &NoDriverError{Cause: fmt.Errorf("read driver version: %w", returnError{ret})}
	}
	r.lib, r.driver = device.New(library), version
	if cuda, ret := library.SystemGetCudaDriverVersion(); ret == gonvml.SUCCESS {
		// cuda.h: 1000 * major + 10 * minor.
		r.cuda = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	if count, ret = library.DeviceGetCount(); ret != gonvml.SUCCESS {
		return 0, &NoDriverError{Cause: fmt.Errorf("count GPUs: %w", returnError{ret})}
	}
	return count, nil
}

// reading is a visit of one GPU in a goroutine of its own. It may never end.
type reading struct {
	since time.Time
	// result has room for the visit.
	result chan visit
	// outdated is set if the driver has been found again since.
	outdated bool
}

// scanPatience is how long a scan waits for GPUs that are known. It then goes on without those that have not answered, so that one that
// hangs does not delay what is known of the others.
const scanPatience = time.Second

// slowFactor is how many halves of the patience a visit may take before its GPU is unreachable: GPUs are slow while others are partitioned.
const slowFactor = 3

// visitAll visits all GPUs at the same time. A GPU that does not answer keeps its known state, and is unreachable after some time. It gets no
// other call until the visit ends; the scan that finds the visit ended takes its result.
func (s *sweep) visitAll(ctx context.Context, deep bool) {
	readings := map[int]reading{}
	patience := min(scanPatience, s.node.options.patience)
	if s.count != len(s.node.places) {
		// A GPU appeared or vanished: an index may be another GPU's. A reading that has not ended is forgotten, and ends by itself.
		s.node.places, patience = make([]string, s.count), s.node.options.patience
		clear(s.node.slow)
	}
	for index := range s.count {
		if s.skipOperating(index) {
			continue
		}
		r, slow := s.node.slow[index]
		if !slow {
			r = s.startVisit(index, deep)
		}
		readings[index] = r
	}
	limit := time.NewTimer(patience)
	defer limit.Stop()
	over := false
	for _, index := range slices.Sorted(maps.Keys(readings)) {
		r := readings[index]
		if _, slow := s.node.slow[index]; slow || over {
			s.awaitVisit(ctx, index, r, nil)
			continue
		}
		over = !s.awaitVisit(ctx, index, r, limit.C)
	}
}

// awaitVisit takes the result of a reading, and returns false if limit passed first. A nil limit has passed.
func (s *sweep) awaitVisit(ctx context.Context, index int, r reading, limit <-chan time.Time) bool {
	_, slow := s.node.slow[index]
	if limit == nil {
		ready := make(chan time.Time)
		close(ready)
		limit = ready
	}
	var v visit
	select {
	case v = <-r.result:
	default:
		select {
		case v = <-r.result:
		case <-limit:
			s.node.slow[index] = r
			s.recordNoAnswer(index, r)
			return false
		}
	}
	delete(s.node.slow, index)
	if r.outdated {
		s.recordNoAnswer(index, r)
		return true
	}
	if slow {
		v.device = nil // of a session that has ended
		s.node.renewed = true
	}
	s.recordVisit(ctx, index, v)
	return true
}

// startVisit starts a visit within its own use of the session.
func (s *sweep) startVisit(index int, deep bool) reading {
	r := reading{since: time.Now(), result: make(chan visit, 1)}
	session, reader := s.node.session, s.reader
	session.join()
	go func() {
		v := reader.visit(index, deep, s.lastKnown)
		session.close()
		r.result <- v
	}()
	return r
}

// recordNoAnswer is for a GPU that has not answered yet.
func (s *sweep) recordNoAnswer(index int, r reading) {
	if time.Since(r.since) >= slowFactor*s.node.options.patience/2 {
		s.failed[index] = gpu.Health{Reason: gpu.ReasonUnreachable, Message: errNoAnswer.Error()}
		return
	}
	if uuid, known := s.knownAt(index); known {
		s.seen[uuid] = true
	} else {
		s.silent = true
	}
}

// knownAt returns the known GPU at an index.
func (s *sweep) knownAt(index int) (uuid string, known bool) {
	uuid = s.node.places[index]
	_, known = s.before[uuid]
	return uuid, known
}

// skipOperating skips a GPU with a running operation, because a call about it may wait for the operation. The GPU keeps its known state.
func (s *sweep) skipOperating(index int) bool {
	uuid, known := s.knownAt(index)
	if !known || !s.node.operating(uuid) {
		return false
	}
	s.seen[uuid] = true
	return true
}

func (s *sweep) recordVisit(ctx context.Context, index int, v visit) {
	switch {
	case v.skip:
		return
	case v.ret != gonvml.SUCCESS:
		s.failed[index] = healthOf(v.ret, "looking it up")
		klog.FromContext(ctx).V(4).Info("Cannot read the identity of a GPU", "index", index, "answer", v.ret.Error())
		return
	}
	known := v.known
	known.gpu.Index = index
	g := known.gpu
	if !slices.Equal(known.unreadable, s.before[g.UUID].unreadable) {
		klog.FromContext(ctx).Info("The set of unreadable MIG data of a GPU changed",
			"uuid", g.UUID, "minor", g.Minor, "unreadable", known.unreadable)
	}
	s.seen[g.UUID] = true
	s.node.known[g.UUID], s.node.places[index] = &known, g.UUID
	if !readable(g) {
		return
	}
	known.read = v.began
	if v.device != nil {
		s.endpoints = append(s.endpoints, endpoint{uuid: g.UUID, pci: g.PCIBusID, device: v.device})
	}
}

// needsSession reports whether the driver would shut a GPU down without a session.
func (s *sweep) needsSession() bool {
	for uuid := range s.seen {
		if s.node.known[uuid].deinitialises {
			return true
		}
	}
	return false
}

// recordMissing handles known GPUs that were not enumerated. It drops one whose minor number belongs to another GPU: it was replaced,
// and both would be published under one name.
func (s *sweep) recordMissing() {
	minors := map[int]bool{}
	for uuid := range s.seen {
		minors[s.node.known[uuid].gpu.Minor] = true
	}
	for uuid, known := range s.node.known {
		switch {
		case s.seen[uuid]:
		case minors[known.gpu.Minor]:
			delete(s.node.known, uuid)
		case s.silent:
		default:
			known.gpu.Health = s.whyMissing(known.gpu)
		}
	}
}

// whyMissing returns why a known GPU was not enumerated: an index that failed at its earlier position counts as this GPU. Otherwise
// NVML may still have its UUID and report it as lost.
func (s *sweep) whyMissing(g gpu.GPU) gpu.Health {
	if health, failed := s.failed[g.Index]; failed {
		delete(s.failed, g.Index)
		return health
	}
	ret, err := attempt(s.node, "absence of "+g.UUID, s.node.session, func() (gonvml.Return, error) {
		_, ret := s.reader.session.library.DeviceGetHandleByUUID(g.UUID)
		return ret, nil
	}, nil)
	if err != nil {
		return gpu.Health{Reason: gpu.ReasonUnreachable, Message: err.Error()}
	}
	if ret == gonvml.SUCCESS || ret == gonvml.ERROR_NOT_FOUND || unsupported(ret) {
		return gpu.Health{Reason: gpu.ReasonMissing, Message: "the driver no longer enumerates the GPU"}
	}
	return healthOf(ret, "looking it up")
}

// updateTopology reads the topology if a GPU answers that did not answer when it was last read. A GPU that does not answer in time takes part
// later. A scan waits for one such GPU only, because its calls about another GPU may hang, too.
func (s *sweep) updateTopology() {
	before := s.node.topology
	if before.pairs != nil && !slices.ContainsFunc(s.endpoints, func(e endpoint) bool { return !before.of[e.uuid] }) {
		return
	}
	waited := false
	s.node.topology = readTopology(s.endpoints, before, func(e endpoint, others []endpoint) (l links, answered bool) {
		about := "connections of " + e.uuid
		if waited || !s.node.callEnded(about) {
			return links{}, false
		}
		l, err := attempt(s.node, about, s.node.session, func() (links, error) { return readLinks(e, others), nil }, nil)
		waited = err != nil
		return l, err == nil
	})
}

// errNoAnswer means that a call into the driver took too long.
var errNoAnswer = errors.New("the GPU does not answer")

// wholeDriver is the key of calls that concern no single GPU: opening the session and counting the GPUs.
const wholeDriver = "driver"

// attempt makes a driver call about a GPU or the driver, within its own use of the session unless s is nil. The call may never return, so
// attempt stops waiting after a timeout. The call continues in its goroutine. Until it ends, attempt starts no other call with the same
// key. If undo is not nil, it receives the late result. Calls with one key must not be concurrent.
func attempt[T any](n *Node, about string, s *session, call func() (T, error), undo func(T)) (T, error) {
	return attemptFor(n, n.options.patience, about, s, call, undo)
}

// attemptFor is attempt with its own timeout.
func attemptFor[T any](n *Node, limit time.Duration, about string, s *session, call func() (T, error), undo func(T)) (T, error) {
	if !n.callEnded(about) {
		var none T
		return none, errNoAnswer
	}
	if s != nil {
		s.join()
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), limit, errNoAnswer)
	defer cancel()
	ended := make(chan struct{})
	value, err := await(ctx, func(answer func(T, error) bool) {
		defer close(ended)
		value, err := call()
		if s != nil {
			s.close()
		}
		if !answer(value, err) && err == nil && undo != nil {
			undo(value)
		}
	})
	if errors.Is(err, errNoAnswer) {
		n.lateMu.Lock()
		defer n.lateMu.Unlock()
		n.late[about] = ended
		return value, errNoAnswer
	}
	return value, err
}

// endSessionUse ends a use of the session or its hold. Both may call Shutdown, which may hang like any other call; the driver as a whole does not
// answer until it returns. Under n.scanning, without a late call about the whole driver.
func (n *Node) endSessionUse(how func(*session)) {
	s := n.session
	_, _ = attempt(n, wholeDriver, nil, func() (struct{}, error) { how(s); return struct{}{}, nil }, nil) // the next scan reports it
}

// callEnded reports whether no call about a GPU or the driver continues after its timeout.
func (n *Node) callEnded(about string) bool {
	n.lateMu.Lock()
	defer n.lateMu.Unlock()
	return n.callEndedLocked(about)
}

// callEndedLocked is callEnded, under n.lateMu.
func (n *Node) callEndedLocked(about string) bool {
	select {
	case <-n.late[about]:
		delete(n.late, about)
		return true
	default:
		return n.late[about] == nil
	}
}

// removeEndedCalls removes calls that returned after their timeout, so that the next scan calls again.
func (n *Node) removeEndedCalls() {
	n.lateMu.Lock()
	defer n.lateMu.Unlock()
	for about := range n.late {
		if n.callEndedLocked(about) {
			n.renewed = true
		}
	}
}

// traces returns the driver's traces in the file system. They change when the driver is removed, upgraded or loaded again, or when
// device nodes come, go or change their numbers.
func (o Options) traces(l layout) string {
	all := fmt.Sprintln(o.moduleVersion(), o.majors())
	var file unix.Stat_t
	if unix.Stat(l.library, &file) == nil {
		all += fmt.Sprintln(file.Size, file.Mtim, file.Dev, file.Ino)
	}
	for _, node := range deviceNodes(o.onHost(l.devRoot)) {
		if unix.Lstat(node, &file) == nil {
			all += fmt.Sprintf("%s=%x ", filepath.Base(node), file.Rdev)
		}
	}
	return all + o.traceExtras(l.devRoot)
}

// driverMoved reports whether another driver is to be used. It costs as much as the health of eight GPUs.
func (o Options) driverMoved(l layout) bool {
	now, err := o.locate()
	return err == nil && (now.library != l.library || now.devRoot != l.devRoot)
}

// settle merges changes: a driver installs many files.
const settle = 200 * time.Millisecond

// watch reports changes of the driver's files and device nodes between the regular scans.
func (n *Node) watch(ctx context.Context) *filewatch.Watcher {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	dev := filepath.Join(n.options.onHost(n.layout.devRoot), "dev")
	return filewatch.New(ctx, filewatch.Options{
		// Nodes come and go with partitions in the last one.
		Dirs:     []string{dev, filepath.Dir(n.layout.library), filepath.Join(dev, "nvidia-caps")},
		Interval: n.options.Interval, Settle: settle,
		Relevant: func(event fsnotify.Event) bool {
			name := filepath.Base(event.Name)
			return strings.HasPrefix(name, "nvidia") || strings.HasPrefix(name, "libnvidia-ml.so")
		},
	})
}
