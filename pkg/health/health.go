// SPDX-License-Identifier: Apache-2.0

// Package health decides the health of the node's devices. It takes what the hardware reports and the XIDs that have not ended, ignores
// what the node configuration ignores, and adds what the driver does not know: whether a container can be given the device, and whether
// the ledger could record who has it. If one of them is not possible, the device is not offered: a failed Allocate fails its pod for
// good, though another node could have run it.
package health

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/regarding"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Handover hands GPUs over from one holder to the next. *handover.Cleaner implements it. All methods answer from memory.
type Handover interface {
	// Unclean returns why a GPU gets no new holder before it is clean; nil if it is.
	Unclean(uuid string) error
	Changed() <-chan struct{}
}

// Specs are the CDI specs. *cdi.Specs implements it. All methods answer from memory.
type Specs interface {
	// Problem returns why no container can be given a device.
	Problem(uuid string) error
	// Unwritable returns why a partition that does not exist yet could not be given to a container.
	Unwritable() error
	Changed() <-chan struct{}
}

// Ledger records who has a device. *ledger.Ledger implements it.
type Ledger interface {
	// Probe checks whether new holds can be recorded. It takes microseconds.
	Probe()
	// Unwritable returns what the last check found.
	Unwritable() error
	Changed() <-chan struct{}
}

// Hardware reports XIDs. *nvml.Node implements it.
type Hardware interface {
	// WatchXIDs calls handle for each XID until ctx is done, and then returns nil.
	WatchXIDs(ctx context.Context, handle func(device.XIDEvent)) error
	// LastRead returns when the reading of the GPU began that the inventory of the Source has. An inventory taken later has this reading, or
	// a later one.
	LastRead(uuid string) time.Time
}

// Config of an Inventory. All fields are required.
type Config struct {
	// Source has the devices as the driver and the node configuration describe them.
	device.Source
	Hardware Hardware
	Handover Handover
	// Records must be loaded before the first call of Inventory.
	Records *Records
	// CountsXID reports whether an XID makes its device unhealthy. Action returns what to do about a fault of a GPU or its partitions. Both
	// must be pure.
	CountsXID func(xid int) bool
	Action    func(gpu device.GPU, fault device.Health) device.FaultAction
	// ResetIdle resets a GPU that has no holder. It does nothing if it has one.
	ResetIdle func(ctx context.Context, uuid string) (done bool, err error)
	Specs     Specs
	Ledger    Ledger
	NodeName  string
	// Recorder receives events on the node.
	Recorder   record.EventRecorder
	Registerer prometheus.Registerer
}

// interval is how often the ledger is probed. Only a problem that lasts longer is reported: a new partition has no CDI entry for some
// milliseconds.
const interval = time.Second

// Inventory is the source's inventory with the health that this package decides. Make it with New. Inventory and Changed are safe for
// concurrent use, answer from memory, and do not block.
type Inventory struct {
	config   Config
	interval time.Duration
	xids     *keeper
	metrics  *metrics
	changed  broadcast.Signal
	resets   resets
}

// New has no visible effect but its metrics. It panics if they are registered already.
func New(c Config) *Inventory {
	m := newMetrics(c.Registerer)
	return &Inventory{config: c, interval: interval, metrics: m, xids: newKeeper(c.Records, c.CountsXID, m.xids)}
}

// Changed returns a channel that is closed when Inventory may answer differently, as long as Run runs. Take it before you call Inventory.
func (i *Inventory) Changed() <-chan struct{} { return i.changed.Changed() }

// Inventory returns the source's inventory with the decided health. A device that works but cannot be given to a holder is unhealthy.
func (i *Inventory) Inventory() device.Inventory {
	inv := i.config.Inventory()
	cloned := false
	for at, gpu := range inv.GPUs {
		if i.complete(&gpu) {
			if !cloned {
				inv.GPUs, cloned = slices.Clone(inv.GPUs), true
			}
			inv.GPUs[at] = gpu
		}
	}
	return inv
}

// WithoutCDI is the same inventory for holders that are given devices without CDI: what is wrong with the specs does not count. Run makes
// its Changed work, too.
func (i *Inventory) WithoutCDI() device.Source { return withoutCDI{i} }

type withoutCDI struct{ of *Inventory }

func (w withoutCDI) Changed() <-chan struct{} { return w.of.Changed() }

func (w withoutCDI) Inventory() device.Inventory {
	config := w.of.config
	config.Specs = noSpecs{}
	return (&Inventory{config: config, xids: w.of.xids}).Inventory()
}

type noSpecs struct{}

func (noSpecs) Problem(string) error     { return nil }
func (noSpecs) Unwritable() error        { return nil }
func (noSpecs) Changed() <-chan struct{} { return nil }

// complete completes the health of a GPU and its partitions, and reports whether it changed anything.
func (i *Inventory) complete(gpu *device.GPU) (changed bool) {
	before := gpu.Health
	whole, inPartition := i.xids.of(*gpu)
	own := before
	if err := i.config.Handover.Unclean(gpu.UUID); err != nil && own.Healthy() {
		own = device.Health{Reason: device.ReasonNotClean, Message: err.Error()}
	}
	if !own.Healthy() || len(gpu.Faults) > 0 || len(whole) > 0 {
		gpu.Health = i.effective(*gpu, slices.Concat([]device.Health{own}, gpu.Faults, whole))
	}
	if gpu.Health.Healthy() {
		gpu.Health = i.healthOf(*gpu)
	}
	changed = gpu.Health != before
	cloned := false
	for at, p := range gpu.Partitions {
		health := i.effective(*gpu, append([]device.Health{p.Health}, inPartition(p)...))
		// Prepare writes the entry of a partition that it makes, and no other holder gets the partition.
		if health.Healthy() && gpu.Health.Healthy() && !p.Made && p.UUID != "" {
			if err := i.config.Specs.Problem(p.UUID); err != nil {
				health = notInjectable(err)
			}
		}
		if health == p.Health {
			continue
		}
		if !cloned {
			gpu.Partitions, changed, cloned = slices.Clone(gpu.Partitions), true, true
		}
		gpu.Partitions[at].Health = health
	}
	return changed
}

// effective returns the worst of the faults that the node configuration does not ignore.
func (i *Inventory) effective(gpu device.GPU, faults []device.Health) device.Health {
	counting := faults[:0]
	for _, fault := range faults {
		switch action := i.action(gpu, fault); {
		case fault.Healthy() || action == device.FaultIgnore:
			continue
		case action == device.FaultNoExecute:
			fault.Evict = true
		}
		counting = append(counting, fault)
	}
	return device.Worst(counting...)
}

// action returns what to do about a fault. A reason that is no fault of the hardware cannot be ignored.
func (i *Inventory) action(gpu device.GPU, fault device.Health) device.FaultAction {
	if fault.Class() == device.FaultNone {
		return device.FaultNoSchedule
	}
	return i.config.Action(gpu, fault)
}

// healthOf returns the health of a GPU that works.
func (i *Inventory) healthOf(gpu device.GPU) device.Health {
	if err := i.config.Ledger.Unwritable(); err != nil {
		return device.Health{Reason: device.ReasonNotRecordable, Message: err.Error()}
	}
	var err error
	if gpu.Dynamic {
		err = i.config.Specs.Unwritable()
	}
	if !gpu.MIGEnabled {
		err = cmp.Or(err, i.config.Specs.Problem(gpu.UUID))
	}
	if err != nil {
		return notInjectable(err)
	}
	return device.Health{}
}

func notInjectable(err error) device.Health {
	return device.Health{Reason: device.ReasonNotInjectable, Message: err.Error()}
}

// Run follows the hardware, the specs and the ledger, and reports problems, until ctx is done. One call at a time.
func (i *Inventory) Run(ctx context.Context) error {
	i.xids.begin(ctx)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return i.config.Hardware.WatchXIDs(ctx, func(e device.XIDEvent) { i.xids.take(ctx, e) })
	})
	i.resets.of = map[string]attempts{}
	group.Go(func() error { return i.follow(ctx, group) })
	return group.Wait()
}

// follow looks again after changes, once an interval while there are XIDs, and probes the ledger once an interval.
func (i *Inventory) follow(ctx context.Context, group *errgroup.Group) error {
	ticker := time.NewTicker(i.interval)
	defer ticker.Stop()
	var seen, before, reported string
	known := map[device.Ref]device.Health{}
	var found map[device.Health][]string
	var unwritable error
	inputs := [...]func() <-chan struct{}{i.config.Changed, i.config.Handover.Changed, i.config.Specs.Changed, i.xids.Changed}
	var changed [len(inputs)]<-chan struct{}
	for at, next := range inputs {
		changed[at] = next()
	}
	i.changed.Notify() // they may have changed since Inventory was first read
	for first := true; ; first = false {
		// An XID ends at a reading of its GPU, which is no change of the source.
		looks := first || i.xids.any()
		// Each change is announced, whatever woke the loop. Readers may have read an XID that the review below ends at once.
		for at, next := range inputs {
			if broadcast.Happened(changed[at]) {
				changed[at], looks = next(), true
				i.changed.Notify()
			}
		}
		ledger := i.config.Ledger.Changed()
		if now := i.config.Ledger.Unwritable(); fmt.Sprint(now) != fmt.Sprint(unwritable) {
			unwritable, looks = now, true
		}
		if looks {
			inventory := i.review(ctx)
			found = problems(inventory)
			if now := fmt.Sprint(found); now != seen {
				seen = now
				i.changed.Notify()
			}
			if next := healthOfAll(inventory); !maps.Equal(known, next) {
				i.changed.Notify()
				i.reportHealth(ctx, inventory, known)
				known = next
			}
			i.metrics.set(inventory)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed[0]:
		case <-changed[1]:
		case <-changed[2]:
		case <-changed[3]:
		case <-ledger:
		case <-ticker.C:
			i.config.Ledger.Probe()
			if seen == before && seen != reported {
				i.report(ctx, found)
				reported = seen
			}
			before = seen
			if len(known) > 0 || i.resets.any() {
				i.resetIdle(ctx, group)
			}
		}
	}
}

// review ends XIDs that are over, and returns the inventory after that.
func (i *Inventory) review(ctx context.Context) device.Inventory {
	reads := map[string]time.Time{}
	for _, g := range i.config.Inventory().GPUs {
		reads[g.UUID] = i.config.Hardware.LastRead(g.UUID)
	}
	// An inventory that is taken after it has what was read then, or later.
	i.xids.review(ctx, i.config.Inventory(), reads)
	return i.Inventory()
}

// problems returns the names of the devices that work but cannot be given to a holder, by the reason.
func problems(inventory device.Inventory) map[device.Health][]string {
	found := map[device.Health][]string{}
	for _, d := range inventory.Devices() {
		if own := ownHealth(d); own.Reason == device.ReasonNotInjectable || own.Reason == device.ReasonNotRecordable {
			found[own] = append(found[own], d.Name())
		}
	}
	return found
}

func (i *Inventory) report(ctx context.Context, found map[device.Health][]string) {
	i.metrics.unusable.Reset()
	if len(found) == 0 {
		klog.FromContext(ctx).Info("All working devices can be given to containers and recorded")
		return
	}
	for _, why := range slices.SortedFunc(maps.Keys(found), func(a, b device.Health) int { return strings.Compare(a.Message, b.Message) }) {
		names := found[why]
		i.metrics.unusable.WithLabelValues(why.Reason).Add(float64(len(names)))
		klog.FromContext(ctx).Info("Devices that work are not offered", "devices", names, "reason", why.Reason, "message", why.Message)
		reason, what, also := "DeviceNotInjectable", "containers cannot be given them", " If an IMEX channel is missing, create it."
		if why.Reason == device.ReasonNotRecordable {
			reason, what, also = "DeviceNotRecordable", "the run directory cannot be written", ""
		}
		i.config.Recorder.Eventf(i.node(), corev1.EventTypeWarning, reason,
			"Not offering %s, because %s: %s. Make the path writable, and free space or inodes on its disk.%s The agent then offers them within seconds",
			regarding.Some(names), what, why.Message, also)
	}
}

func (i *Inventory) node() *corev1.ObjectReference { return regarding.Node(i.config.NodeName) }
