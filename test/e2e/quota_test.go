// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/dropin"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// quotaUsed waits until the quota of the example counts so many GPUs.
func (s *story) quotaUsed(want int64) {
	s.Helper()
	s.Await(soon, fmt.Sprintf("the quota to count %d GPUs", want), func() error {
		quota, err := theClient.CoreV1().ResourceQuotas(s.Namespace).Get(s.Ctx, "gpus", metav1.GetOptions{})
		if err != nil {
			return err
		}
		used := quota.Status.Used["requests.nvidia.com/gpu"]
		if used.Value() != want {
			return fmt.Errorf("it counts %s", used.String())
		}
		return nil
	})
}

// TestQuota: a namespace gets as many GPUs as its quota says, by limits and claims together.
func TestQuota(t *testing.T) {
	s := begin(t)
	s.Example("quota.yaml")
	s.quotaUsed(0)
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim-0"))
	s.Running(soon, 1, 0)
	s.Manifest(manifests.Pod("limit", "limit-0"))
	s.Running(soon, 2, 0)
	s.quotaUsed(2)
	s.WantHolds(1, 1)

	if err := s.Apply(manifests.Pod("limit", "limit-1")); err == nil || !strings.Contains(err.Error(), "exceeded quota: gpus") {
		t.Errorf("a third pod with limits: %v", err)
	}
	s.Manifest(manifests.Pod("claim", "claim-1"))
	s.Event("Pod", "claim-1", "FailedResourceClaimCreation", "exceeded quota: gpus")
	s.Running(soon, 2, 1)

	// A tenant cannot pass a claim off as the scheduler's, which quota does not count beside its pod.
	s.Kubectl("create", "role", "tenant", "-n", s.Namespace, "--verb=create", "--resource=resourceclaims.resource.k8s.io")
	s.Kubectl("create", "rolebinding", "tenant", "-n", s.Namespace, "--role=tenant", "--user=tenant")
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Name: "forged", Annotations: map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"},
	}}
	claims := s.impersonate("tenant").ResourceV1().ResourceClaims(s.Namespace)
	if _, err := claims.Create(s.Ctx, claim, metav1.CreateOptions{}); err == nil || !strings.Contains(err.Error(), "only a scheduler may write the annotation") {
		t.Errorf("a claim with the scheduler's annotation: %v", err)
	}
	claim.Annotations = nil
	if _, err := claims.Create(s.Ctx, claim, metav1.CreateOptions{}); err != nil {
		t.Errorf("a claim of the tenant: %v", err)
	}

	// The pod that waits gets the GPU that limits give back.
	s.remove("limit-0")
	s.Running(patient, 2, 0)
	s.quotaUsed(2)
	s.WantHolds(2, 0)
	s.NoDoubleOwners()
	if !t.Failed() {
		dropin.Report(t, "quota=ok")
	}
}

// TestLimitAndClaimInOnePod: a pod gets a GPU by each API. kube-scheduler never binds such a pod if a DeviceClass names the resource of the limit
// as well, so the chart's classes name none by default (docs/user/quota.md).
func TestLimitAndClaimInOnePod(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate + strings.Replace(manifests.Pod("claim", "both"), "claims: [", "limits: {nvidia.com/gpu: 1}, claims: [", 1))
	s.Running(soon, 1, 0)
	s.WantHolds(1, 1)
	if gpus := s.GPUs("both", ""); len(gpus) != 2 {
		t.Errorf("it has GPUs %v", gpus)
	}
}

// TestLimitsStayWithTheDevicePlugin: on a node full of claims a pod with limits waits until the device plugin serves it. The scheduler makes
// no claim for it, although quota counts claims as the resource of limits, also after it has started again.
func TestLimitsStayWithTheDevicePlugin(t *testing.T) {
	s := begin(t)
	pods := manifests.SingleTemplate
	for i := range gpusANode {
		pods += manifests.Pod("claim", fmt.Sprintf("claim-%d", i))
	}
	s.Manifest(pods)
	s.Running(soon, gpusANode, 0)
	s.Await(soon, "nothing to be allocatable", func() error { return s.OfferedToPods(0) })
	s.Manifest(manifests.Pod("limit", "limit-0"))
	s.Running(soon, gpusANode, 1)
	if err := theCluster.Component(cluster.Scheduler).Restart(s.Ctx); err != nil {
		t.Fatal(err)
	}
	s.remove("claim-0")
	s.Running(patient, gpusANode, 0)
	s.WantHolds(gpusANode-1, 1)
	claims, err := theClient.ResourceV1().ResourceClaims(s.Namespace).List(s.Ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range claims.Items {
		if claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "" {
			err = errors.Join(err, fmt.Errorf("the scheduler made claim %s for limits", claim.Name))
		}
	}
	if err != nil {
		t.Error(err)
	}
	s.NoDoubleOwners()
}
