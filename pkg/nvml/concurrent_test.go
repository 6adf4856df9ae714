// SPDX-License-Identifier: Apache-2.0

package nvml_test

import (
	"context"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated/smi"
)

// All at once: partitions created and destroyed on two GPUs, an administrator at a third, scans, container edits, and callers
// that give up. In the end the inventory equals the GPUs' state, and each caller that got a partition has it.
func TestEverybodyAtOnce(t *testing.T) {
	m := newMachine(t, "a100x8-mig")
	for i := range 3 {
		m.profile.GPUs[i].Partitions = nil
	}
	m.materialize(t)
	node := m.open(t)
	gpus := node.Inventory().GPUs[:3]
	var mu sync.Mutex
	made := map[device.Ref]string{}
	var workers sync.WaitGroup
	work := func(n int, do func(random *rand.Rand)) {
		workers.Add(1)
		go func() {
			defer workers.Done()
			random := rand.New(rand.NewPCG(7, uint64(n)))
			for range 40 {
				do(random)
			}
		}()
	}
	for n := range 4 {
		g := gpus[n%2]
		work(n, func(random *rand.Rand) {
			ctx, cancel := context.WithCancel(t.Context())
			if random.IntN(4) == 0 {
				cancel()
			}
			defer cancel()
			profile := g.Profiles[random.IntN(len(g.Profiles))]
			ref := device.Ref{GPU: g.UUID, Placement: profile.Placements[random.IntN(len(profile.Placements))]}
			p, err := node.Create(ctx, ref, profile)
			if err != nil {
				return
			}
			now, _ := node.Inventory().ByUUID(g.UUID)
			if !slices.ContainsFunc(now.Partitions, func(q device.Partition) bool { return q.UUID == p.UUID }) {
				t.Errorf("the inventory has no %s", p.Name())
			}
			if random.IntN(3) > 0 {
				if err := node.Destroy(t.Context(), p.Ref); err != nil {
					t.Error(err)
				}
				return
			}
			mu.Lock()
			defer mu.Unlock()
			made[p.Ref] = p.UUID
		})
	}
	work(10, func(*rand.Rand) { scan(t, node) })
	work(11, func(*rand.Rand) {
		if _, err := node.ContainerEdits(t.Context()); err != nil {
			t.Error(err)
		}
	})
	work(12, func(*rand.Rand) {
		for _, args := range [][]string{{"mig", "-i", "2", "-cgi", "9", "-C"}, {"mig", "-i", "2", "-dci"}, {"mig", "-i", "2", "-dgi"}} {
			_ = smi.At(m.dir, args, io.Discard)
		}
	})
	workers.Wait()
	known := scan(t, node)
	for i, g := range known.GPUs[:3] {
		if diff := cmp.Diff(partitions(t, node, g.UUID), g.Partitions); diff != "" {
			t.Errorf("GPU %d (-there +known):\n%s", i, diff)
		}
	}
	var left int
	for _, g := range known.GPUs[:2] {
		for _, p := range g.Partitions {
			left++
			if made[p.Ref] != p.UUID {
				t.Errorf("%s (%s) has no caller", p.Name(), p.UUID)
			}
		}
	}
	if left != len(made) {
		t.Errorf("%d partitions are left, %d were made and kept", left, len(made))
	}
}
