// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/test/faults"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestRunDirectoryFull: a full run directory refuses no pod, and the ledger holds the GPUs of new pods and claims. They start when there
// is space. Running pods keep running.
func TestRunDirectoryFull(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	_, stop := s.fill()
	s.Manifest(manifests.Pod("limit", "limit-full") + manifests.Pod("claim", "claim-full"))
	// Their containers do not start, because the runtime needs space as well.
	s.WantHolds(3, 3)
	if pod := s.Pod("limit-full"); pod.Status.Phase == corev1.PodFailed {
		t.Errorf("the limits pod was refused: %s %s", pod.Status.Reason, pod.Status.Message)
	}
	stop()
	s.retry("claim-full")
	s.Running(patient, 6, 0)
	s.Same(before)
	s.WantHolds(3, 3)
	s.NoDoubleOwners()
}

// fill fills the node's /run, and what becomes free in it, until the returned function is called or the story ends.
func (s *story) fill() (filler *faults.Filler, stop func()) {
	s.Helper()
	filler, err := faults.Fill(s.Ctx, node(), "/run")
	if err != nil {
		s.Fatal(err)
	}
	stop = s.Undo(func() error { return filler.Stop(s.Ctx) })
	s.Await(soon, "the disk to be full", func() error {
		if full, err := filler.Full(s.Ctx); err != nil || !full {
			return fmt.Errorf("full: %t, %w", full, err)
		}
		return nil
	})
	return filler, stop
}

// retry makes kubelet look at a pod, or "--all", now; left alone it tries a claim again after 60 to 90 seconds.
func (s *story) retry(pod string) {
	s.Helper()
	_, err := theCluster.Kubectl(s.Ctx, "annotate", "pod", "-n", s.Namespace, pod, "--overwrite", "retried="+strconv.FormatInt(time.Now().UnixNano(), 10))
	// One that has gone meanwhile waits for nothing.
	if err != nil && !strings.Contains(err.Error(), "not found") {
		s.Fatal(err)
	}
}

// TestRunDirectoryWiped while pods run: the agent goes on, and at its next start kubelet knows who has what.
func TestRunDirectoryWiped(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	s.On(node(), "sh", "-c", "rm -rf /run/tandem/*")
	s.Manifest(manifests.Pod("limit", "limit-wiped"))
	s.Running(soon, 5, 0)
	s.Manifest(manifests.Pod("claim", "claim-wiped"))
	s.Running(patient, 6, 0)
	s.NoDoubleOwners()
	s.remove("limit-wiped", "claim-wiped")
	s.On(node(), "sh", "-c", "rm -rf /run/tandem/*")
	s.KillAgent()
	s.Ready()
	s.WantHolds(2, 2)
	s.Undisturbed(before)
}

// TestCDIDirectoryWiped: the next pod of each kind starts all the same.
func TestCDIDirectoryWiped(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	s.On(node(), "sh", "-c", "rm -rf /var/run/cdi/*")
	s.Manifest(manifests.Pod("claim", "claim"))
	s.Running(soon, 1, 0)
	s.On(node(), "sh", "-c", "rm -rf /var/run/cdi/*")
	s.Manifest(manifests.Pod("limit", "limit"))
	s.Running(soon, 2, 0)
	for _, pod := range []string{"claim", "limit"} {
		if gpus := s.GPUs(pod, ""); len(gpus) != 1 {
			t.Errorf("%s sees GPUs %v", pod, gpus)
		}
	}
	s.NoDoubleOwners()
}
