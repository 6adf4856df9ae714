// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/test/manifests"
)

// repetitionsVariable says how often the stories that measure something play.
const repetitionsVariable = "E2E_REPETITIONS"

// freedWithin is how soon a released GPU is in use by a waiting pod: 1 s on a quiet machine, 3 s while other clusters run beside
// this one. Slower ones need more.
const freedWithin = time.Minute

// TestEightAndEight: eight pods by claims and eight by limits at once, on eight GPUs, as Deployments. Eight run, eight wait, none
// fails, and whatever one gives up goes to one that waits.
func TestEightAndEight(t *testing.T) {
	repetitions := repetitions(t, 1)
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	var sum outcome
	for i := range repetitions {
		s.Manifest(manifests.Deployment("limits", gpusANode) + manifests.ClaimDeployment("claims", "single", gpusANode))
		r := s.burst()
		t.Logf("%d of %d: %s", i+1, repetitions, r)
		sum.add(r)
		s.Kubectl("delete", "deployment", "-n", s.Namespace, "claims", "limits")
		s.NoPods()
		s.AllFree()
	}
	t.Logf("eight and eight: repetitions=%d %s", repetitions, sum)
	if len(sum.failed) > 0 {
		t.Errorf("%d pods failed in %d repetitions: %v", len(sum.failed), repetitions, sum.failed)
	}
}

// outcome of one repetition, or of all.
type outcome struct {
	running, pending int
	failed           []string
	// settled is how long it took until eight ran; freed, how long until a GPU that was given up was in use again.
	settled, freed []time.Duration
}

func (a *outcome) add(b outcome) {
	a.running += b.running
	a.pending += b.pending
	a.failed = append(a.failed, b.failed...)
	a.settled = append(a.settled, b.settled...)
	a.freed = append(a.freed, b.freed...)
}

func (a outcome) String() string {
	return fmt.Sprintf("running=%d pending=%d failed=%d settled_p50=%s settled_p99=%s freed_p50=%s freed_p99=%s",
		a.running, a.pending, len(a.failed), quantile(a.settled, 50), quantile(a.settled, 99),
		quantile(a.freed, 50), quantile(a.freed, 99))
}

// quantile of a few durations: the smallest that so many of a hundred do not exceed.
func quantile(durations []time.Duration, percent int) time.Duration {
	if len(durations) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(durations))
	return sorted[(len(sorted)*percent+99)/100-1].Round(10 * time.Millisecond)
}

// burst waits for the pods of both Deployments to settle, and then lets one of each kind go.
func (s *story) burst() (r outcome) {
	s.Helper()
	began := time.Now()
	s.Running(patient, gpusANode, -1)
	r.settled = append(r.settled, time.Since(began))
	s.NoDoubleOwners()
	for _, kind := range []string{"claims", "limits"} {
		took, ok := s.giveUp(kind)
		if !ok {
			continue
		}
		r.freed = append(r.freed, took)
		if took > freedWithin {
			s.Errorf("a GPU given up by %s was in use again after %s", kind, took)
		}
		s.NoDoubleOwners()
	}
	s.Running(soon, gpusANode, gpusANode)
	r.running, r.pending, r.failed = gpusANode, gpusANode, s.failed()
	return r
}

// giveUp deletes a running pod of a Deployment and answers how soon its GPU is in use again, the second that its container takes
// to end included. It is false where none runs.
func (s *story) giveUp(kind string) (time.Duration, bool) {
	s.Helper()
	for _, pod := range s.Pods() {
		if !strings.HasPrefix(pod.Name, kind) || pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil {
			continue
		}
		if err := theClient.CoreV1().Pods(s.Namespace).Delete(s.Ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
			s.Fatal(err)
		}
		began := time.Now()
		s.Running(soon, gpusANode, -1)
		return time.Since(began), true
	}
	return 0, false
}
