// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// machine builds an inventory of n GPUs whose links are told pair by pair.
func machine(n int, numa func(i int) int, link func(i, j int) device.Pair) device.Inventory {
	inv := device.Inventory{Links: make([][]device.Pair, n)}
	for i := range n {
		inv.GPUs = append(inv.GPUs, device.GPU{UUID: uuid(i), Index: i, Minor: i, NUMANode: numa(i)})
		inv.Links[i] = make([]device.Pair, n)
		for j := range n {
			if i != j {
				inv.Links[i][j] = link(min(i, j), max(i, j))
			}
		}
	}
	return inv
}

func uuid(i int) string { return fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i) }

// islands of equal size that are fully connected inside and not at all between, one a NUMA node.
func islands(n, size, nvlinks int) device.Inventory {
	inv := machine(n, func(i int) int { return i / size }, func(i, j int) device.Pair {
		if i/size == j/size {
			return device.Pair{PCIe: device.LinkNode, NVLinks: nvlinks}
		}
		return device.Pair{PCIe: device.LinkSystem}
	})
	for i := range inv.GPUs {
		if nvlinks > 0 {
			inv.GPUs[i].NVLinkDomain = fmt.Sprint("domain-", i/size)
		}
	}
	return inv
}

func nvswitch(n int) device.Inventory {
	return machine(n, func(i int) int { return i / max(n/2, 1) }, func(i, j int) device.Pair {
		return device.Pair{PCIe: device.LinkSystem, NVLinks: 18}
	})
}

func upTo(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}

func TestPlannerChooses(t *testing.T) {
	for name, test := range map[string]struct {
		inventory device.Inventory
		available []int
		required  []int
		size      int
		want      []int
	}{
		"highest of equals":                                 {nvswitch(8), upTo(8), nil, 1, []int{7}},
		"a pair inside one NUMA node":                       {islands(8, 4, 0), upTo(8), nil, 2, []int{7, 6}},
		"from the broken island, not the whole one":         {islands(8, 4, 2), []int{0, 1, 4, 5, 6, 7}, nil, 2, []int{1, 0}},
		"a single from the broken island":                   {islands(8, 4, 2), []int{0, 4, 5, 6, 7}, nil, 1, []int{0}},
		"away from claims rather than the broken NUMA node": {islands(8, 4, 0), []int{2, 3, 4, 5, 6, 7}, nil, 1, []int{7}},
		"NVLink across NUMA nodes beats PCIe closeness": {machine(4, func(i int) int { return i / 2 }, func(i, j int) device.Pair {
			if i == 0 && j == 3 {
				return device.Pair{PCIe: device.LinkSystem, NVLinks: 1}
			}
			return device.Pair{PCIe: device.LinkSingle}
		}), upTo(4), nil, 2, []int{3, 0}},
		"required stays and pulls its neighbours": {islands(8, 4, 2), upTo(8), []int{1}, 2, []int{3, 1}},
		"all":                        {islands(8, 4, 2), upTo(8), nil, 8, []int{7, 6, 5, 4, 3, 2, 1, 0}},
		"more than there are":        {islands(8, 4, 2), []int{2, 3}, nil, 5, []int{3, 2}},
		"none":                       {nvswitch(8), upTo(8), nil, 0, nil},
		"negative":                   {nvswitch(8), upTo(8), []int{2}, -3, nil},
		"less than required":         {nvswitch(8), upTo(8), []int{2, 5}, 1, []int{5}},
		"nothing available":          {nvswitch(8), nil, nil, 2, nil},
		"links unknown":              {device.Inventory{GPUs: nvswitch(8).GPUs}, upTo(8), nil, 3, []int{7, 6, 5}},
		"two whole islands of eight": {islands(64, 8, 18), upTo(64), nil, 16, []int{63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48}},
	} {
		t.Run(name, func(t *testing.T) {
			got := newPlanner(test.inventory.GPUs, test.inventory).choose(test.available, test.required, test.size)
			if !slices.Equal(got, test.want) {
				t.Errorf("chose %v, want %v", got, test.want)
			}
		})
	}
}

// TestPlannerAgainstTwin compares with a twin that looks at every set and scores it from the definition alone.
func TestPlannerAgainstTwin(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 2026))
	for round := range 3000 {
		n := 1 + random.IntN(9)
		// Few distinct values make many ties.
		inv := machine(n, func(int) int { return random.IntN(3) - 1 }, func(int, int) device.Pair { return device.Pair{} })
		for i := range n {
			for j := range i {
				inv.Links[i][j] = device.Pair{PCIe: device.Link(random.IntN(3)), NVLinks: random.IntN(3)}
				inv.Links[j][i] = inv.Links[i][j]
			}
		}
		available := random.Perm(n)[:random.IntN(n+1)]
		required := slices.Clone(available[:random.IntN(len(available)+1)/2])
		size := random.IntN(n + 2)
		got := newPlanner(inv.GPUs, inv).choose(available, required, size)
		if want := twin(inv, available, required, size); !slices.Equal(got, want) {
			t.Fatalf("round %d: %d of %v with %v: chose %v, twin %v\n%v", round, size, available, required, got, want, inv.Links)
		}
	}
}

func twin(inv device.Inventory, available, required []int, size int) []int {
	size = min(size, len(available))
	if size <= len(required) {
		list := slices.Clone(required)
		slices.Sort(list)
		slices.Reverse(list)
		return list[:size]
	}
	type score [4]int // of the chosen: NVLinks, PCIe, shared NUMA nodes; of the rest: NVLinks
	var best []int
	var bestScore score
	for mask := range 1 << len(inv.GPUs) {
		var chosen, rest []int
		for i := len(inv.GPUs) - 1; i >= 0; i-- {
			switch in := mask&(1<<i) != 0; {
			case in:
				chosen = append(chosen, i)
			case slices.Contains(available, i):
				rest = append(rest, i)
			}
		}
		legal := len(chosen) == size
		for _, i := range chosen {
			legal = legal && slices.Contains(available, i)
		}
		for _, i := range required {
			legal = legal && slices.Contains(chosen, i)
		}
		if !legal {
			continue
		}
		var s score
		for k, set := range [][]int{chosen, rest} {
			for _, i := range set {
				for _, j := range set {
					if i < j {
						s[3*k] += inv.Links[i][j].NVLinks
						if k > 0 {
							continue
						}
						s[1] += int(inv.Links[i][j].PCIe)
						if inv.GPUs[i].NUMANode == inv.GPUs[j].NUMANode && inv.GPUs[i].NUMANode >= 0 {
							s[2]++
						}
					}
				}
			}
		}
		if best == nil || slices.Compare(s[:], bestScore[:]) > 0 || s == bestScore && slices.Compare(chosen, best) > 0 {
			best, bestScore = chosen, s
		}
	}
	return best
}

// TestPlannerGreedy checks what is too large to search: on islands, where the best is known, greedy must find it, and
// everywhere its answer must be legal.
func TestPlannerGreedy(t *testing.T) {
	inv := islands(256, 8, 18)
	p := newPlanner(inv.GPUs, inv)
	random := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		available := random.Perm(256)[:64+random.IntN(192)]
		size := 1 + random.IntN(64)
		required := slices.Clone(available[:random.IntN(min(3, size))])
		got := p.choose(available, required, size)
		if len(got) != size || !slices.IsSortedFunc(got, func(a, b int) int { return b - a }) {
			t.Fatalf("%d of %d: got %v", size, len(available), got)
		}
		for _, i := range required {
			if !slices.Contains(got, i) {
				t.Fatalf("required %d is not in %v", i, got)
			}
		}
		for _, i := range got {
			if !slices.Contains(available, i) {
				t.Fatalf("%d is not available", i)
			}
		}
	}
	broken := slices.DeleteFunc(upTo(256), func(i int) bool { return i%8 >= 5 && i != 45 && i != 46 })
	if got, want := p.choose(broken, nil, 7), []int{46, 45, 44, 43, 42, 41, 40}; !slices.Equal(got, want) {
		t.Errorf("the one island with 7 left: chose %v, want %v", got, want)
	}
}

func BenchmarkPlanner(b *testing.B) {
	for _, bench := range []struct {
		name      string
		inventory device.Inventory
		size      int
	}{
		{"8 choose 4", nvswitch(8), 4},
		{"16 choose 8", nvswitch(16), 8},
		{"256 choose 8", islands(256, 8, 18), 8},
		{"256 choose 128", islands(256, 8, 18), 128},
	} {
		b.Run(bench.name, func(b *testing.B) {
			p := newPlanner(bench.inventory.GPUs, bench.inventory)
			available := upTo(len(bench.inventory.GPUs))
			for b.Loop() {
				p.choose(available, nil, bench.size)
			}
		})
	}
}
