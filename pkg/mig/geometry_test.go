// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"maps"
	"math"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/models"
)

func at(start, size int) device.Placement { return device.Placement{Start: start, Size: size} }

func TestScarceProfilesHaveACounter(t *testing.T) {
	// Three would fit, engines and all, but the GPU holds two.
	g := NewGeometry([]device.Profile{
		{ID: 7, Instances: 2, Placements: []device.Placement{at(0, 1), at(1, 1), at(2, 1)}, Capacity: device.Capacity{Decoders: 1}},
		{ID: 8, Instances: 1, Placements: []device.Placement{at(0, 4)}, Capacity: device.Capacity{Decoders: 4}},
	})
	want := Counters{
		"memory": 0, "multiprocessors": 0, "copy-engines": 0, "decoders": 4, "encoders": 0, "jpeg-engines": 0, "ofa-engines": 0,
		"memory-slice-0": 1, "memory-slice-1": 1, "memory-slice-2": 1, "memory-slice-3": 1, "instances-7": 2,
	}
	if got := g.Total(); !maps.Equal(got, want) {
		t.Errorf("total %v, want %v", got, want)
	}
	one := Instance{ProfileID: 7, Placement: at(1, 1)}
	if got, want := g.Takes(one), (Counters{"decoders": 1, "memory-slice-1": 1, "instances-7": 1}); !maps.Equal(got, want) {
		t.Errorf("takes %v, want %v", got, want)
	}
	held := []Instance{one, {ProfileID: 7, Placement: at(0, 1)}}
	third := Instance{ProfileID: 7, Placement: at(2, 1)}
	if g.Fits(held, third) {
		t.Error("a third of two instances fits")
	}
}

func TestForeignInstances(t *testing.T) {
	m, _ := models.Named("H100-80GB")
	g := NewGeometry(m.Offered())
	// An administrator created an instance of a profile that NVML's bindings lack, across the halves and with the OFA.
	foreign := Instance{ProfileID: 99, Placement: at(3, 2), Capacity: device.Capacity{OFAEngines: 1, Decoders: 2}}
	for profile, want := range map[int]int{19: 6, 15: 6, 14: 0, 9: -1, 5: -1, 0: -1, 20: -1} {
		place, found := g.firstFit([]Instance{foreign}, profile)
		if !found {
			place.Start = -1
		}
		if place.Start != want {
			t.Errorf("profile %d beside %v is placed at %d, want %d", profile, foreign.Placement, place.Start, want)
		}
	}
	// It overlaps another, which cannot be: what neither needs is still to be had, and no counter is negative.
	held := []Instance{foreign, foreign, {ProfileID: 9, Placement: at(4, 4)}}
	left := g.Left(held)
	for name, n := range left {
		if n < 0 {
			t.Errorf("%s is %d", name, n)
		}
	}
	if left["ofa-engines"] != 0 || left["decoders"] != 0 || left["memory-slice-0"] != 1 || left["memory-slice-4"] != 0 {
		t.Errorf("left %v", left)
	}
	// Off the GPU.
	for _, odd := range []device.Placement{
		at(-1, 3), at(8, 1), at(100, 2), at(0, 0), at(2, -1), at(math.MaxInt, math.MaxInt), at(math.MinInt, math.MaxInt),
	} {
		if place, found := g.firstFit([]Instance{{ProfileID: 99, Placement: odd}}, 0); !found || place != at(0, 8) {
			t.Errorf("a 7g beside %v: %v %t", odd, place, found)
		}
		if g.Fits(nil, Instance{ProfileID: 19, Placement: odd}) {
			t.Errorf("a 1g fits at %v", odd)
		}
	}
}

func TestOddProfiles(t *testing.T) {
	good := device.Profile{ID: 1, Name: "good", Instances: 2, Placements: []device.Placement{at(2, 2), at(0, 2), at(2, 2)}}
	g := NewGeometry([]device.Profile{
		{ID: 2, Instances: 1},
		{ID: 3, Placements: []device.Placement{at(0, 1)}},
		{ID: 4, Instances: 1, Placements: []device.Placement{at(-1, 2), at(0, 0), at(math.MaxInt, 1), at(1, math.MaxInt), at(23, 2)}},
		good,
		{ID: 1, Name: "again", Instances: 7, Placements: []device.Placement{at(0, 1)}},
	})
	got, places := g.Profiles(), []device.Placement{at(0, 2), at(2, 2)}
	if len(got) != 1 || got[0].Name != "good" || !slices.Equal(got[0].Placements, places) {
		t.Errorf("profiles %+v", got)
	}
	if len(g.Order()) != 2 {
		t.Errorf("order %v", g.Order())
	}
	if good.Placements[0] != at(2, 2) {
		t.Error("the profile given was changed")
	}
	var none Geometry
	_, found := none.firstFit([]Instance{{ProfileID: 1, Placement: at(0, 2)}}, 1)
	if found || len(none.Order()) != 0 {
		t.Error("a GPU without profiles offers something")
	}
}

func TestOrder(t *testing.T) {
	m, _ := models.Named("H100-80GB")
	var got []string
	for _, i := range NewGeometry(m.Offered()).Order() {
		got = append(got, (twin{model: m}).profile(i.ProfileID).Name+"@"+i.Placement.String())
	}
	want := []string{
		"1g.10gb@6+1", "1g.10gb@4+1", "1g.10gb@5+1", "1g.10gb@0+1", "1g.10gb@1+1", "1g.10gb@2+1", "1g.10gb@3+1",
		"1g.10gb+me@6+1", "1g.10gb+me@4+1", "1g.10gb+me@5+1", "1g.10gb+me@0+1", "1g.10gb+me@1+1", "1g.10gb+me@2+1",
		"1g.10gb+me@3+1",
		"1g.20gb@6+2", "1g.20gb@4+2", "1g.20gb@0+2", "1g.20gb@2+2",
		"2g.20gb@4+2", "2g.20gb@0+2", "2g.20gb@2+2",
		"3g.40gb@4+4", "3g.40gb@0+4", "4g.40gb@0+4", "7g.80gb@0+8",
	}
	if !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}

// FuzzGeometry: whatever a driver says and whatever is held, nothing panics, no counter is negative, and every placement is in the order.
func FuzzGeometry(f *testing.F) {
	f.Add([]byte{3, 7, 1, 2, 0, 1, 1, 1, 2, 1, 9, 2, 3, 0, 4, 4, 4}, []byte{3, 1, 1, 9, 0, 4})
	f.Add([]byte{0, 255, 255, 255, 128, 128}, []byte{0, 128, 255, 200, 200, 200})
	f.Fuzz(func(t *testing.T, offered, placed []byte) {
		g := NewGeometry(oddProfiles(offered))
		var held []Instance
		for i := 0; i+3 <= len(placed) && len(held) < 12; i += 3 {
			h := Instance{ProfileID: int(placed[i] % 8), Placement: at(odd(placed[i+1]), odd(placed[i+2]))}
			h.Capacity = device.Capacity{MemoryBytes: uint64(placed[i]) << 56, Decoders: odd(placed[i+1])}
			held = append(held, h)
		}
		left, order := g.Left(held), g.Order()
		for name, n := range left {
			if n < 0 {
				t.Errorf("%s is %d", name, n)
			}
		}
		if all := every(g.Profiles()); len(order) != len(all) {
			t.Errorf("order %v, want every one of %v", order, all)
		}
	})
}

// odd is a small number, or now and then one that breaks sums.
func odd(b byte) int {
	switch {
	case b < 200:
		return int(b%40) - 8
	case b < 228:
		return math.MaxInt - int(b%3)
	default:
		return math.MinInt + int(b%3)
	}
}

func oddProfiles(b []byte) []device.Profile {
	var profiles []device.Profile
	for len(b) >= 5 && len(profiles) < 12 {
		p := device.Profile{ID: int(b[0] % 8), Instances: odd(b[1]), Capacity: device.Capacity{
			MemoryBytes: uint64(b[2]) << (b[1] % 57), Decoders: odd(b[2]), OFAEngines: odd(b[3]),
		}}
		places := int(b[4] % 8)
		b = b[5:]
		for ; places > 0 && len(b) >= 2; places, b = places-1, b[2:] {
			p.Placements = append(p.Placements, at(odd(b[0]), odd(b[1])))
		}
		profiles = append(profiles, p)
	}
	return profiles
}
