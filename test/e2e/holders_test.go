// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// shows waits until the node's GPUNode satisfies the condition, and returns it.
func (s *story) shows(what string, condition func(gpunode.GPUNode) bool) (shown gpunode.GPUNode) {
	s.Helper()
	s.await(soon, "GPUNode to show "+what, func() (err error) {
		if shown, err = s.gpuNodeObject(); err == nil && !condition(shown) {
			err = fmt.Errorf("it has %+v", shown.Status)
		}
		return err
	})
	return shown
}

// TestWhoHasWhichGPU: kubectl answers it, for both APIs, and GPUNode outlives what people do to it.
func TestWhoHasWhichGPU(t *testing.T) {
	s := begin(t)
	s.manifest(singleTemplate + one("claim", "train") + one("limit", "infer"))
	s.running(soon, 2, 0)
	claim := *s.pod("train").Status.ResourceClaimStatuses[0].ResourceClaimName
	holders := fmt.Sprintf("%s=%s/%s(claim) %s=%s/infer(pod)",
		gpuName(s.gpus("train", "")[0]), s.namespace, claim, gpuName(s.gpus("infer", "")[0]), s.namespace)
	told := func(n gpunode.GPUNode) bool {
		withdrawn := 0
		for _, d := range n.Status.Devices {
			if d.ExtendedResourceState == gpunode.ExtendedResourceWithdrawn {
				withdrawn++
			}
		}
		return n.Status.Holders == holders && withdrawn == 1 && n.Status.Counts.Free == gpusANode-2 &&
			len(n.Spec.Claims) == 1 && n.Status.ObservedGeneration == n.Generation
	}
	before := s.shows("both holders", told)
	table := s.kubectl("get", "gpunodes", "-o", "wide")
	for _, words := range []string{"MODE", "HOLDERS", "Dual", holders} {
		if !strings.Contains(table, words) {
			t.Errorf("kubectl get gpunodes -o wide has no %q:\n%s", words, table)
		}
	}
	t.Log("\n" + table)

	// Nothing changes, so nothing is written.
	const idle = 15 * time.Second
	time.Sleep(idle)
	if now := s.shows("both holders", told); now.ResourceVersion != before.ResourceVersion {
		t.Errorf("GPUNode was written within %s in which nothing happened:\n%+v\n%+v", idle, before, now)
	}

	s.kubectl("delete", "gpunode", before.Name)
	after := s.shows("both holders again", told)
	if after.UID == before.UID {
		t.Error("kubectl did not delete it")
	}

	s.kubectl("delete", "pods", "-n", s.namespace, "train", "infer")
	s.await(soon, "GPUNode to show no holder", func() error {
		n, err := s.gpuNodeObject()
		if err == nil && (n.Status.Holders != "" || n.Status.Counts.Free != gpusANode || len(n.Spec.Claims) > 0) {
			err = errors.New(n.Status.Holders)
		}
		return err
	})
}
