// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/faults"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// event waits for an event of the story's namespace, of the node where the kind is Node, or of our Secret, whose message has all the
// words.
func (s *story) event(kind, name, reason string, words ...string) {
	s.Helper()
	namespace := s.namespace
	switch kind {
	case "Node":
		namespace = metav1.NamespaceDefault
	case "Secret":
		namespace = install.Namespace
	}
	s.await(soon, fmt.Sprintf("event %s on %s %s", reason, kind, name), func() error {
		list, err := theClient.CoreV1().Events(namespace).List(s.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen := errors.New("there is none")
		for _, event := range list.Items {
			if event.InvolvedObject.Kind != kind || event.InvolvedObject.Name != name || event.Reason != reason {
				continue
			}
			if hasAll(event.Message, words) {
				return nil
			}
			seen = fmt.Errorf("it says %q, which lacks some of %q", event.Message, words)
		}
		return seen
	})
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

// TestRunDirectoryFull: a full run directory refuses no pod, and the ledger holds the GPUs of new pods and claims. They start when there
// is space. Running pods keep running.
func TestRunDirectoryFull(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	_, stop := s.fill()
	s.manifest(manifests.Pod("limit", "limit-full") + manifests.Pod("claim", "claim-full"))
	// Their containers do not start, because the runtime needs space as well.
	s.wantHolds(3, 3)
	if pod := s.pod("limit-full"); pod.Status.Phase == corev1.PodFailed {
		t.Errorf("the limits pod was refused: %s %s", pod.Status.Reason, pod.Status.Message)
	}
	stop()
	s.retry("claim-full")
	s.running(patient, 6, 0)
	s.same(before)
	s.wantHolds(3, 3)
	s.noDoubleOwners()
}

// fill fills the node's /run, and what becomes free in it, until the returned function is called or the story ends.
func (s *story) fill() (filler *faults.Filler, stop func()) {
	s.Helper()
	filler, err := faults.Fill(s.ctx, node(), "/run")
	if err != nil {
		s.Fatal(err)
	}
	stop = s.undo(func() error { return filler.Stop(s.ctx) })
	s.await(soon, "the disk to be full", func() error {
		if full, err := filler.Full(s.ctx); err != nil || !full {
			return fmt.Errorf("full: %t, %w", full, err)
		}
		return nil
	})
	return filler, stop
}

// retry makes kubelet look at a pod, or "--all", now; left alone it tries a claim again after 60 to 90 seconds.
func (s *story) retry(pod string) {
	s.Helper()
	_, err := theCluster.Kubectl(s.ctx, "annotate", "pod", "-n", s.namespace, pod, "--overwrite", "retried="+strconv.FormatInt(time.Now().UnixNano(), 10))
	// One that has gone meanwhile waits for nothing.
	if err != nil && !strings.Contains(err.Error(), "not found") {
		s.Fatal(err)
	}
}

// same checks that these pods see the GPUs they saw.
func (s *story) same(before map[string][]int) {
	s.Helper()
	containers := map[string]string{}
	for pod := range before {
		containers[pod] = s.pod(pod).Spec.Containers[0].Name
	}
	for pod, now := range s.sees(containers) {
		if !slices.Equal(now, before[pod]) {
			s.Errorf("%s saw GPUs %v, now %v", pod, before[pod], now)
		}
	}
}

// TestRunDirectoryWiped while pods run: the agent goes on, and at its next start kubelet knows who has what.
func TestRunDirectoryWiped(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	s.on(node(), "sh", "-c", "rm -rf /run/tandem/*")
	s.manifest(manifests.Pod("limit", "limit-wiped"))
	s.running(soon, 5, 0)
	s.manifest(manifests.Pod("claim", "claim-wiped"))
	s.running(patient, 6, 0)
	s.noDoubleOwners()
	s.remove("limit-wiped", "claim-wiped")
	s.on(node(), "sh", "-c", "rm -rf /run/tandem/*")
	s.killAgent()
	s.ready()
	s.wantHolds(2, 2)
	s.undisturbed(before)
}

// TestCDIDirectoryWiped: the next pod of each kind starts all the same.
func TestCDIDirectoryWiped(t *testing.T) {
	s := begin(t)
	s.manifest(manifests.SingleTemplate)
	s.on(node(), "sh", "-c", "rm -rf /var/run/cdi/*")
	s.manifest(manifests.Pod("claim", "claim"))
	s.running(soon, 1, 0)
	s.on(node(), "sh", "-c", "rm -rf /var/run/cdi/*")
	s.manifest(manifests.Pod("limit", "limit"))
	s.running(soon, 2, 0)
	for _, pod := range []string{"claim", "limit"} {
		if gpus := s.gpus(pod, ""); len(gpus) != 1 {
			t.Errorf("%s sees GPUs %v", pod, gpus)
		}
	}
	s.noDoubleOwners()
}
