// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestResourceNames(t *testing.T) {
	r := Resources{GPU: "nvidia.com/gpu"}
	for profile, want := range map[string]string{
		"1g.10gb":        "nvidia.com/mig-1g.10gb",
		"1g.10gb+me":     "nvidia.com/mig-1g.10gb.me",
		"1g.12gb+me.all": "nvidia.com/mig-1g.12gb.me.all",
		"1g.24gb+gfx":    "nvidia.com/mig-1g.24gb.gfx",
		"1g.10gb-me":     "nvidia.com/mig-1g.10gb-me",
		"1c.3g.20gb":     "nvidia.com/mig-1c.3g.20gb",
		"1g.5gb+gfx,me":  "nvidia.com/mig-1g.5gb.gfx.me",
	} {
		if got := r.Of(profile); got != want || !r.Has(got) {
			t.Errorf("%s is %s, want %s", profile, got, want)
		}
	}
	for name, want := range map[string]bool{
		"nvidia.com/gpu": true, "nvidia.com/gpu.shared": true, "nvidia.com/mig-1g.10gb.shared": true, "nvidia.com/gpus": false, "example.com/mig-1g.10gb": false, "mig-1g.10gb": false, "": false,
	} {
		if r.Has(name) != want {
			t.Errorf("%q is one of them: %v", name, !want)
		}
	}
	if r := (Resources{GPU: "example.com/gpu.shared"}); !r.Has(r.GPU) || !r.Has(r.GPU+".shared") || r.Has("example.com/gpu") {
		t.Errorf("%s and its replicas are not its own", r.GPU)
	}
	if got := (Resources{GPU: "example.com/gpu"}).Of("1g.5gb"); got != "example.com/mig-1g.5gb" {
		t.Errorf("got %s", got)
	}
}

// gpus are spelled "whole", "mig:1g,3g" (partitioned), "dyn" (dynamic), "dyn:3g,made" and so on.
func gpus(spec string) []GPU {
	var list []GPU
	for i, kind := range strings.Fields(spec) {
		g := GPU{UUID: fmt.Sprintf("GPU-%d", i), Minor: i, Dynamic: strings.HasPrefix(kind, "dyn")}
		_, parts, partitioned := strings.Cut(kind, ":")
		g.MIGEnabled = partitioned
		for j, profile := range strings.FieldsFunc(parts, func(c rune) bool { return c == ',' }) {
			p := Partition{UUID: fmt.Sprintf("MIG-%d-%d", i, j), Ref: Ref{GPU: g.UUID, Placement: Placement{Start: j, Size: 1}}, Parent: i, Profile: profile, Made: profile == "made"}
			switch profile {
			case "odd":
				p.Profile = ""
			case "unmade":
				p.UUID = ""
			}
			g.Partitions = append(g.Partitions, p)
		}
		list = append(list, g)
	}
	return list
}

func TestOffers(t *testing.T) {
	for _, tt := range []struct {
		gpus                string
		none, single, mixed string
	}{
		{gpus: ""},
		{"whole whole", "gpu=0 gpu=1", "gpu=0 gpu=1", "gpu=0 gpu=1"},
		{"mig:1g,1g mig:1g", "gpu=0 gpu=1", "gpu=0-0 gpu=0-1 gpu=1-0", "mig-1g=0-0 mig-1g=0-1 mig-1g=1-0"},
		// An odd one out is left out, where NVIDIA's plugin ends.
		{"mig:1g,1g mig:1g,3g", "gpu=0 gpu=1", "gpu=0-0 gpu=0-1 gpu=1-0 !1-1:type", "mig-1g=0-0 mig-1g=0-1 mig-1g=1-0 mig-3g=1-1"},
		{"mig:1g whole whole", "gpu=0 gpu=1 gpu=2", "!0-0:same gpu=1 gpu=2", "mig-1g=0-0 gpu=1 gpu=2"},
		{"mig:1g mig:1g whole", "gpu=0 gpu=1 gpu=2", "gpu=0-0 gpu=1-0 !2:same", "mig-1g=0-0 mig-1g=1-0 gpu=2"},
		{"mig:3g mig:1g", "gpu=0 gpu=1", "!0-0:type gpu=1-0", "mig-3g=0-0 mig-1g=1-0"},
		{"mig:1g whole", "gpu=0 gpu=1", "!0-0:same gpu=1", "mig-1g=0-0 gpu=1"},
		{"mig: mig:1g", "gpu=0 gpu=1", "!0:has gpu=1-0", "!0:has mig-1g=1-0"},
		{"mig:odd,1g,unmade", "gpu=0", "!0-0:its gpu=0-1", "!0-0:its mig-1g=0-1"},
		{"mig:unknown mig:unknown mig:1g", "gpu=0 gpu=1 gpu=2", "!0-0:its !1-0:its gpu=2-0", "!0-0:its !1-0:its mig-1g=2-0"},
		// What claims make of a GPU is nothing to limits.
		{"dyn dyn: dyn:made", "gpu=0", "gpu=0", "gpu=0"},
		{"dyn:made dyn:made mig:1g", "gpu=2", "!2-0:same", "mig-1g=2-0"},
		{"dyn:made,3g whole", "gpu=1", "!0-1:same gpu=1", "mig-3g=0-1 gpu=1"},
	} {
		for strategy, want := range map[MIGStrategy]string{
			"": tt.none, MIGStrategyNone: tt.none, MIGStrategySingle: tt.single, MIGStrategyMixed: tt.mixed,
		} {
			offers, leftOut := Resources{GPU: "nvidia.com/gpu", Strategy: strategy}.Offers(gpus(tt.gpus))
			var got []string
			short := func(d Device) string { return d.UUID()[4:] }
			for _, o := range offers {
				got = append(got, strings.TrimPrefix(o.Resource, "nvidia.com/")+"="+short(o.Device))
			}
			for _, l := range leftOut {
				reason := strings.Fields(l.Reason)
				word := reason[0]
				if l.Reason == leftOutEnabled {
					word = "same"
				}
				if l.Reason == leftOutTypes {
					word = "type"
				}
				got = append(got, "!"+short(l.Device)+":"+word)
			}
			place := func(s string) string { return strings.TrimPrefix(s[strings.IndexAny(s, "=!")+1:], "!") }
			slices.SortStableFunc(got, func(a, b string) int { return strings.Compare(place(a), place(b)) })
			if strings.Join(got, " ") != want {
				t.Errorf("%q by %q: %s, want %s", tt.gpus, strategy, strings.Join(got, " "), want)
			}
			for i, a := range offers {
				for _, b := range offers[:i] {
					if a.Device.Ref().Overlaps(b.Device.Ref()) {
						t.Errorf("%q by %q: %s and %s are the same hardware", tt.gpus, strategy, a.Device.Name(), b.Device.Name())
					}
				}
			}
		}
	}
}

// Partitions of one GPU may have different numbers of replicas, or none.
func TestReplicasOfSinglePartitions(t *testing.T) {
	resource := "nvidia.com/mig-1g.10gb"
	part := func(id string, start int) Partition {
		return Partition{UUID: id, Profile: "1g.10gb", Ref: Ref{GPU: "GPU-a", Placement: Placement{Start: start, Size: 1}}}
	}
	for name, test := range map[string]struct {
		replicas Replicas
		want     []string
	}{
		"all":    {Replicas{Count: 2}, []string{"MIG-a::0", "MIG-a::1", "MIG-b::0", "MIG-b::1"}},
		"one":    {Replicas{Of: map[string]int{"MIG-b": 2}}, []string{"MIG-a", "MIG-b::0", "MIG-b::1"}},
		"more":   {Replicas{Count: 2, Of: map[string]int{"MIG-a": 3}}, []string{"MIG-a::0", "MIG-a::1", "MIG-a::2", "MIG-b::0", "MIG-b::1"}},
		"others": {Replicas{Of: map[string]int{"MIG-c": 2}}, []string{"MIG-a", "MIG-b"}},
	} {
		gpu := GPU{
			UUID: "GPU-a", MIGCapable: true, MIGEnabled: true, MemoryBytes: 80 << 30, Partitions: []Partition{part("MIG-a", 0), part("MIG-b", 1)},
			Sharing: Sharing{Strategy: TimeSlicing, Replicas: map[string]Replicas{resource: test.replicas}},
		}
		offers, leftOut := Resources{GPU: "nvidia.com/gpu", Strategy: MIGStrategyMixed}.Offers([]GPU{gpu})
		var got []string
		for _, o := range offers {
			got = append(got, o.ID())
			if o.Device.Sharing().Shared() == o.Share.Whole() {
				t.Errorf("%s: %s is shared: %t", name, o.ID(), o.Device.Sharing().Shared())
			}
		}
		if !slices.Equal(got, test.want) || len(leftOut) > 0 {
			t.Errorf("%s: offers %v, %v, want %v", name, got, leftOut, test.want)
		}
	}
}

// TestShareOfAllMemory: a claim that has all memory of a GPU has it alone if claims share it by memory, and beside others if any number may have it.
func TestShareOfAllMemory(t *testing.T) {
	for claims, alone := range map[ClaimShares]bool{ByMemory: true, Unlimited: false} {
		d := Device{GPU: GPU{MemoryBytes: 80 << 30, Sharing: Sharing{Claims: claims}}}
		if got := d.Share(Consumed{Memory: 80 << 30}).Whole(); got != alone {
			t.Errorf("%s: alone: %t", claims, got)
		}
	}
}
