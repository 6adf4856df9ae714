// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

const gibibyte = 1 << 30

// shares adds a claim that was given parts of a GPU, so many GiB each.
func (w *world) shares(name, device string, parts ...int64) *world {
	w.claim(name, false, slices.Repeat([]string{device}, len(parts))...)
	results := w.claims[len(w.claims)-1].Status.Allocation.Devices.Results
	for i, part := range parts {
		id := types.UID(name)
		results[i].ShareID = &id
		results[i].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{memoryCapacity: *resource.NewQuantity(part*gibibyte, resource.BinarySI)}
	}
	return w
}

func renamed(n int64) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{resourceName + sharedSuffix: *resource.NewQuantity(n, resource.DecimalSI)}
	}
}

// glimpse of the world's processes, which live as long as the test does, on GPUs of 80 GiB that limits see as four each.
func (w *world) glimpse(t *testing.T) Glimpse {
	t.Helper()
	started, err := startTime("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	for i := range w.seen {
		w.seen[i].pid, w.seen[i].started = os.Getpid(), started
		for j := range w.seen[i].devices {
			w.seen[i].devices[j].GPU.Memory, w.seen[i].devices[j].GPU.Replicas = 80*gibibyte, 4
		}
	}
	return Glimpse{w.seen}
}

func (w *world) remembered() *Memory {
	m := NewMemory()
	for i := range w.pods {
		m.Pod(&w.pods[i])
	}
	for i := range w.claims {
		m.Claim(&w.claims[i])
	}
	return m
}

// TestOneBudgetOfMemory: shares of claims and replicas of limits may be on a GPU together as long as there is memory for all.
func TestOneBudgetOfMemory(t *testing.T) {
	for name, test := range map[string]struct {
		world  *world
		guilty bool
	}{
		"two shares that fit":    {world: new(world).pod("a", claim("a")).pod("b", claim("b")).shares("a", "gpu-0", 40).shares("b", "gpu-0", 40).sees("a", 0).sees("b", 0)},
		"two shares that do not": {world: new(world).pod("a", claim("a")).pod("b", claim("b")).shares("a", "gpu-0", 40).shares("b", "gpu-0", 41).sees("a", 0).sees("b", 0), guilty: true},
		"three, of which each two fit": {world: new(world).pod("a", claim("a")).pod("b", claim("b")).pod("c", claim("c")).
			shares("a", "gpu-0", 30).shares("b", "gpu-0", 30).shares("c", "gpu-0", 30).sees("a", 0).sees("b", 0).sees("c", 0), guilty: true},
		"a share beside all": {world: new(world).pod("a", claim("a")).pod("b", claim("b")).shares("a", "gpu-0", 1).claim("b", false, "gpu-0").sees("a", 0).sees("b", 0), guilty: true},
		"a share beside what is counted as all": {world: new(world).pod("a", claim("a")).pod("b", claim("b")).
			shares("a", "gpu-0", 1).shares("b", "gpu-0", 80).sees("a", 0).sees("b", 0), guilty: true},
		"one share in two pods": {world: new(world).pod("a", claim("c")).pod("b", claim("c")).shares("c", "gpu-0", 60).sees("a", 0).sees("b", 0)},
		"two shares of one claim": {world: new(world).pod("a", claim("a")).pod("b", claim("b")).
			shares("a", "gpu-0", 30, 30).shares("b", "gpu-0", 30).sees("a", 0).sees("b", 0), guilty: true},
		"four replicas": {world: new(world).pod("a", limits(1)).pod("b", limits(1)).pod("c", renamed(1)).pod("d", limits(1)).
			sees("a", 0).sees("b", 0).sees("c", 0).sees("d", 0)},
		"five replicas": {world: new(world).pod("a", limits(1)).pod("b", limits(1)).pod("c", renamed(1)).pod("d", limits(1)).pod("e", limits(1)).
			sees("a", 0).sees("b", 0).sees("c", 0).sees("d", 0).sees("e", 0), guilty: true},
		"several replicas of one pod": {world: new(world).pod("a", limits(3)).pod("b", renamed(2)).sees("a", 0).sees("b", 0), guilty: true},
		"several replicas of one pod on two GPUs, in unknown numbers": {world: new(world).pod("a", limits(4)).pod("b", limits(2)).
			sees("a", 0, 1).sees("b", 0)},
		"replicas and shares that fit": {world: new(world).pod("a", limits(2)).pod("b", claim("b")).shares("b", "gpu-0", 40).sees("a", 0).sees("b", 0)},
		"replicas and a share that do not": {world: new(world).pod("a", limits(2)).pod("b", claim("b")).
			shares("b", "gpu-0", 41).sees("a", 0).sees("b", 0), guilty: true},
		"a replica beside all":         {world: new(world).pod("a", limits(1)).pod("b", claim("b")).claim("b", false, "gpu-0").sees("a", 0).sees("b", 0), guilty: true},
		"an unknown pod":               {world: new(world).pod("a", limits(1)).sees("a", 0).sees("ghost", 0), guilty: true},
		"admin access beside replicas": {world: new(world).pod("a", limits(4)).pod("m", claim("all")).claim("all", true, "gpu-0").sees("a", 0).sees("m", 0)},
	} {
		t.Run(name, func(t *testing.T) {
			suspicion := theOnly(t, test.world.glimpse(t))
			double, judgement := test.world.remembered().Judge(suspicion)
			if (judgement == Guilty) != test.guilty {
				t.Errorf("%s: %s", judgement, double)
			}
		})
	}
}

// equal adds a claim that was allocated equal shares of a GPU, and no memory.
func (w *world) equal(name, device string, shares int64) *world {
	w.shares(name, device, 0)
	results := w.claims[len(w.claims)-1].Status.Allocation.Devices.Results
	results[0].ConsumedCapacity[sharesCapacity] = *resource.NewQuantity(shares, resource.DecimalSI)
	return w
}

// TestOneBudgetOfEqualShares: claims and replicas may use a GPU together while it has enough equal shares and memory for all.
func TestOneBudgetOfEqualShares(t *testing.T) {
	two := func() *world { return new(world).pod("a", claim("a")).pod("b", claim("b")).sees("a", 0).sees("b", 0) }
	beside := func(n int64) *world {
		return new(world).pod("a", claim("a")).pod("b", limits(n)).sees("a", 0).sees("b", 0)
	}
	for name, test := range map[string]struct {
		world  *world
		shares int
		guilty bool
	}{
		"as many as there are":               {two().equal("a", "gpu-0", 6).equal("b", "gpu-0", 2), 8, false},
		"one more":                           {two().equal("a", "gpu-0", 6).equal("b", "gpu-0", 3), 8, true},
		"one beside all":                     {two().equal("a", "gpu-0", 1).claim("b", false, "gpu-0"), 8, true},
		"a replica of four has two of eight": {beside(3).equal("a", "gpu-0", 2), 8, false},
		"and no less":                        {beside(3).equal("a", "gpu-0", 3), 8, true},
		"and one of three":                   {beside(2).equal("a", "gpu-0", 1), 3, false},
		"memory counts beside them":          {two().shares("a", "gpu-0", 50).shares("b", "gpu-0", 31), 8, true},
		"claims without a limit":             {two().equal("a", "gpu-0", 0).shares("b", "gpu-0", 80), 0, false},
		"one of them beside all":             {two().equal("a", "gpu-0", 0).claim("b", false, "gpu-0"), 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			suspicion := theOnly(t, test.world.glimpse(t))
			for _, one := range suspicion.those {
				one.devices[0].GPU.Shares = test.shares
			}
			if double, judgement := test.world.remembered().Judge(suspicion); (judgement == Guilty) != test.guilty {
				t.Errorf("%s: %s", judgement, double)
			}
		})
	}
}

// TestACrowdIsOfLivingProcesses, and of several pods; each GPU has its own.
func TestACrowdIsOfLivingProcesses(t *testing.T) {
	g := new(world).sees("a", 0).sees("b", 0, 1).sees("c", 0).sees("b", 0).glimpse(t)
	s := theOnly(t, g)
	if len(s.those) != 4 || !strings.Contains(s.String(), "pod c") {
		t.Errorf("suspects %s", s)
	}
	g.sightings[0].started += "0"
	if s := theOnly(t, g); len(s.those) != 3 || strings.Contains(s.Key(), id("a")) {
		t.Errorf("suspects %s", s)
	}
	g.sightings[2].started += "0"
	if found := g.Suspicions(); len(found) > 0 {
		t.Errorf("one pod is no crowd: %v", found)
	}
}

// The oracle cannot know which of two allocations was prepared, and assumes the smaller one.
func TestTheLeastIsBelieved(t *testing.T) {
	w := new(world).pod("a", claim("a")).pod("b", claim("b")).shares("a", "gpu-0", 30, 30).shares("b", "gpu-0", 50).sees("a", 0).sees("b", 0)
	m := w.remembered()
	suspicion := theOnly(t, w.glimpse(t))
	if _, judgement := m.Judge(suspicion); judgement != Guilty {
		t.Error("60 and 50 of 80 GiB fit")
	}
	w.shares("a", "gpu-0", 30)
	m.Claim(&w.claims[len(w.claims)-1])
	if double, judgement := m.Judge(suspicion); judgement != Innocent {
		t.Errorf("30 and 50 of 80 GiB do not fit: %s", double)
	}
}

// TestSharesInAPicture: claims with shares are right side by side, and wrong where they are too much.
func TestSharesInAPicture(t *testing.T) {
	w := new(world).pod("a", claim("a")).pod("b", claim("b")).shares("a", "gpu-0", 40).shares("b", "gpu-0", 40).sees("a", 0).sees("b", 0)
	w.glimpse(t)
	if doubles := w.picture(t).DoublyOwned(); len(doubles) > 0 {
		t.Errorf("doubly owned: %v", doubles)
	}
	w.pod("c", claim("c")).shares("c", "gpu-0", 1).sees("c", 0)
	w.glimpse(t)
	doubles := w.picture(t).DoublyOwned()
	if len(doubles) != 1 || !strings.Contains(doubles[0].String(), "claim/uid-c has 1024 MiB of 81920") {
		t.Errorf("doubly owned: %v", doubles)
	}
}
