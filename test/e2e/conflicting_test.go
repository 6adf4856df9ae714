// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/grpc"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// uuids of the node's GPUs with their minors, as published.
func (s *story) uuids() map[string]int {
	s.Helper()
	minors := map[string]int{}
	for uuid, minor := range s.attribute("gpu.nvidia.com/minor") {
		number, err := strconv.Atoi(minor)
		if err != nil {
			s.Fatal(err)
		}
		minors[uuid] = number
	}
	if len(minors) != gpusANode {
		s.Fatalf("the node's slices name %v", minors)
	}
	return minors
}

// TestConflictingDevicePlugin: an administrator installs another device plugin beside Tandem, GKE's, which calls GPUs nvidia0 to nvidia7. It
// serves a pod. Tandem gives away no GPU by either API, because the other plugin could give away the same one. The node reports why, running
// pods are not affected, and Tandem serves again when the other plugin is gone, also after a restart. The pod keeps its GPU.
func TestConflictingDevicePlugin(t *testing.T) {
	const socket = devicePluginDir + "/nvidiaGPU-1.sock"
	s := begin(t)
	uuids := s.uuids()
	before := s.Occupy()
	// It gives away those that are free: nothing keeps it from the others.
	minors := map[string]int{}
	for _, minor := range uuids {
		if !slices.Contains(slices.Concat(slices.Collect(maps.Values(before))...), minor) {
			minors[fmt.Sprintf("nvidia%d", minor)] = minor
		}
	}
	other, plugin := s.devicePlugin(filepath.Base(socket), minors)
	s.Event("Node", gpuNode, "OtherDevicePlugin", socket, install.ResourceName)
	s.Readyz(http.StatusServiceUnavailable, "limits", "claims", socket)
	s.Await(soon, "Tandem to serve no limits", func() error {
		if ours := s.On(node(), "sh", "-c", "ls "+devicePluginDir+" | grep tandem || true"); ours != "" {
			return fmt.Errorf("sockets: %s", ours)
		}
		return nil
	})
	s.Await(soon, "claims to be offered nothing", func() error { return s.OfferedToClaims(0) })
	s.Await(soon, "kubelet to offer the other plugin's GPUs", func() error { return s.OfferedToPods(int64(len(minors))) })
	s.Manifest(manifests.Pod("limit", "foreign"))
	s.Running(patient, 5, 0)
	before["foreign"] = s.GPUs("foreign", "")
	if given := plugin.Allocated(); len(before["foreign"]) != 1 || len(given) != 1 || plugin.Minor(given[0]) != before["foreign"][0] {
		t.Fatalf("the pod sees %v, the other plugin gave away %v", before["foreign"], given)
	}
	s.Manifest(manifests.Pod("claim", "claim-beside"))
	s.Unschedulable(1)
	s.Running(soon, 5, 1)
	s.Same(before)
	if err := other.Stop(); err != nil {
		t.Fatal(err)
	}

	s.Running(patient, 6, 0)
	s.Readyz(http.StatusOK)
	s.Ready()
	s.WantHolds(3, 3)
	s.KillAgent()
	s.Ready()
	s.Manifest(manifests.Pod("limit", "limit-after"))
	s.Running(patient, 7, 0)
	s.Manifest(manifests.Pod("claim", "claim-after"))
	s.Running(patient, gpusANode, 0)
	s.NoDoubleOwners()
	s.Same(before)
	for name := range before {
		if restarts := s.Pod(name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			t.Errorf("%s restarted %d times", name, restarts)
		}
	}
	s.Manifest(manifests.Pod("claim", "late"))
	s.Running(soon, gpusANode, 1)
	s.remove("foreign")
	s.Running(patient, gpusANode, 0)
	s.NoDoubleOwners()
}

// TestConflictingDriver: the same as TestConflictingDevicePlugin for another DRA driver of our name, which serves no claim.
func TestConflictingDriver(t *testing.T) {
	s := begin(t)
	before := s.Occupy()
	endpoint := filepath.Join(pluginsDir, "toy", "dra.sock")
	service := s.serve(endpoint, func(server *grpc.Server) { drapb.RegisterDRAPluginServer(server, drapb.UnimplementedDRAPluginServer{}) })
	registration := s.serve(filepath.Join(registryDir, "toy-reg.sock"), func(server *grpc.Server) {
		registerapi.RegisterRegistrationServer(server, draRegistration{endpoint: endpoint})
	})
	s.Event("Node", gpuNode, "ConflictingDriver", registryDir+"/toy-reg.sock", install.DriverName)
	s.Readyz(http.StatusServiceUnavailable, "claims", registryDir+"/toy-reg.sock")
	// kubelet has the withdrawn devices once it reports so.
	s.Await(soon, "pods to be offered only what they hold", func() error { return s.OfferedToPods(2) })
	s.Manifest(manifests.Pod("limit", "limit-beside"))
	s.Running(soon, 4, 1)
	s.Same(before)
	if err := errors.Join(registration.Stop(), service.Stop()); err != nil {
		t.Fatal(err)
	}
	s.On(node(), "rmdir", filepath.Join(pluginsDir, "toy"))
	s.Running(patient, 5, 0)
	s.remove("limit-beside")
	s.Readyz(http.StatusOK)
	s.Ready()
	s.Undisturbed(before)
}
