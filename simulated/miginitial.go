// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// initialMIG is the state of a machine after a boot. The profile is valid.
func initialMIG(p Profile) MIGState {
	var state MIGState
	for _, g := range p.GPUs {
		model := p.Models[g.Model]
		if model.MIG == "" {
			continue
		}
		own := MIGGPU{UUID: g.UUID, Enabled: g.MIGEnabled, Pending: g.MIGEnabled}
		_ = geometryOf(model).cut(&own, g.Partitions) // validated with the profile
		state.GPUs = append(state.GPUs, own)
	}
	return state
}

// cut makes the partitions on a GPU that has none.
func (g geometry) cut(own *MIGGPU, partitions []Partition) error {
	for i, wanted := range partitions {
		p := g.byName(wanted.Profile)
		if p == nil {
			return fmt.Errorf("[%d].profile: %q is not to be had", i, wanted.Profile)
		}
		at := slices.IndexFunc(p.Placements, func(place device.Placement) bool { return place.Start == wanted.Start })
		if at < 0 || !g.fits(own.Instances, p, p.Placements[at]) {
			return fmt.Errorf("[%d].start: there is no room for a %s at %d", i, wanted.Profile, wanted.Start)
		}
		place := p.Placements[at]
		id, ok := g.freeID(own, place)
		if !ok {
			return fmt.Errorf("[%d]: there are %d partitions already", i, migInstances)
		}
		own.Instances = append(own.Instances, GPUInstance{ID: id, Profile: p.ID, Start: place.Start, Size: place.Size})
		made := &own.Instances[len(own.Instances)-1]
		sizes := wanted.Compute
		if len(sizes) == 0 {
			sizes = []int{p.Compute}
		}
		for k, size := range sizes {
			if !made.cut(own.UUID, p.Computes, size) {
				return fmt.Errorf("[%d].compute[%d]: there is no room for %d slices", i, k, size)
			}
		}
	}
	slices.SortFunc(own.Instances, func(a, b GPUInstance) int { return a.ID - b.ID })
	return nil
}

// cut makes a compute instance of that many slices at the first place with room, and reports whether there is one.
func (i *GPUInstance) cut(gpu string, profiles []models.Compute, slicesWanted int) bool {
	for _, c := range profiles {
		if c.Slices != slicesWanted {
			continue
		}
		if at := slices.IndexFunc(c.Placements, i.free); at >= 0 {
			place := c.Placements[at]
			i.add(gpu, ComputeInstance{ID: i.freeCompute(), Profile: c.ID, Start: place.Start, Size: place.Size})
			return true
		}
	}
	return false
}
