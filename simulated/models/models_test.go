// SPDX-License-Identifier: Apache-2.0

package models

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// TestNamesAreThoseOfTheMemory: go-nvlib makes the name of a profile from its compute slices and from its share of the GPU's
// memory in eighths (getMigMemorySizeGB). A figure of a table that is wrong by more than a few per cent gives another name.
func TestNamesAreThoseOfTheMemory(t *testing.T) {
	for _, m := range All() {
		for _, p := range m.Profiles {
			eighths := math.Ceil(8 * float64(p.Capacity.MemoryBytes) / float64(m.Total.MemoryBytes))
			gigabytes := math.Round(eighths / 8 * math.Ceil(float64(m.Total.MemoryBytes)/(1<<30)))
			name, _, _ := strings.Cut(p.Name, "+")
			name, _, _ = strings.Cut(name, "-")
			if want := fmt.Sprintf("%dg.%.0fgb", p.Compute, gigabytes); name != want {
				t.Errorf("%s: %s has %d bytes of %d: go-nvlib calls it %s", m.Name, p.Name, p.Capacity.MemoryBytes, m.Total.MemoryBytes, want)
			}
		}
	}
}

// TestTablesAreConsistent: IDs, enums and names are used once, placements fit the GPU, and the number of instances is what
// the placements and the engines allow.
func TestTablesAreConsistent(t *testing.T) {
	for _, m := range All() {
		seen := map[string]bool{}
		for _, p := range m.Profiles {
			for _, key := range []string{"name " + p.Name, fmt.Sprint("id ", p.ID), fmt.Sprint("enum ", p.Enum)} {
				if seen[key] {
					t.Errorf("%s: %s: %s is there twice", m.Name, p.Name, key)
				}
				seen[key] = true
			}
			apart := 0
			for i, place := range p.Placements {
				if place.Start < 0 || place.Start+place.Size > m.Slices || place.Size != p.Placements[0].Size {
					t.Errorf("%s: %s: placement %v of %d slices", m.Name, p.Name, place, m.Slices)
				}
				if i > 0 && place.Start <= p.Placements[i-1].Start {
					t.Errorf("%s: %s: placements %v are not ascending", m.Name, p.Name, p.Placements)
				}
				if i == 0 || !slices.ContainsFunc(p.Placements[:i], place.Overlaps) {
					apart++
				}
			}
			if p.Capacity.OFAEngines > 0 {
				apart = min(apart, m.Total.OFAEngines)
			}
			if p.Instances != apart {
				t.Errorf("%s: %s: %d instances, but %d fit", m.Name, p.Name, p.Instances, apart)
			}
		}
	}
}

func TestComputeInstanceProfiles(t *testing.T) {
	m, ok := Named("A100-40GB")
	if !ok {
		t.Fatal("no A100-40GB")
	}
	// nvidia-smi mig -lcip: profile ID and instances.
	want := map[string]string{
		"1g.5gb":    "1g.5gb 0 ×1 14 SM",
		"1g.5gb+me": "1g.5gb+me 0 ×1 14 SM",
		"1g.10gb":   "1g.10gb 0 ×1 14 SM",
		"2g.10gb":   "1c.2g.10gb 0 ×2 14 SM, 2g.10gb 1 ×1 28 SM",
		"3g.20gb":   "1c.3g.20gb 0 ×3 14 SM, 2c.3g.20gb 1 ×1 28 SM, 3g.20gb 2 ×1 42 SM",
		"4g.20gb":   "1c.4g.20gb 0 ×4 14 SM, 2c.4g.20gb 1 ×2 28 SM, 4g.20gb 3 ×1 56 SM",
		"7g.40gb": "1c.7g.40gb 0 ×7 14 SM, 2c.7g.40gb 1 ×3 28 SM, 3c.7g.40gb 2 ×2 42 SM, " +
			"4c.7g.40gb 3 ×1 56 SM, 7g.40gb 4 ×1 98 SM",
	}
	for _, p := range m.Profiles {
		var got []string
		for _, c := range p.Computes {
			got = append(got, fmt.Sprintf("%s %d ×%d %d SM", c.Name, c.ID, c.Instances, c.Multiprocessors))
		}
		if all := strings.Join(got, ", "); all != want[p.Name] {
			t.Errorf("%s has %s, want %s", p.Name, all, want[p.Name])
		}
		if last := p.Computes[len(p.Computes)-1]; last.ID != p.ComputeID || last.Slices != p.Compute {
			t.Errorf("%s: the compute instance that takes all of it is %+v", p.Name, last)
		}
	}
	seven := m.Profiles[6].Computes
	if got, want := seven[2].Placements, []device.Placement{{Start: 0, Size: 3}, {Start: 4, Size: 3}}; !slices.Equal(got, want) {
		t.Errorf("3c of a 7g starts at %v, want %v", got, want)
	}
}

func TestNamed(t *testing.T) {
	for _, m := range All() {
		if got, ok := Named(m.Name); !ok || got.Product != m.Product {
			t.Errorf("%s: %v %v", m.Name, got, ok)
		}
	}
	if m, ok := Named("V100"); ok {
		t.Errorf("V100: %v", m)
	}
}
