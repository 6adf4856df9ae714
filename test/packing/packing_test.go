// SPDX-License-Identifier: Apache-2.0

package packing

import (
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mig"
	"github.com/tandem-gpu/tandem/simulated/models"
)

// Not testing.Verbose: test2json sets it.
var table = flag.Bool("table", false, "as many samples as the table in docs/design/0011-mig.md has")

// TestOurOrderPacksBetter holds what docs/design/0011-mig.md says, and prints its table with go test -v -table. Models with eight memory
// slices differ only in what never runs out first.
func TestOurOrderPacksBetter(t *testing.T) {
	onGPU, onNode := 150, 20
	if *table {
		onGPU, onNode = 1000, 200
	}
	t.Logf("%-22s %8s %8s %9s %8s", "placed, %", "by name", "ours", "foreseen", "optimum")
	for _, name := range []string{"A30-24GB", "A100-40GB", "H100-80GB"} {
		r := GPU(model(t, name), onGPU, 1)
		t.Logf("%-22s %8.2f %8.2f %9.2f %8.2f", name, r.Share(r.ByName), r.Share(r.Ordered),
			r.Share(r.Foreseen), r.Share(r.Optimum))
		if r.Ordered < r.ByName || r.Foreseen < r.Ordered || r.Optimum < r.Foreseen {
			t.Errorf("%s: %+v is not in order", name, r)
		}
	}
	for _, load := range []float64{0.6, 0.8, 1} {
		r := Node(model(t, "H100-80GB"), load, onNode, 1)
		t.Logf("8 × H100, load %.1f      %8.2f %8.2f", load, r.Share(r.ByName), r.Share(r.Ordered))
		if r.Ordered <= r.ByName {
			t.Errorf("load %.1f: our order places %d, that by name %d", load, r.Ordered, r.ByName)
		}
	}
}

// TestOptimum compares with a search that remembers nothing.
func TestOptimum(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 0))
	for _, name := range []string{"A30-24GB", "H100-80GB"} {
		profiles, g := model(t, name).Offered(), mig.NewGeometry(model(t, name).Offered())
		for range 20 {
			requests := sequence(random, profiles, 9, 1, 0.1, 1)
			for _, mayTurnAway := range []bool{false, true} {
				want := everything(g, profiles, requests, 0, nil, mayTurnAway)
				if got := optimum(profiles, requests, mayTurnAway); got != want {
					t.Errorf("%s: %v (may turn away: %t): optimum %d, want %d", name, requests, mayTurnAway, got, want)
				}
			}
		}
	}
}

type granted struct {
	mig.Instance
	ends int
}

func everything(g mig.Geometry, profiles []device.Profile, requests []request, now int, all []granted, mayTurnAway bool) int {
	if now == len(requests) {
		return 0
	}
	var live []granted
	var held []mig.Instance
	for _, x := range all {
		if x.ends > now {
			live, held = append(live, x), append(held, x.Instance)
		}
	}
	most, fits, left := 0, false, g.Left(held)
	p := profiles[requests[now].profile]
	for _, at := range p.Placements {
		i := mig.Instance{ProfileID: p.ID, Placement: at}
		if g.Takes(i).Within(left) {
			with := append(live[:len(live):len(live)], granted{i, requests[now].ends})
			fits, most = true, max(most, 1+everything(g, profiles, requests, now+1, with, mayTurnAway))
		}
	}
	if !fits || mayTurnAway {
		most = max(most, everything(g, profiles, requests, now+1, live, mayTurnAway))
	}
	return most
}

func model(t *testing.T, name string) models.Model {
	t.Helper()
	m, ok := models.Named(name)
	if !ok {
		t.Fatalf("no model %s", name)
	}
	return m
}
