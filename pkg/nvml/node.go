// SPDX-License-Identifier: Apache-2.0

// Package nvml is the only package that calls the NVIDIA driver. It finds the driver on the node, reads the GPUs and their state, and
// returns what a container needs to use one. No package above it imports an NVIDIA module. Tests and simulated machines replace the
// library by Options.OpenLibrary. The package writes no files but device nodes and their links (Options.CreateNodes).
//
// # Sessions
//
// An open NVML session keeps /dev/nvidia* open, and the kernel module cannot be unloaded meanwhile. A session that stays open would
// block driver upgrades, so a session lasts as long as one scan. The exception is a node where a GPU has persistence mode off: the
// driver de-initialises the GPU when the last session is closed, and opening one takes seconds. There the session stays open until the
// driver changes.
//
// # Driver upgrades
//
// A process binds the functions of libnvidia-ml.so once: go-nvml calls them as ordinary C symbols, and the dynamic linker
// neither unloads the library nor binds them again (seen with go-nvml v0.13.4-0 and glibc: a second library, opened by
// another path, still runs the first one's code). A replaced library therefore needs a new process. Node.Run then returns
// ErrDriverReplaced, and main executes itself again. Until then the old inventory is served.
//
// An old library may lack newer functions. A call of a missing function ends the process ("symbol lookup error"), so a guard looks up
// the symbols of such functions first.
package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/keylock"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
)

// Node has the GPUs of this node. All methods are safe for concurrent use.
type Node struct {
	options Options

	// scanning allows one scan at a time. Inventory and ContainerEdits do not wait for it.
	scanning sync.Mutex
	// attachment is written with both scanning and mu locked. Either lock suffices to read it.
	attachment
	traces string
	// loaded is the load of the kernel module that traces is of.
	loaded uint64
	// renewed is set when the driver was found again or a late call has returned. publish then notifies once and resets it.
	renewed bool
	known   map[string]*knownGPU
	// late contains the calls that have not returned since their timeout, by key: what they are about, wholeDriver, wholeEdits or
	// driverFiles. Under lateMu.
	lateMu sync.Mutex
	late   map[string]<-chan struct{}
	// slow contains the readings of GPUs that an earlier scan began and did not wait for, by index.
	slow map[int]reading
	// places are the UUIDs of the GPUs that NVML enumerates, by index, as last identified; empty for a GPU that never was.
	places  []string
	hotplug hotplug
	// loadTried is when the agent last tried to load nvidia-uvm, unloadable why that failed.
	loadTried  time.Time
	unloadable error
	topology   topology

	// paused is set between Pause and Resume.
	paused atomic.Pointer[PausedError]

	// turns allow one operation on a GPU at a time, by UUID, and one call of ContainerEdits, by wholeEdits.
	turns keylock.Locks[string]

	mu        sync.Mutex
	inventory gpu.Inventory
	// unidentified counts enumerated GPUs that are unknown and whose UUID or minor number cannot be read.
	unidentified int
	// failure is the error of the last scan. lacking is its error about a required IMEX channel that does not exist.
	failure, lacking error
	changed          broadcast.Signal
	// All by UUID: since is the start of the GPU's running operation, changes the number of changes by operations, reads the start of the
	// last successful reading that the inventory has.
	since   map[string]time.Time
	changes map[string]uint64
	endings endings
	// reported announces an XID.
	reported broadcast.Signal
	reads    map[string]time.Time
}

// knownGPU is the known data of a GPU.
type knownGPU struct {
	gpu gpu.GPU
	// complete is set once all attributes were read with the current driver, profiled once the profiles were.
	complete, profiled bool
	// condition is what its faults are read from.
	condition condition
	// unreadable lists the MIG data of the GPU that the last scan could not read.
	unreadable []string
	// read is when the last successful reading began.
	read time.Time
	// changes is the number of changes that it includes.
	changes uint64
	// deinitialises marks a GPU that the driver shuts down while no process has it open.
	deinitialises bool
}

// New has no visible effect. The inventory is empty, and operations fail, until a Scan has found the driver.
func New(options Options) *Node {
	return &Node{
		options: options.withDefaults(), failure: &NoDriverError{Cause: errors.New("not looked for yet")},
		known: map[string]*knownGPU{}, late: map[string]<-chan struct{}{}, slow: map[int]reading{},
		since: map[string]time.Time{}, changes: map[string]uint64{}, reads: map[string]time.Time{},
	}
}

// awaitInterval is the time between two searches for a missing driver: some dozens of stat calls. searchInterval is that between searches for
// a driver elsewhere while there is one.
const awaitInterval, searchInterval = time.Second, 30 * time.Second

// Inventory returns the result of the last scan. It never waits.
func (n *Node) Inventory() gpu.Inventory {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.inventory
}

// Missing returns why the inventory is empty: an ErrNoDriver, or a driver that finds no GPU. It returns nil while there is a GPU.
func (n *Node) Missing() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case len(n.inventory.GPUs) > 0:
		return nil
	case n.failure != nil:
		return n.failure
	case n.unidentified > 0:
		return fmt.Errorf("driver %s finds %d GPUs that do not report their UUID", n.inventory.DriverVersion, n.unidentified)
	}
	return fmt.Errorf("driver %s finds no GPU", n.inventory.DriverVersion)
}

// Changed returns a channel that is closed when the inventory, or what ContainerEdits or Missing answers, may have changed. Take
// it before reading.
func (n *Node) Changed() <-chan struct{} { return n.changed.Changed() }

// Run scans until ctx is done: once a second until a scan succeeds, then at each interval and when device nodes or driver files come or
// go. Between these scans it reads the health of the GPUs, once a second where that is cheap, and after each XID. Call Scan first: Run
// begins with a wait. Run returns nil when ctx is done, and ErrDriverReplaced when only a new process can use the driver.
func (n *Node) Run(ctx context.Context) error {
	defer n.release()
	n.mu.Lock()
	wait, failure := awaitInterval, n.failure
	n.mu.Unlock()
	var changed <-chan struct{}
	reported := n.reported.Changed()
	var pace pacer
	read := time.Now()    // when everything was read last
	searched := read      // when a driver elsewhere was looked for last
	var hurried time.Time // when an XID last caused a scan
	for {
		if changed == nil && failure == nil {
			watcher := n.watch(ctx)
			defer watcher.Close()
			changed = watcher.C
			wait = n.options.Interval / lightScans
		}
		deep := failure != nil
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		case <-changed:
			deep = true
		case <-reported:
			// One that comes from now on causes another scan: this one may not see what it means.
			reported = n.reported.Changed()
			if !broadcast.Sleep(ctx, max(xidDelay, xidInterval-time.Since(hurried))) {
				return nil
			}
			hurried = time.Now()
		}
		// A little early rather than an interval late.
		deep = deep || time.Since(read)+wait/2 >= n.options.Interval
		if deep {
			read = time.Now()
		}
		search := deep && time.Since(searched) >= searchInterval
		if search {
			searched = time.Now()
		}
		before := cpuTime()
		if failure = n.scanOnce(ctx, deep, search); failure != nil && !errors.Is(failure, ErrNoDriver) {
			return failure
		}
		if changed != nil {
			wait = pace.wait(cpuTime()-before, n.options.Interval)
		}
	}
}

// Scan searches for the driver if there was none, and otherwise reads the driver and the GPUs, once. Run calls it; a caller that
// caused a change may call it too. After an ErrNoDriver all GPUs are unhealthy.
func (n *Node) Scan(ctx context.Context) error { return n.scanOnce(ctx, true, true) }

// scanOnce is Scan. Without deep it reads only the health of GPUs that are known, without search it looks for no driver elsewhere.
func (n *Node) scanOnce(ctx context.Context, deep, search bool) error {
	n.scanning.Lock()
	defer n.scanning.Unlock()
	err := n.whyNoScan()
	if err == nil {
		err = n.reattach(deep, search)
	}
	if err == nil && deep {
		n.replug()
	}
	if err == nil {
		err = n.scan(ctx, deep)
	}
	if err != nil && !errors.Is(err, ErrDriverReplaced) && !errors.Is(err, errSuspended) {
		n.unreachable(ctx, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if errors.Is(err, errSuspended) {
		return n.failure // a reset takes longer than a scan may: all stays as it was
	}
	if fmt.Sprint(err) != fmt.Sprint(n.failure) {
		n.changed.Notify()
		if answer, ok := errors.AsType[returnError](err); ok && answer.ret == gonvml.ERROR_DRIVER_NOT_LOADED {
			n.endAllXIDs()
		}
	}
	n.failure = err
	return err
}

// attach finds the driver and opens its library.
func (n *Node) attach() error {
	l, err := n.options.locate()
	if err != nil {
		return err
	}
	library, err := n.options.openLibrary(l)
	if err != nil {
		return err
	}
	caps, err := readCapabilities(n.options.ProcRoot)
	if err != nil {
		return &NoDriverError{Cause: err}
	}
	n.loaded, n.traces = n.options.moduleLoad(0), n.options.traces(l)
	before := n.session
	n.mu.Lock()
	n.attachment = attachment{&session{library: library, paused: &n.paused}, l, caps, n.options.majors()}
	n.mu.Unlock()
	if before != nil {
		before.idle.Notify() // goroutines that wait for the old session use the new one
	}
	for _, known := range n.known {
		known.complete, known.profiled, known.condition = false, false, condition{}
	}
	n.topology.of = nil
	for index, r := range n.slow {
		r.outdated = true
		n.slow[index] = r
	}
	n.renewed = true
	return nil
}

// reattach attaches if nothing is attached, and again if the driver has changed. Without deep it looks only whether the kernel module was
// unloaded or loaded again: Run watches files and device nodes, and their changes cause a deep scan.
func (n *Node) reattach(deep, search bool) error {
	if n.session != nil {
		loaded := n.options.moduleLoad(n.loaded)
		if !deep && loaded == n.loaded {
			return nil
		}
		n.loaded = loaded
		if n.options.traces(n.layout) == n.traces && !(search && n.options.driverMoved(n.layout)) {
			return nil
		}
		n.endSessionUse(func(s *session) { s.setHold(false) })
	}
	return n.attach()
}

// scan reads all GPUs and publishes the result.
func (n *Node) scan(ctx context.Context, deep bool) error {
	n.loadUVM(ctx)
	s, err := n.startSweep()
	if err != nil {
		return err
	}
	defer n.endSessionUse((*session).close)
	s.reader.control = s.reader.ensureControlDevices(n.unloadable)
	s.visitAll(ctx, deep)
	s.recordMissing()
	s.updateTopology()
	n.removeEndedCalls()
	n.session.setHold(s.needsSession())
	n.publish(ctx, s.reader.driver, len(s.failed))
	return nil
}

// unreachable marks all GPUs as unhealthy, because the driver is away. A pause is no fault, and ends none.
func (n *Node) unreachable(ctx context.Context, cause error) {
	paused, isPaused := errors.AsType[*PausedError](cause)
	for _, known := range n.known {
		switch {
		case !isPaused:
			known.gpu.Health = gpu.Health{Reason: gpu.ReasonUnreachable, Message: cause.Error()}
		case known.gpu.Health.Class() == gpu.FaultNone:
			known.gpu.Health = paused.health() // until the GPU answers again
		}
	}
	n.publish(ctx, n.Inventory().DriverVersion, n.unidentified)
}

// publish publishes and logs changes.
func (n *Node) publish(ctx context.Context, driver string, unidentified int) {
	lacking := n.options.missingChannel(n.layout.devRoot)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lacking = lacking
	next := gpu.Inventory{DriverVersion: driver}
	for _, known := range n.known {
		n.applyOperations(known)
		g := known.gpu
		g.NVLinkDomain = n.topology.domains[g.UUID]
		n.withdraw(&g)
		next.GPUs = append(next.GPUs, g)
		n.reads[g.UUID] = known.read
	}
	slices.SortFunc(next.GPUs, func(a, b gpu.GPU) int {
		return cmp.Or(cmp.Compare(a.Minor, b.Minor), strings.Compare(a.UUID, b.UUID))
	})
	next.Links = n.topology.matrix(next.GPUs)
	if unidentified != n.unidentified {
		klog.FromContext(ctx).Info("Number of unidentified GPUs changed", "before", n.unidentified, "now", unidentified)
		n.unidentified, n.renewed = unidentified, true
	}
	if reflect.DeepEqual(n.inventory, next) && !n.renewed {
		return
	}
	n.renewed = false
	n.logHealth(ctx, next)
	n.inventory = next
	n.changed.Notify()
}

// logHealth logs which GPUs became unhealthy or healthy.
func (n *Node) logHealth(ctx context.Context, next gpu.Inventory) {
	logger := klog.FromContext(ctx)
	for _, g := range next.GPUs {
		before, _ := n.inventory.ByUUID(g.UUID)
		if before.Health == g.Health {
			continue
		}
		if g.Health.Healthy() {
			logger.Info("GPU is healthy again", "uuid", g.UUID, "minor", g.Minor, "before", before.Health.Reason)
			continue
		}
		logger.Info("GPU is unhealthy", "uuid", g.UUID, "minor", g.Minor, "reason", g.Health.Reason, "message", g.Health.Message)
	}
}

// matrix returns the pairs in the form of device.Inventory; nil while nothing is known.
func (t topology) matrix(gpus []gpu.GPU) [][]gpu.Pair {
	if t.pairs == nil {
		return nil
	}
	links := make([][]gpu.Pair, len(gpus))
	for i := range gpus {
		links[i] = make([]gpu.Pair, len(gpus))
		for j := range gpus {
			if i != j {
				links[i][j] = t.pairs[keyOf(gpus[i].UUID, gpus[j].UUID)]
			}
		}
	}
	return links
}
