// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// sizesInGiB are the amounts of memory that claims request. The GPUs have a little less than 80 GiB, so no replica has one of these sizes.
var sizesInGiB = []int{5, 10, 20, 35, 60}

// WithSharing returns a mix for GPUs that several holders may have at once.
func (m Mix) WithSharing() Mix {
	m.Sharing = true
	// The oracle could not tell its whole GPUs from replicas.
	return m.without(ForeignPlugin)
}

// ofPart makes a claim request memory, equal shares or the GPU without a limit, by these weights.
func (p *planner) ofPart(w *Workload, sizes, shares []int, weights ...int) {
	switch p.weighted(weights...) {
	case 0:
		w.Memory = sizesInGiB[p.weighted(sizes...)]
		return
	case 1:
		if w.Shares = p.weighted(shares...); w.Shares == 0 {
			w.Of = equal
		}
	case 2:
		w.Of = unlimited
	}
	if p.chance(25) {
		w.Memory = sizesInGiB[p.weighted(sizes...)]
	}
}

// createShares is create for parts of GPUs. Claims request memory, equal shares or the GPU without a limit; limits request replicas.
func (p *planner) createShares(name string) Op {
	w := Workload{Name: name, API: oracle.Claim, GPUs: 1, Replicas: 1}
	switch p.weighted(40, 30, 12, 18) {
	case 0:
		w.Shape = Bare
	case 1:
		w.Shape, w.Replicas = Deployment, p.between(1, 5)
	case 2:
		w.Shape, w.Replicas, w.Work = Job, p.between(1, 4), time.Duration(p.between(1, 8))*time.Second
	case 3:
		w.Shape, w.Replicas = Shared, p.between(2, 4)
	}
	switch {
	case w.Shape == Shared || p.chance(60):
		p.ofPart(&w, []int{15, 30, 30, 15, 10}, []int{25, 35, 25, 10, 5}, 55, 28, 17)
	default:
		w.API, w.Renamed = oracle.Limits, p.chance(40)
	}
	if p.chance(20) && !w.Renamed && w.Shares == 0 && w.Of == "" {
		// A claim requests memory of two GPUs, limits request two replicas, of one GPU or two. Renamed replicas are by MPS, and a container
		// can be the client of one daemon only. Only one GPU has equal shares, and only one has no limit.
		w.GPUs, w.Replicas = 2, min(w.Replicas, 3)
	}
	return p.add(Create, p.decorate(w))
}

// burstOfShares asks for parts of GPUs by both APIs at once, more than there are.
func (p *planner) burstOfShares(name string) Op {
	shape := Deployment
	if p.chance(50) {
		shape = Bare
	}
	claims := Workload{Name: name + "-claims", Shape: shape, API: oracle.Claim, GPUs: 1, Replicas: 8}
	p.ofPart(&claims, []int{0, 20, 50, 30, 0}, []int{20, 50, 30}, 50, 30, 20)
	limits := Workload{Name: name + "-limits", Shape: shape, API: oracle.Limits, GPUs: 1, Replicas: 8}
	if p.chance(50) {
		// More of the GPUs are full with them, and those that claims are given first are among them.
		limits.GPUs, limits.Replicas = 2, 7
	}
	both := []Workload{p.decorate(claims), p.decorate(limits)}
	for i := range both {
		both[i].Crash = false
	}
	if p.chance(50) {
		slices.Reverse(both)
	}
	return p.add(Burst, both...)
}
