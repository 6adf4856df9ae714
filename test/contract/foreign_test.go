// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestDriverOfAnotherName: a second DRA driver publishes the same GPUs under a name of its own. Neither API gives a GPU away meanwhile.
func TestDriverOfAnotherName(t *testing.T) {
	s := begin(t)
	const name = "nvidia-dra.example.com"
	other := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{GenerateName: "other-"}, Spec: s.SliceOf(gpuNode).Spec}
	other.Spec.Driver = name
	other, err := s.Client.ResourceV1().ResourceSlices().Create(s.Ctx, other, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
	s.Event("Node", gpuNode, "ConflictingDriver", name, other.Name)
	s.Await(soon, "no GPU to be offered to pods", func() error { return s.OfferedToPods(0) })
	// It waits in the scheduler's queue.
	s.Manifest(manifests.Pod("limit", "limit"))
	if err := s.Client.ResourceV1().ResourceSlices().Delete(s.Ctx, other.Name, metav1.DeleteOptions{}); err != nil {
		s.Fatal(err)
	}
	s.Running(soon, 1, 0)
	s.Ready()
	s.NoDoubleOwners()
}
