// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

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

// readyz waits for an answer of the agent on the node that has all these words. Kubelet believes a failing probe only after
// several seconds, so the pod's condition does not tell.
func (s *story) readyz(status int, words ...string) {
	s.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: node().DialContext, DisableKeepAlives: true}, Timeout: 5 * time.Second}
	address := "http://" + s.agentPod(gpuNode).Status.PodIP + ":8080/readyz"
	s.await(soon, fmt.Sprintf("%s to answer %d", address, status), func() error {
		response, err := client.Get(address)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		said, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		if response.StatusCode != status || !hasAll(string(said), words) {
			return fmt.Errorf("it answers %d %q; wanted are %d and %q", response.StatusCode, said, status, words)
		}
		return nil
	})
}

// TestConflictingDevicePlugin: an administrator installs another device plugin beside Tandem, GKE's, which calls GPUs nvidia0 to nvidia7. It
// serves a pod. Tandem gives away no GPU by either API, because the other plugin could give away the same one. The node reports why, running
// pods are not affected, and Tandem serves again when the other plugin is gone, also after a restart. The pod keeps its GPU.
func TestConflictingDevicePlugin(t *testing.T) {
	const socket = devicePluginDir + "/nvidiaGPU-1.sock"
	s := begin(t)
	uuids := s.uuids()
	before := s.occupy()
	// It gives away those that are free: nothing keeps it from the others.
	minors := map[string]int{}
	for _, minor := range uuids {
		if !slices.Contains(slices.Concat(slices.Collect(maps.Values(before))...), minor) {
			minors[fmt.Sprintf("nvidia%d", minor)] = minor
		}
	}
	other, plugin := s.devicePlugin(filepath.Base(socket), minors)
	s.event("Node", gpuNode, "OtherDevicePlugin", socket, install.ResourceName)
	s.readyz(http.StatusServiceUnavailable, "limits", "claims", socket)
	s.await(soon, "Tandem to serve no limits", func() error {
		if ours := s.on(node(), "sh", "-c", "ls "+devicePluginDir+" | grep tandem || true"); ours != "" {
			return fmt.Errorf("sockets: %s", ours)
		}
		return nil
	})
	s.await(soon, "claims to be offered nothing", func() error { return s.offeredToClaims(0) })
	s.await(soon, "kubelet to offer the other plugin's GPUs", func() error { return s.offeredToPods(int64(len(minors))) })
	s.manifest(manifests.Pod("limit", "foreign"))
	s.running(patient, 5, 0)
	before["foreign"] = s.gpus("foreign", "")
	if given := plugin.Allocated(); len(before["foreign"]) != 1 || len(given) != 1 || plugin.Minor(given[0]) != before["foreign"][0] {
		t.Fatalf("the pod sees %v, the other plugin gave away %v", before["foreign"], given)
	}
	s.manifest(manifests.Pod("claim", "claim-beside"))
	s.unschedulable(1)
	s.running(soon, 5, 1)
	s.same(before)
	if err := other.Stop(); err != nil {
		t.Fatal(err)
	}

	s.running(patient, 6, 0)
	s.readyz(http.StatusOK)
	s.ready()
	s.wantHolds(3, 3)
	s.killAgent()
	s.ready()
	s.manifest(manifests.Pod("limit", "limit-after"))
	s.running(patient, 7, 0)
	s.manifest(manifests.Pod("claim", "claim-after"))
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
	s.same(before)
	for name := range before {
		if restarts := s.pod(name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			t.Errorf("%s restarted %d times", name, restarts)
		}
	}
	s.manifest(manifests.Pod("claim", "late"))
	s.running(soon, gpusANode, 1)
	s.remove("foreign")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
}

// TestConflictingDriver: the same as TestConflictingDevicePlugin for another DRA driver of our name, which serves no claim.
func TestConflictingDriver(t *testing.T) {
	s := begin(t)
	before := s.occupy()
	endpoint := filepath.Join(pluginsDir, "toy", "dra.sock")
	service := s.serve(endpoint, func(server *grpc.Server) { drapb.RegisterDRAPluginServer(server, drapb.UnimplementedDRAPluginServer{}) })
	registration := s.serve(filepath.Join(registryDir, "toy-reg.sock"), func(server *grpc.Server) {
		registerapi.RegisterRegistrationServer(server, draRegistration{endpoint: endpoint})
	})
	s.event("Node", gpuNode, "ConflictingDriver", registryDir+"/toy-reg.sock", install.DriverName)
	s.readyz(http.StatusServiceUnavailable, "claims", registryDir+"/toy-reg.sock")
	// kubelet has the withdrawn devices once it reports so.
	s.await(soon, "pods to be offered only what they hold", func() error { return s.offeredToPods(2) })
	s.manifest(manifests.Pod("limit", "limit-beside"))
	s.running(soon, 4, 1)
	s.same(before)
	if err := errors.Join(registration.Stop(), service.Stop()); err != nil {
		t.Fatal(err)
	}
	s.on(node(), "rmdir", filepath.Join(pluginsDir, "toy"))
	s.running(patient, 5, 0)
	s.remove("limit-beside")
	s.readyz(http.StatusOK)
	s.ready()
	s.undisturbed(before)
}
