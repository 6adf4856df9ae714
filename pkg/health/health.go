// SPDX-License-Identifier: Apache-2.0

// Package health completes the health of the node's devices by what the driver does not know: whether a container can be given the device,
// and whether the ledger could record who has it. A device without either is not offered: a failed Allocate fails its pod for good,
// though another node could have run it.
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
	"github.com/prometheus/client_golang/prometheus/promauto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Source is the inventory as the driver reports it. Changed returns a channel that is closed at the next change; it is taken before
// reading.
type Source interface {
	Inventory() device.Inventory
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

// Config of an Inventory. All fields are required.
type Config struct {
	Source
	Specs    Specs
	Ledger   Ledger
	NodeName string
	// Recorder receives events on the node.
	Recorder   record.EventRecorder
	Registerer prometheus.Registerer
}

// interval is how often the ledger is probed. A problem is reported when it lasts longer: the entry of a new partition takes some
// milliseconds.
const interval = time.Second

// Inventory is the source's inventory with the completed health. Make it with New. Inventory and Changed are safe for concurrent use, answer
// from memory, and do not block.
type Inventory struct {
	config   Config
	interval time.Duration
	unusable *prometheus.GaugeVec
	changed  broadcast.Signal
}

// New has no visible effect but its metric. It panics if that is registered already.
func New(c Config) *Inventory {
	return &Inventory{config: c, interval: interval, unusable: promauto.With(c.Registerer).NewGaugeVec(prometheus.GaugeOpts{
		Name: "tandem_unusable_devices",
		Help: "Devices that work and are not offered, by reason: NotInjectable (their CDI device or the hook cannot be written), " +
			"NotRecordable (the run directory cannot be written).",
	}, []string{"reason"})}
}

// Changed returns a channel that is closed when Inventory may answer differently, as long as Run runs. Take it before you call Inventory.
func (i *Inventory) Changed() <-chan struct{} { return i.changed.Changed() }

// Inventory returns the source's inventory. A device that works and cannot be given to a holder is unhealthy.
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
func (i *Inventory) WithoutCDI() Source { return withoutCDI{i} }

type withoutCDI struct{ of *Inventory }

func (w withoutCDI) Changed() <-chan struct{} { return w.of.Changed() }

func (w withoutCDI) Inventory() device.Inventory {
	config := w.of.config
	config.Specs = noSpecs{}
	return (&Inventory{config: config}).Inventory()
}

// noSpecs have no problem.
type noSpecs struct{}

func (noSpecs) Problem(string) error     { return nil }
func (noSpecs) Unwritable() error        { return nil }
func (noSpecs) Changed() <-chan struct{} { return nil }

// complete completes the health of a GPU and its partitions, and reports whether it changed anything.
func (i *Inventory) complete(gpu *device.GPU) (changed bool) {
	if !gpu.Health.Healthy() {
		return false
	}
	if gpu.Health = i.healthOf(*gpu); !gpu.Health.Healthy() {
		return true
	}
	for at, p := range gpu.Partitions {
		// Prepare writes the entry of a partition that it makes, and no other holder gets the partition.
		if p.Made || p.UUID == "" || !p.Health.Healthy() {
			continue
		}
		if err := i.config.Specs.Problem(p.UUID); err != nil {
			if !changed {
				gpu.Partitions, changed = slices.Clone(gpu.Partitions), true
			}
			gpu.Partitions[at].Health = notInjectable(err)
		}
	}
	return changed
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

// Run follows the source, the specs and the ledger, and reports problems, until ctx is done. One call at a time.
func (i *Inventory) Run(ctx context.Context) error {
	ticker := time.NewTicker(i.interval)
	defer ticker.Stop()
	var seen, before, reported string
	for {
		source, specs, ledger := i.config.Changed(), i.config.Specs.Changed(), i.config.Ledger.Changed()
		found := i.problems()
		if now := fmt.Sprint(found); now != seen {
			seen = now
			i.changed.Notify()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-source:
		case <-specs:
		case <-ledger:
		case <-ticker.C:
			i.config.Ledger.Probe()
			if seen == before && seen != reported {
				i.report(ctx, found)
				reported = seen
			}
			before = seen
		}
		select {
		case <-source: // also if something else woke Run
			i.changed.Notify()
		default:
		}
	}
}

// problems returns the names of the devices that work and cannot be given to a holder, by why.
func (i *Inventory) problems() map[device.Health][]string {
	found := map[device.Health][]string{}
	for _, d := range i.Inventory().Devices() {
		own := d.GPU.Health
		if !d.Whole() {
			own = d.Partition.Health
		}
		if own.Reason == device.ReasonNotInjectable || own.Reason == device.ReasonNotRecordable {
			found[own] = append(found[own], d.Name())
		}
	}
	return found
}

// namedDevices is how many devices an event names.
const namedDevices = 4

func (i *Inventory) report(ctx context.Context, found map[device.Health][]string) {
	i.unusable.Reset()
	if len(found) == 0 {
		klog.FromContext(ctx).Info("All devices that work can be given to containers")
		return
	}
	for _, why := range slices.SortedFunc(maps.Keys(found), func(a, b device.Health) int { return strings.Compare(a.Message, b.Message) }) {
		names := found[why]
		i.unusable.WithLabelValues(why.Reason).Add(float64(len(names)))
		klog.FromContext(ctx).Info("Devices that work are not offered", "devices", names, "reason", why.Reason, "message", why.Message)
		text := strings.Join(names[:min(len(names), namedDevices)], ", ")
		if more := len(names) - namedDevices; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		reason, what := "DeviceNotInjectable", "the CDI spec or its hook cannot be written"
		if why.Reason == device.ReasonNotRecordable {
			reason, what = "DeviceNotRecordable", "the run directory cannot be written"
		}
		// kubectl describe node finds events by the node's name as UID, as kubelet records them.
		node := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: i.config.NodeName, UID: types.UID(i.config.NodeName)}
		i.config.Recorder.Eventf(node, corev1.EventTypeWarning, reason,
			"Not offering %s, because %s: %s. Make the path writable, and free space or inodes on its disk; the agent then offers them within seconds",
			text, what, why.Message)
	}
}
