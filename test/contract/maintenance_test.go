// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// TestMaintenanceOutlivesItsNode: what an administrator took out of service stays so while the Node is deleted and registered again, and in a
// GPUNode whose owner is gone, such as that of a backup. It ends when the administrator says so, and then a GPUNode ends after its Node.
func TestMaintenanceOutlivesItsNode(t *testing.T) {
	s := begin(t)
	before := s.gpuNode(numaNode, "with GPUs", func(n gpunode.GPUNode) bool { return len(n.Status.Devices) > 0 })
	uuid := before.Status.Devices[0].UUID
	s.maintain(numaNode, uuid)
	undrain := s.Undo(func() error { s.maintain(numaNode, ""); return nil })
	maintained := func(n gpunode.GPUNode) bool {
		_, found := n.Spec.MaintenanceOf(uuid)
		return found && n.UID == before.UID && n.Status.Counts.Maintenance == 1
	}
	s.gpuNode(numaNode, "with a GPU under maintenance", maintained)
	leader := s.controllerPod()
	for name, err := range map[string]error{
		"by an administrator": s.deleteGPUNode(theClient, numaNode),
		"by the controller":   s.deleteGPUNode(s.As(leader.Spec.ServiceAccountName, &leader), numaNode),
		"of all":              s.deleteGPUNode(theClient, ""),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("deletion %s: %v", name, err)
		}
	}

	// As a cloud controller deletes the Node of a machine that is repaired, and its kubelet registers it again.
	registered := s.registerAgain(numaNode)
	s.Await(patient, "the slices to belong to the new Node", func() error {
		all, err := s.Slices(numaNode)
		if err == nil && len(all) == 0 {
			err = errors.New("there are none")
		}
		for _, slice := range all {
			if of := metav1.GetControllerOf(&slice); of == nil || of.UID != registered {
				err = fmt.Errorf("owned by %v", of)
			}
		}
		return err
	})
	s.gpuNode(numaNode, "that was kept", maintained)

	// A backup of a GPUNode that an agent of an earlier version has written. Its agent has been silent for long.
	const gone = "node-of-a-backup"
	owner := fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","name":%q,"uid":"gone"}`, gone)
	if err := s.createGPUNode(theClient, gone, owner, `{"maintenance":[{"uuid":"GPU-0"}]}`); err != nil {
		t.Fatal(err)
	}
	ended := s.Undo(func() error { s.maintain(gone, ""); return nil })
	restored := s.gpuNode(gone, "without an owner", func(n gpunode.GPUNode) bool { return len(n.OwnerReferences) == 0 })
	if _, found := restored.Spec.MaintenanceOf("GPU-0"); !found {
		t.Errorf("it has %+v", restored.Spec)
	}
	s.Kubectl("patch", "gpunode", gone, "--subresource", "status", "--type", "merge", "-p",
		fmt.Sprintf(`{"status":{"seen":%q}}`, time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)))
	ended()
	s.Await(soon, "a GPUNode without Node, agent and maintenance to be deleted", func() error {
		if n, err := s.GPUNodeOf(gone); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it has UID %s, %v", n.UID, err)
		}
		return nil
	})
	undrain()
	s.gpuNode(numaNode, "with all GPUs in service", func(n gpunode.GPUNode) bool { return n.UID == before.UID && n.Status.Counts.Maintenance == 0 })
}

// gpuNode awaits a GPUNode that satisfies the condition.
func (s *story) gpuNode(name, what string, condition func(gpunode.GPUNode) bool) (found gpunode.GPUNode) {
	s.Helper()
	s.Await(soon, "GPUNode "+name+" "+what, func() (err error) {
		if found, err = s.GPUNodeOf(name); err == nil && !condition(found) {
			err = fmt.Errorf("it is %+v", found)
		}
		return err
	})
	return found
}

// maintain takes one GPU of a node out of service, or none.
func (s *story) maintain(name, uuid string) {
	s.Helper()
	entries := ""
	if uuid != "" {
		entries = fmt.Sprintf(`{"uuid":%q}`, uuid)
	}
	s.Kubectl("patch", "gpunode", name, "--type", "merge", "-p", `{"spec":{"maintenance":[`+entries+`]}}`)
}

// registerAgain deletes a Node and creates one like it. Its kubelet reports the status of whatever Node has the name.
func (s *story) registerAgain(name string) types.UID {
	s.Helper()
	nodes := theClient.CoreV1().Nodes()
	was, err := nodes.Get(s.Ctx, name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	if err := nodes.Delete(s.Ctx, name, metav1.DeleteOptions{}); err != nil {
		s.Fatal(err)
	}
	again := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: was.Labels}, Spec: was.Spec, Status: was.Status}
	now, err := nodes.Create(s.Ctx, again, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return now.UID
}
