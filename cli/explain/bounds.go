// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"errors"
	"fmt"
	"time"
)

// bounds limit what Why spends on the requests of one pod. Tenants write the pod, its claims and their selectors.
type bounds struct {
	// cost bounds the cost of all evaluations, in the units of CEL. The API server accepts a selector up to a cost of 1,000,000, which takes
	// some 0.2 s.
	cost int64
	// time bounds the time of all evaluations. The cost of a selector says little about some functions, such as regular expressions.
	time time.Duration
}

// usual are enough for a selector of the class and two of the claim on 200,000 devices of the nodes that the pod may run on, which are
// evaluated before the others. The scheduler evaluates a claim for as long on one node
// (feature gate DRASchedulerFilterTimeout).
var usual = bounds{cost: 20_000_000, time: 10 * time.Second}

const (
	// conversionCost is added for each evaluation, because it converts the attributes of the device.
	conversionCost = 20
	// compilationCost is the cost of compiling one byte of a selector. A claim may have 1,024 selectors of 10 KiB.
	compilationCost = 40
)

// search bounds one search of the scheduler's allocator, which tries all combinations of devices: one node may not use all of the time. The
// scheduler gives up a node after ten seconds.
func (b bounds) search() time.Duration { return b.time / 5 }

const (
	// MostClaims bounds the claims of a pod that are read and evaluated. A pod may name thousands.
	MostClaims = 64
	// mostAlternatives bounds the requests that are evaluated. Each alternative of a request counts. A claim may have 256.
	mostAlternatives = 256
)

// errCost, errTime and errSearch complete "not evaluated: ".
var (
	errCost   = errors.New("the pod's selectors, evaluated on each device of the nodes, cost too much")
	errSearch = errors.New("the scheduler's search for devices that satisfy all requests takes too long")
)

func errTime(limit time.Duration) error {
	return fmt.Errorf("the pod's requests take longer than %s", limit)
}

// tooMany returns an error for a pod that requests more than is evaluated.
func (f Facts) tooMany(needs []need) error {
	if n := len(f.Pod.Spec.ResourceClaims); n > MostClaims {
		return fmt.Errorf("the pod has %d claims, and at most %d are evaluated", n, MostClaims)
	}
	requests := 0
	for _, n := range needs {
		requests += len(n.alternatives())
	}
	if requests > mostAlternatives {
		return fmt.Errorf("the pod makes %d requests, alternatives included, and at most %d are evaluated", requests, mostAlternatives)
	}
	return nil
}
