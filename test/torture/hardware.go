// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// lookAtGPUs is how often the GPUs are asked which partitions they have.
const lookAtGPUs = 40 * time.Millisecond

// hardware is what the node's own GPUs remember of MIG, seen from outside: how many partitions come and go, and whether those
// that an administrator has made are left alone. It is safe for concurrent use.
type hardware struct {
	// root answers the node's root directory; an error means that the node is down.
	root       func() (string, error)
	statistics *statistics
	trace      *trace
	// touched is called with each unmanaged partition that another component removed.
	touched func(ctx context.Context, what string)

	// mu is held while the administrator works.
	mu  sync.Mutex
	now oracle.Machine
	// first are the places and profiles of what a boot begins with.
	first []oracle.Instance
	// static are the administrator's partitions by UUID, others all other partitions.
	static, others map[string]oracle.Instance
}

// begin takes what there is for the administrator's: nothing has been made for claims yet.
func (h *hardware) begin() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, err := h.read()
	if err == nil {
		h.takeStock(now)
	}
	return err
}

// takeStock is called under mu.
func (h *hardware) takeStock(now oracle.Machine) {
	h.now, h.first = now, now.Instances
	h.static, h.others = map[string]oracle.Instance{}, map[string]oracle.Instance{}
	for _, i := range now.Instances {
		h.static[i.UUID] = i
	}
}

// run looks until ctx is done.
func (h *hardware) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := h.look(ctx); err != nil {
			return err
		}
		broadcast.Sleep(ctx, lookAtGPUs)
	}
	return nil
}

func (h *hardware) look(ctx context.Context) error {
	h.mu.Lock()
	now, err := h.read()
	var touched []oracle.Instance
	if err == nil && now.Boot != "" {
		touched = h.compare(now)
	}
	h.mu.Unlock()
	for _, i := range touched {
		h.statistics.add(func(c *Counters) { c.UnmanagedChanged++ })
		h.trace.say("UNMANAGED CHANGED: partition %s of the administrator's is gone", i)
		h.touched(ctx, fmt.Sprintf("%s %s", i.UUID, i))
	}
	return err
}

// read answers a machine that remembers nothing where the node is down.
func (h *hardware) read() (oracle.Machine, error) {
	root, err := h.root()
	if err != nil {
		return oracle.Machine{}, nil //nolint:nilerr // a machine that is off cannot be read
	}
	return oracle.ReadMachine(root)
}

// compare answers what of the administrator's is gone. Under mu.
func (h *hardware) compare(now oracle.Machine) (touched []oracle.Instance) {
	if now.Boot != h.now.Boot {
		h.static, h.others = map[string]oracle.Instance{}, map[string]oracle.Instance{}
		for _, i := range now.Instances {
			if slices.ContainsFunc(h.first, func(f oracle.Instance) bool { return sameShape(f, i) }) {
				h.static[i.UUID] = i
			}
		}
	}
	h.now = now
	there := map[string]bool{}
	for _, i := range now.Instances {
		there[i.UUID] = true
		if _, static := h.static[i.UUID]; static || i.UUID == "" {
			continue
		}
		if _, known := h.others[i.UUID]; !known {
			h.others[i.UUID] = i
			h.statistics.add(func(c *Counters) { c.PartitionsMade++ })
			h.trace.note("made: %s", i)
		}
	}
	for uuid, i := range h.others {
		if !there[uuid] {
			delete(h.others, uuid)
			h.statistics.add(func(c *Counters) { c.PartitionsDestroyed++ })
			h.trace.note("destroyed: %s", i)
		}
	}
	for uuid, i := range h.static {
		if !there[uuid] {
			delete(h.static, uuid)
			touched = append(touched, i)
		}
	}
	return touched
}

// String is a line for each partition, with whose it is.
func (h *hardware) String() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var lines []string
	for _, i := range h.now.Instances {
		owner := "made for a claim"
		if _, static := h.static[i.UUID]; static {
			owner = "the administrator's"
		}
		lines = append(lines, fmt.Sprintf("%s %s: %s", i, i.UUID, owner))
	}
	return strings.Join(lines, "\n")
}

func sameShape(a, b oracle.Instance) bool {
	return a.GPU == b.GPU && a.Profile == b.Profile && a.Start == b.Start && a.Size == b.Size
}

// room is what there is for those who ask, at the last look.
func (h *hardware) room() room {
	if h == nil {
		return room{}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r := room{mig: true, enabled: h.now.Enabled}
	for _, i := range h.static {
		r.standing = append(r.standing, i)
	}
	return r
}

// ownerless answers the GPU instances that neither the administrator has made nor a claim has, by name with what is wrong.
func (h *hardware) ownerless(claimed []place) map[string]string {
	problems := map[string]string{}
	if h == nil {
		return problems
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, i := range h.now.Instances {
		if _, static := h.static[i.UUID]; !static && !slices.Contains(claimed, place{i.GPU, i.Start, i.Size}) {
			problems[partitionPrefix+i.String()] = "has no owner"
		}
	}
	return problems
}

// partitionPrefix begins the names of partitions among problems.
const partitionPrefix = "partition "

// isPartition reports whether a problem concerns a partition without an owner and not a pod.
func isPartition(problem string) bool { return strings.HasPrefix(problem, partitionPrefix) }

// unlike answers how the machine differs from what it was to begin with, one line each.
func (h *hardware) unlike() []string {
	if h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var lines []string
	for _, i := range h.now.Instances {
		if !slices.ContainsFunc(h.first, func(f oracle.Instance) bool { return sameShape(f, i) }) {
			lines = append(lines, "MIG: there is "+i.String())
		}
	}
	for _, f := range h.first {
		if !slices.ContainsFunc(h.now.Instances, func(i oracle.Instance) bool { return sameShape(f, i) }) {
			lines = append(lines, "MIG: there is no "+f.String())
		}
	}
	for gpu := range gpusANode {
		began := slices.ContainsFunc(h.first, func(f oracle.Instance) bool { return f.GPU == gpu })
		if h.now.Enabled[gpu] != began {
			lines = append(lines, fmt.Sprintf("MIG: the mode of gpu-%d is %t", gpu, h.now.Enabled[gpu]))
		}
	}
	return lines
}
