// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Bounds of what is kept: a broken GPU may report many XIDs.
const (
	maxXIDs      = 16
	maxAddresses = 64
	// XIDs below knownXIDs have a value of their own in the metric. The others count as "other".
	knownXIDs = 1000
)

// quiet is the least time between an XID and a reading of the GPU that can end it. The driver logs some XIDs before it decides what the
// GPU needs.
const quiet = 1500 * time.Millisecond

// clockError is more than the kernel's log and the time may be apart. The log's clock is not corrected (printk.c, local_clock), so that
// they drift apart by up to some minutes in months.
const clockError = 10 * time.Minute

// keeper keeps the XIDs that have not ended, by PCI address. All methods are safe for concurrent use.
type keeper struct {
	broadcast.Signal
	records *Records
	// counts reports whether an XID makes its device unhealthy.
	counts func(xid int) bool
	total  *prometheus.CounterVec
	// started is when the agent began to take XIDs.
	started time.Time

	// writing serialises take and review, which write records. mu is never locked during a write: readers do not wait for the disk.
	writing sync.Mutex
	mu      sync.Mutex
	loading sync.Once
	gpus    map[string]xids
	// log is the record logKey. read is the number of the last line of the kernel's log that this agent has read.
	log  progress
	read uint64
}

func newKeeper(records *Records, counts func(int) bool, total *prometheus.CounterVec) *keeper {
	return &keeper{
		records: records, counts: counts, total: total, started: time.Now(), gpus: map[string]xids{},
	}
}

// load reads the records. loading calls it once, with mu locked. If the clock was set back since, a record may be later than the agent's start:
// then it gets the time of that start.
func (k *keeper) load() {
	for _, address := range k.records.Keys() {
		record, _ := k.records.Get(address)
		switch {
		case record.Log != nil:
			k.log = *record.Log
			k.log.Since = earliest(k.log.Since, k.started)
		case len(record.XIDs) > 0:
			// The inventory of a new agent is complete.
			record.XIDs = slices.Clone(record.XIDs)
			for i := range record.XIDs {
				record.XIDs[i].seen = true
				record.XIDs[i].Time = earliest(record.XIDs[i].Time, k.started)
			}
			k.gpus[address] = record
		}
	}
}

func earliest(moments ...time.Time) time.Time { return slices.MinFunc(moments, time.Time.Compare) }

// begin notes when the first agent of this boot began. Call it before take.
func (k *keeper) begin(ctx context.Context) {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	k.loading.Do(k.load)
	_, known := k.records.Get(logKey)
	k.mu.Unlock()
	if known {
		return
	}
	k.note(ctx, progress{Since: k.started})
}

// any reports whether there are XIDs that have not ended.
func (k *keeper) any() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.loading.Do(k.load)
	return len(k.gpus) > 0
}

// note records what was done with the kernel's log.
func (k *keeper) note(ctx context.Context, log progress) {
	k.mu.Lock()
	k.log = log
	k.mu.Unlock()
	if err := k.records.Put(logKey, xids{Log: &log}); err != nil {
		klog.FromContext(ctx).Error(err, "Cannot record how far the kernel's log was read, so the agent takes its XIDs again if it restarts")
	}
}

// take records an event.
func (k *keeper) take(ctx context.Context, e device.XIDEvent) {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.mu.Lock()
	k.loading.Do(k.load)
	changes := k.changes(ctx, e)
	log := k.log
	k.mu.Unlock()
	k.put(ctx, changes)
	if len(changes) > 0 && e.Sequence > 0 {
		log.Last = e.Sequence
		k.note(ctx, log)
	}
}

// changes returns the records that an event changes. Under mu.
func (k *keeper) changes(ctx context.Context, e device.XIDEvent) map[string]xids {
	if e.Sequence > 0 && e.Sequence <= k.read {
		return nil // the log is read from its beginning again
	}
	k.read = max(k.read, e.Sequence)
	label := "other"
	if e.XID < knownXIDs {
		label = strconv.Itoa(e.XID)
	}
	if e.XID != 0 {
		k.total.WithLabelValues(e.PCI, label).Inc()
	}
	switch {
	case e.Sequence > 0 && e.Sequence <= k.log.Last:
		return nil // an earlier agent took it
	case e.XID == 0:
		return k.endings(e)
	default:
		return k.addition(ctx, e)
	}
}

// addition returns the records that an XID changes. Under mu.
func (k *keeper) addition(ctx context.Context, e device.XIDEvent) map[string]xids {
	kind := device.XIDByNumber(e.XID)
	counts := k.counts(e.XID) && !k.past(e, kind)
	klog.FromContext(ctx).Info("The driver reports an XID", "xid", e.XID, "gpu", e.PCI, "gpuInstance", e.GPUInstance, "meaning", kind.Meaning,
		"class", kind.Class, "counts", counts, "message", e.Message)
	of, known := k.gpus[e.PCI]
	if !counts || !known && len(k.gpus) >= maxAddresses {
		return nil
	}
	next := xid{XID: e.XID, GPUInstance: e.GPUInstance, ComputeInstance: e.ComputeInstance, Time: time.Now()} // by the clock that scans have
	if e.Time.Before(k.started.Add(-clockError)) {
		next.Time, next.seen = e.Time, true // the log had it long before the agent started
	}
	of.XIDs = slices.DeleteFunc(slices.Clone(of.XIDs), next.same)
	of.XIDs = append(of.XIDs, next)
	if len(of.XIDs) > maxXIDs {
		slices.SortStableFunc(of.XIDs, func(a, b xid) int { return a.health().Compare(b.health()) })
		of.XIDs = of.XIDs[:maxXIDs]
	}
	return map[string]xids{e.PCI: of}
}

// past reports whether an XID is from before the first agent of this boot, and of a class after which the GPU works. Whether the GPU was
// reset since is not known. NVIDIA's device plugin counts no XID from before it started.
func (k *keeper) past(e device.XIDEvent, kind device.XID) bool {
	mild := kind.Class == device.FaultContained || kind.Class == device.FaultApplication
	return mild && e.Sequence > 0 && e.Time.Before(k.log.Since)
}

// same reports whether both are the same XID of the same GPU or partition.
func (x xid) same(other xid) bool {
	return x.XID == other.XID && x.GPUInstance == other.GPUInstance && x.ComputeInstance == other.ComputeInstance
}

// endings returns the records that change when the XIDs of a GPU, of one of its partitions, or of all GPUs end. Under mu.
func (k *keeper) endings(e device.XIDEvent) map[string]xids {
	changes := map[string]xids{}
	for address, of := range k.gpus {
		if e.PCI != "" && e.PCI != address {
			continue
		}
		left := slices.DeleteFunc(slices.Clone(of.XIDs), func(x xid) bool {
			return e.GPUInstance == device.NoInstance || e.GPUInstance == x.GPUInstance
		})
		if len(left) < len(of.XIDs) {
			changes[address] = xids{XIDs: left}
		}
	}
	return changes
}

// put replaces the records of GPUs, in memory first. A record that cannot be written still counts in memory.
func (k *keeper) put(ctx context.Context, changes map[string]xids) {
	if len(changes) == 0 {
		return
	}
	k.mu.Lock()
	maps.Copy(k.gpus, changes)
	maps.DeleteFunc(k.gpus, func(_ string, of xids) bool { return len(of.XIDs) == 0 })
	k.mu.Unlock()
	k.Notify()
	for address, of := range changes {
		var err error
		if len(of.XIDs) > 0 {
			err = k.records.Put(address, of)
		} else {
			err = k.records.Drop(address)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Cannot record the XIDs of a GPU, which the agent forgets if it restarts", "gpu", address)
		}
	}
}

// review ends the XIDs that the hardware no longer has: the driver says that the GPU needs nothing, or the partition is gone. reads
// has when the reading of a GPU began that the inventory has, or an earlier one.
func (k *keeper) review(ctx context.Context, inv device.Inventory, reads map[string]time.Time) {
	k.writing.Lock()
	defer k.writing.Unlock()
	k.put(ctx, k.removed(ctx))
	k.put(ctx, k.ended(ctx, inv, reads))
}

// removed returns the records that another process has removed, which ends their XIDs: a driver without recovery actions shows nothing
// after a reset, so an administrator says it so.
func (k *keeper) removed(ctx context.Context) map[string]xids {
	changes := map[string]xids{}
	for _, address := range k.records.Removed() {
		if address == logKey {
			continue
		}
		klog.FromContext(ctx).Info("XIDs of a GPU have ended, because the GPU's record was removed", "pci", address)
		changes[address] = xids{}
	}
	return changes
}

// ended returns the records that a review changes.
func (k *keeper) ended(ctx context.Context, inv device.Inventory, reads map[string]time.Time) map[string]xids {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.loading.Do(k.load)
	changes := map[string]xids{}
	for _, g := range inv.GPUs {
		address := slotOf(g)
		of, known := k.gpus[address]
		if !known {
			continue
		}
		read := reads[g.UUID]
		answers := g.Health.Class() == device.FaultNone
		recovered := g.Recovery == device.RecoveryNone && answers
		left := slices.DeleteFunc(slices.Clone(of.XIDs), func(x xid) bool {
			gone := x.GPUInstance != device.NoInstance && x.seen && answers && !slices.ContainsFunc(g.Partitions, x.concerns)
			return gone || recovered && read.Sub(x.Time) >= quiet
		})
		for i := range left {
			left[i].seen = left[i].seen || slices.ContainsFunc(g.Partitions, left[i].concerns)
		}
		if len(left) < len(of.XIDs) {
			klog.FromContext(ctx).Info("XIDs of a GPU have ended", "gpu", g.UUID, "pci", address, "left", len(left))
			changes[address] = xids{XIDs: left}
			continue
		}
		k.gpus[address] = xids{XIDs: left}
	}
	return changes
}

// slotOf returns the PCI address of a GPU without its function, as in device.XIDEvent: NVML writes a domain above 16 bits with eight digits,
// the kernel with as many as it needs.
func slotOf(g device.GPU) string {
	address, _, _ := strings.Cut(g.PCIBusID, ".")
	domain, rest, _ := strings.Cut(address, ":")
	for len(domain) > 4 && domain[0] == '0' {
		domain = domain[1:]
	}
	return domain + ":" + rest
}

// concerns reports whether the XID is about the partition. An XID without an instance is about the GPU.
func (x xid) concerns(p device.Partition) bool {
	return x.GPUInstance != device.NoInstance && x.GPUInstance == p.GPUInstance &&
		(x.ComputeInstance == device.NoInstance || x.ComputeInstance == p.ComputeInstance)
}

// health returns the XID as a fault.
func (x xid) health() device.Health {
	kind := device.XIDByNumber(x.XID)
	message := fmt.Sprintf("XID %d at %s: %s", x.XID, x.Time.UTC().Format(time.RFC3339), kind.Meaning)
	if kind.Action != "" {
		message += " (" + kind.Action + ")"
	}
	return device.Health{Reason: device.ReasonXID, Message: message, XID: x.XID}
}

// of returns the XIDs of a GPU, without those of its partitions, and those of one of its partitions.
func (k *keeper) of(g device.GPU) (whole []device.Health, partition func(device.Partition) []device.Health) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.loading.Do(k.load)
	if len(k.gpus) == 0 || len(k.gpus[slotOf(g)].XIDs) == 0 {
		return nil, func(device.Partition) []device.Health { return nil } // nearly always, and each Prepare asks
	}
	all := slices.SortedFunc(slices.Values(k.gpus[slotOf(g)].XIDs), func(a, b xid) int {
		return cmp.Or(a.health().Compare(b.health()), b.Time.Compare(a.Time))
	})
	for _, x := range all {
		if x.GPUInstance == device.NoInstance {
			whole = append(whole, x.health())
		}
	}
	return whole, func(p device.Partition) (faults []device.Health) {
		for _, x := range all {
			if x.concerns(p) {
				faults = append(faults, x.health())
			}
		}
		return faults
	}
}
