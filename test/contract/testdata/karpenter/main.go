// SPDX-License-Identifier: Apache-2.0

// Command karpenter is Karpenter with its provider of machines that do not exist. The provider repairs by Tandem's node condition instead of its
// own: a provider's conditions are compiled in.
package main

import (
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"
	kwok "sigs.k8s.io/karpenter/kwok/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/cloudprovider/overlay"
	"sigs.k8s.io/karpenter/pkg/controllers"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/operator"
)

// repairing is the provider.
type repairing struct{ *kwok.CloudProvider }

func (repairing) RepairPolicies() []cloudprovider.RepairPolicy {
	return []cloudprovider.RepairPolicy{
		{ConditionType: "GPURepairNeeded", ConditionStatus: corev1.ConditionTrue, TolerationDuration: 5 * time.Second},
	}
}

func main() {
	ctx, op := operator.NewOperator()
	types, err := kwok.ConstructInstanceTypes(ctx)
	if err != nil {
		log.FromContext(ctx).Error(err, "no instance types")
		os.Exit(1)
	}
	client := op.GetClient()
	provider := repairing{kwok.NewCloudProvider(ctx, client, types)}
	with := overlay.Decorate(provider, client, op.InstanceTypeStore)
	cluster := state.NewCluster(op.Clock, client, with)
	all := controllers.NewControllers(ctx, op.Manager, op.Clock, client, op.EventRecorder, with, provider, cluster, op.InstanceTypeStore)
	op.WithControllers(ctx, all...).Start(ctx)
}
