// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// workloadsOfParts returns one workload for each kind of part that a holder may have of a GPU. The node has room for all of them at once.
func workloadsOfParts() []Workload {
	return []Workload{
		{Name: "memory", Shape: Deployment, API: oracle.Claim, GPUs: 1, Replicas: 1, Memory: sizesInGiB[0]},
		{Name: "equal", Shape: Deployment, API: oracle.Claim, GPUs: 1, Replicas: 1, Of: equal},
		{Name: "unlimited", Shape: Deployment, API: oracle.Claim, GPUs: 1, Replicas: 1, Of: unlimited},
		{Name: "replica", Shape: Deployment, API: oracle.Limits, GPUs: 1, Replicas: 1},
		{Name: "renamed", Shape: Deployment, API: oracle.Limits, GPUs: 1, Replicas: 1, Renamed: true},
	}
}

// eachPart checks on an empty node that pods with every kind of part run beside each other. A random round of a short run may have placed
// no pod of one kind.
func (r *run) eachPart(ctx context.Context, u user) error {
	if err := u.settle(ctx); err != nil {
		return err
	}
	for _, w := range workloadsOfParts() {
		if err := u.create(ctx, w); err != nil {
			return err
		}
	}
	if err := r.settle(ctx, u); err != nil {
		return err
	}
	return r.finish(ctx, u)
}
