// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/faults"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// hang keeps a pod's processes from ending (faults.Hang), until the returned function is called or the story ends.
func (s *story) hang(n *cluster.Node, uid types.UID) (end func(), state string) {
	s.Helper()
	hung, err := faults.Hang(s.Ctx, n, string(uid))
	if err != nil {
		s.Fatal(err)
	}
	return s.Undo(func() error { return hung.End(s.Ctx) }), hung.State
}

// TestHungGPU: a process cannot be killed, and its pod is force-deleted. New claims and limits get the other seven GPUs at once, none
// gets the hung one, GPUNode and an event name the process, and the GPU is back as soon as the process ends.
func TestHungGPU(t *testing.T) {
	for _, api := range []string{"claim", "limit"} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			var taken, returned []time.Duration
			failed := 0
			for range repetitions(t, 1) {
				others, back := s.hungGPU(api)
				taken, returned = append(taken, others), append(returned, back)
				failed += len(s.failed())
				s.Kubectl("delete", "deployments,pods", "-n", s.Namespace, "--all")
				s.NoPods()
				s.AllFree()
			}
			t.Logf("hung %s: rounds=%d others_p50=%s others_max=%s returned_p50=%s returned_max=%s failed=%d", api, len(taken),
				quantile(taken, 50), quantile(taken, 100), quantile(returned, 50), quantile(returned, 100), failed)
		})
	}
}

// hungGPU plays one round. It returns how long the pods on the other GPUs took to run, and how long the GPU was not free after the end
// of its process.
func (s *story) hungGPU(api string) (others, returned time.Duration) {
	s.Helper()
	s.Manifest(manifests.SingleTemplate + manifests.Pod(api, "hung"))
	s.Running(soon, 1, 0)
	before := s.Seen()["hung"]
	end, state := s.hang(node(), s.Pod("hung").UID)
	s.Kubectl("delete", "pod", "-n", s.Namespace, "hung", "--force", "--grace-period=0")
	s.Manifest(manifests.Deployment("limits", 3) + manifests.ClaimDeployment("claims", "single", 4))
	others = s.Took("seven pods to run beside the hung GPU", func() { s.Running(soon, gpusANode-1, 0) })
	s.NoDoubleOwners()
	for name, has := range s.Seen() {
		if slices.Equal(has, before) {
			s.Errorf("%s sees the GPU %v of the hung pod", name, before)
		}
	}
	name := s.Namespace + "/hung"
	s.Await(soon, "GPUNode to say what the GPU waits for", func() error {
		return s.waitsFor(name, "process ", "state "+state)
	})
	s.Event("Node", gpuNode, "DeviceNotFreed", name, "process ")
	end()
	returned = s.Took("the GPU to be free", func() {
		s.Await(soon, "a free GPU", func() error {
			object, err := s.GPUNodeObject()
			if err == nil && object.Status.Counts.Free != 1 {
				err = fmt.Errorf("holders: %s", object.Status.Holders)
			}
			return err
		})
	})
	s.Manifest(manifests.Pod("claim", "next"))
	s.Running(soon, gpusANode, 0)
	s.NoDoubleOwners()
	return others, returned
}

// waitsFor reports whether the only device that waits does so for these words.
func (s *story) waitsFor(words ...string) error {
	object, err := s.GPUNodeObject()
	if err != nil {
		return err
	}
	for _, d := range object.Status.Devices {
		for _, h := range d.Holders {
			if h.WaitsFor == "" {
				continue
			}
			for _, word := range words {
				if !strings.Contains(h.WaitsFor, word) {
					return fmt.Errorf("%s waits for %q, without %q", d.Name, h.WaitsFor, word)
				}
			}
			return nil
		}
	}
	return errors.New("no device waits")
}
