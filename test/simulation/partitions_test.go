// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// migProfiles are those of an H100 whose counters follow from memory slices alone, which is all that having counts.
var migProfiles = func() []device.Profile {
	model, _ := models.Named("H100-80GB")
	return slices.DeleteFunc(model.Offered(), func(p device.Profile) bool { return strings.Contains(p.Name, "+") })
}()

// migPlaces are the placements of partitions by the part of their names behind the GPU's.
var migPlaces = func() map[string]device.Placement {
	places := map[string]device.Placement{}
	for _, p := range (device.GPU{Profiles: migProfiles}).Possible() {
		places[strings.TrimPrefix(p.Name(), device.GPUName(p.Name()))] = p.Ref.Placement
	}
	return places
}()

func placeOf(name string) (place device.Placement, partition bool) {
	place, partition = migPlaces[strings.TrimPrefix(name, device.GPUName(name))]
	return place, partition
}

// migDriver is what the driver knows of partitions. It outlives the agent, and ends with the boot.
type migDriver struct {
	// dynamic are the names of dynamic GPUs.
	dynamic map[string]bool
	// enabled are the GPUs in MIG mode, by UUID as all that follows. host.driver guards it, and partitions.
	enabled    map[string]bool
	partitions map[device.Ref]device.Partition
	// foreign are the partitions that an administrator made.
	foreign map[device.Ref]bool
	// had are the claims whose containers have used a partition since it was created.
	had map[device.Ref]string
	// was are GPUs that had partitions since they were last used as a whole.
	was map[string]bool
	// made counts partitions, failing is how many calls will fail, takes is how long each takes.
	made, failing int
	takes         time.Duration
}

// on are the partitions of a GPU in the order of their placements.
func (m *migDriver) on(gpu string) (found []device.Partition) {
	for ref, p := range m.partitions {
		if ref.GPU == gpu {
			found = append(found, p)
		}
	}
	slices.SortFunc(found, func(a, b device.Partition) int { return a.Ref.Placement.Start - b.Ref.Placement.Start })
	return found
}

// makeDynamic makes two GPUs of three dynamic.
func (s *simulation) makeDynamic() {
	m := &s.host.mig
	m.dynamic, m.enabled, m.was = map[string]bool{}, map[string]bool{}, map[string]bool{}
	m.partitions, m.foreign, m.had = map[device.Ref]device.Partition{}, map[device.Ref]bool{}, map[device.Ref]string{}
	m.takes = []time.Duration{0, 20 * time.Millisecond, 500 * time.Millisecond, 3 * time.Second}[s.rand.IntN(4)]
	for i := range s.inventory.GPUs {
		gpu := &s.inventory.GPUs[i]
		gpu.MemoryBytes, gpu.ComputeCapability, gpu.MIGCapable, gpu.Profiles = memory<<20, "9.0", true, migProfiles
		if gpu.Dynamic = i%3 != 2; gpu.Dynamic {
			m.dynamic[gpu.Name()] = true
		}
	}
}

// poolOf is the pool from which a device is allocated.
func (h *host) poolOf(name string) string {
	if gpu := device.GPUName(name); h.mig.dynamic[gpu] {
		return device.OwnPool(nodeName, device.GPU{Minor: minorOf(gpu)})
	}
	return nodeName
}

// choices are the devices of which a claim may get any.
func (s *simulation) choices(k *claim) (names []string) {
	for _, gpu := range s.inventory.GPUs {
		if k.profile == "" {
			names = append(names, gpu.Name())
			continue
		}
		for _, p := range gpu.Possible() {
			if gpu.Dynamic && p.Profile == k.profile {
				names = append(names, p.Name())
			}
		}
	}
	return names
}

// namesOf are the names that a device may have: several profiles have the same placement.
func (s *simulation) namesOf(ref device.Ref) (names []string) {
	gpu, _ := s.inventory.ByUUID(ref.GPU)
	if ref.Whole() {
		return []string{gpu.Name()}
	}
	for _, p := range gpu.Possible() {
		if p.Ref == ref {
			names = append(names, p.Name())
		}
	}
	return names
}

// The driver's part.

// change is one call that changes a GPU. Something else may happen before and after it, and the agent may die then. It is not
// interrupted when its caller leaves.
func (h hardware) change(ctx context.Context, gpu, what string, do func() error) error {
	if c, ok := ctx.Value(callKey{}).(*call); ok {
		c.sleep(h.mig.takes, what)
	}
	h.world.agent.diskStep()
	if err := h.changeNow(gpu, what, do); err != nil {
		return err
	}
	h.faultsChanged.Notify()
	turn(ctx, "is done: "+what)
	h.world.agent.diskStep()
	return nil
}

func (h hardware) changeNow(gpu, what string, do func() error) error {
	h.driver.Lock()
	defer h.driver.Unlock()
	if h.mig.failing > 0 {
		h.mig.failing--
		h.hit(partitionCallFails)
		return fmt.Errorf("the driver fails: %s", what)
	}
	if user := h.user(func(p string) bool { return uuidOf(gpuOf(p)) == gpu && amountOf(p).all }); user != "" {
		h.fail("%s, while pod %s uses the whole GPU", what, user)
	}
	return do()
}

// user is a pod that runs with such a device.
func (h *host) user(of func(part string) bool) string {
	for _, uid := range sorted(h.pods) {
		for _, g := range h.pods[uid].grants {
			if h.pods[uid].busy && slices.ContainsFunc(g.parts, of) {
				return uid
			}
		}
	}
	return ""
}

func (h hardware) EnableMIG(ctx context.Context, gpu string) error {
	return h.change(ctx, gpu, "switches on MIG mode of "+gpu, func() error {
		h.mig.enabled[gpu], h.mig.was[gpu] = true, true
		return nil
	})
}

func (h hardware) DisableMIG(ctx context.Context, gpu string) error {
	return h.change(ctx, gpu, "switches off MIG mode of "+gpu, func() error {
		for _, p := range h.mig.on(gpu) {
			if h.mig.foreign[p.Ref] {
				return errTaken
			}
			h.fail("MIG mode of %s is switched off beside %s", gpu, p.Name())
		}
		delete(h.mig.enabled, gpu)
		return nil
	})
}

func (h hardware) Partitions(ctx context.Context, gpu string) ([]device.Partition, error) {
	turn(ctx, "reads the partitions of "+gpu)
	h.driver.Lock()
	defer h.driver.Unlock()
	return h.mig.on(gpu), nil
}

// Create leaves an incomplete partition if a second call fails as well.
func (h hardware) Create(ctx context.Context, ref device.Ref, profile device.Profile) (device.Partition, error) {
	gpu, _ := h.world.inventory.ByUUID(ref.GPU)
	p := device.Partition{Ref: ref, Parent: gpu.Minor, Profile: profile.Name, ProfileID: profile.ID, Capacity: profile.Capacity}
	err := h.change(ctx, ref.GPU, "creates "+p.Name(), func() error {
		for _, other := range h.mig.on(ref.GPU) {
			switch {
			case !other.Ref.Placement.Overlaps(ref.Placement):
			case h.mig.foreign[other.Ref]:
				return errTaken
			default:
				h.fail("%s is created over %s", p.Name(), other.Name())
			}
		}
		if !h.mig.enabled[ref.GPU] {
			h.fail("%s is created without MIG mode", p.Name())
		}
		h.mig.partitions[ref] = p
		return nil
	})
	if err != nil {
		return device.Partition{}, err
	}
	err = h.change(ctx, ref.GPU, "completes "+p.Name(), func() error {
		// The same UUID recurs a few times, as a driver may give it.
		p.UUID = fmt.Sprintf("MIG-%d-%s-%d", gpu.Minor, ref.Placement, h.mig.made/4)
		h.mig.made++
		delete(h.mig.had, ref)
		h.mig.partitions[ref] = p
		h.hit(partitionCreated)
		return nil
	})
	if err = errors.Join(err, context.Cause(ctx)); err != nil {
		return device.Partition{}, errors.Join(err, h.Destroy(ctx, ref))
	}
	return p, nil
}

func (h hardware) Destroy(ctx context.Context, ref device.Ref) error {
	for _, step := range []string{"ends the compute instance of ", "destroys "} {
		h.driver.Lock()
		p, exists := h.mig.partitions[ref]
		h.driver.Unlock()
		if !exists {
			return nil
		}
		if err := h.change(ctx, ref.GPU, step+p.Name(), func() error {
			if user := h.user(func(part string) bool { return part == p.Name() }); user != "" {
				h.fail("%s is destroyed while pod %s uses it", p.Name(), user)
			}
			if h.mig.foreign[ref] {
				h.fail("%s is destroyed, which an administrator made", p.Name())
			}
			if p.UUID != "" {
				p.UUID = ""
				h.mig.partitions[ref] = p
				return nil
			}
			delete(h.mig.partitions, ref)
			h.hit(partitionDestroyed)
			return nil
		}); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// errTaken is the driver's answer where an administrator was faster.
var errTaken = errors.New("in use by another client")

// administer makes a partition on a GPU in MIG mode, often where a claim is about to get one, or destroys those that no claim has.
func (s *simulation) administer() {
	m := &s.host.mig
	if s.agent == nil || s.agent.process.over || s.chance(4) {
		s.removeForeign()
		return
	}
	var free, awaited []device.Partition
	for _, gpu := range s.inventory.GPUs {
		for _, p := range gpu.Possible() {
			overlaps := func(other device.Partition) bool { return other.Ref.Placement.Overlaps(p.Ref.Placement) }
			// A partition that Tandem is about to make is not told from his (docs/design/0011-mig.md).
			if !m.enabled[gpu.UUID] || slices.ContainsFunc(m.on(gpu.UUID), overlaps) || s.agent.parts.Partitions.Made(p.Ref) {
				continue
			}
			if free = append(free, p); s.allocated(p.Name()) {
				awaited = append(awaited, p)
			}
		}
	}
	if len(awaited) > 0 {
		free = awaited
	}
	if len(free) == 0 {
		return
	}
	p := free[s.rand.IntN(len(free))]
	m.made++
	p.UUID = fmt.Sprintf("MIG-foreign-%d", m.made)
	m.partitions[p.Ref], m.foreign[p.Ref] = p, true
	s.hit(partitionForeign)
	s.host.faultsChanged.Notify()
}

func (s *simulation) allocated(name string) bool {
	return slices.ContainsFunc(all[*claim](s.api.objects), func(k *claim) bool { return slices.Contains(k.devices(), name) })
}

// removeForeign destroys the administrator's partitions that no claim and no pod has.
func (s *simulation) removeForeign() {
	m := &s.host.mig
	if len(m.foreign) == 0 {
		return
	}
	maps.DeleteFunc(m.foreign, func(ref device.Ref, _ bool) bool {
		name := m.partitions[ref].Name()
		used := s.allocated(name)
		for _, group := range s.host.pods {
			used = used || slices.ContainsFunc(group.grants, func(g grant) bool { return slices.Contains(g.parts, name) })
		}
		for _, h := range s.agent.book.Holds() {
			used = used || h.Device == ref
		}
		if !used {
			delete(m.partitions, ref)
		}
		return !used
	})
	s.host.faultsChanged.Notify()
}

// The oracle.

// sawIncomplete counts starts of the agent beside a partition that another life of it has not completed.
func (h *host) sawIncomplete() {
	for _, p := range h.mig.partitions {
		if p.UUID == "" {
			h.hit(partitionLeftIncomplete)
			return
		}
	}
}

// checkPartitions: the devices of a pod that starts are what the hardware has.
func (h *host) checkPartitions(uid string, g grant) {
	const class = "k8s.gpu.nvidia.com/gpu="
	for _, part := range g.parts {
		gpu := uuidOf(gpuOf(part))
		exist := h.mig.on(gpu)
		if _, partition := placeOf(part); !partition {
			if len(exist) > 0 || h.mig.enabled[gpu] {
				h.fail("pod %s starts with the whole of %s, which is in MIG mode, beside %v", uid, part, exist)
			}
			if h.mig.was[gpu] {
				delete(h.mig.was, gpu)
				h.hit(wholeAfterPartition)
			}
			continue
		}
		i := slices.IndexFunc(exist, func(p device.Partition) bool { return p.Name() == part })
		if i < 0 || !slices.Contains(g.cdi, class+exist[i].UUID) {
			h.fail("pod %s starts with %s as %v, but there are %v", uid, part, g.cdi, exist)
			continue
		}
		ref := exist[i].Ref
		if before, used := h.mig.had[ref]; used && before != g.owner && !h.mig.foreign[ref] {
			h.fail("pod %s of %s starts with %s, which is not destroyed since %s had it", uid, g.owner, part, before)
		}
		h.mig.had[ref] = g.owner
	}
	for _, id := range g.cdi {
		named := func(p device.Partition) bool { return id == class+p.UUID }
		// For a mixed claim the agent makes placeholders for earlier ones.
		if strings.HasPrefix(id, class+"MIG-") && !h.mixed[g.owner] && !slices.ContainsFunc(slices.Collect(maps.Values(h.mig.partitions)), named) {
			h.fail("pod %s starts with %s, which does not exist", uid, id)
		}
	}
}

// checkPartitionsLeft finds what is left of partitions when every pod is gone.
func (s *simulation) checkPartitionsLeft() {
	m := &s.host.mig
	for _, gpu := range s.inventory.GPUs {
		if left := m.on(gpu.UUID); len(left) > 0 || m.enabled[gpu.UUID] {
			s.fail("leaked: %s in MIG mode: %v, with partitions %v", gpu.Name(), m.enabled[gpu.UUID], left)
		}
	}
	if records := entries(filepath.Join(s.host.run(), "partitions")); len(records) > 0 {
		s.fail("leaked: records of the partitions %v", records)
	}
}

// checkPartitionsOffered: when every pod is gone, the slices offer what those of a fresh node do.
func (s *simulation) checkPartitionsOffered() {
	fresh := driver.Offer{NodeName: nodeName}
	pools, _ := fresh.Pools(driver.Facts{Inventory: s.inventory, Kept: kept(s.version)})
	if now, ok := get[*slice](s.api, "slice/"); !ok || !now.same(resourceSlices(pools)) {
		s.fail("leaked: the slices offer %v of %d GPUs", now, s.host.gpus)
	}
}
