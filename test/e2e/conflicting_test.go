// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"

	"net/http"
	"path/filepath"

	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"

	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/hack/install"
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

// TestConflictingDevicePlugin: an administrator installs NVIDIA's device plugin beside Tandem. Tandem gives away no GPU by either API,
// because the other plugin could give away the same one. The node reports why, running pods are not affected, and Tandem serves again
// when the other plugin is gone.
func TestConflictingDevicePlugin(t *testing.T) {
	s := begin(t)
	minors := s.uuids()
	before := s.occupy()
	other, plugin := s.devicePlugin("nvidia-gpu.sock", minors)
	s.event("Node", gpuNode, "OtherDevicePlugin", devicePluginDir+"/nvidia-gpu.sock", install.ResourceName)
	s.readyz(http.StatusServiceUnavailable, "limits", devicePluginDir+"/nvidia-gpu.sock")
	s.await(soon, "Tandem to serve no limits", func() error {
		if ours := s.on(node(), "sh", "-c", "ls "+devicePluginDir+" | grep tandem || true"); ours != "" {
			return fmt.Errorf("sockets: %s", ours)
		}
		return nil
	})
	s.await(soon, "claims to be offered nothing", func() error { return s.offeredToClaims(0) })
	s.manifest(one("claim", "claim-beside"))
	s.running(soon, 4, 1)
	s.same(before)
	if err := other.Stop(); err != nil {
		t.Fatal(err)
	}
	s.running(patient, 5, 0)
	s.kubectl("delete", "pod", "-n", s.namespace, "claim-beside")
	if len(plugin.Allocated()) > 0 {
		t.Errorf("the other plugin was asked for %v", plugin.Allocated())
	}
	s.readyz(http.StatusOK)
	s.ready()
	s.await(soon, "the node to offer what is free", func() error { return s.offeredToPods(gpusANode - 2) })
	s.undisturbed(before)
}

// TestGKEsDevicePlugin: GKE's plugin, which calls GPUs nvidia0 to nvidia7, comes and serves a pod. Tandem gives nothing away beside it.
// When the plugin is gone, the pod keeps its GPU, and Tandem serves the others, also after a restart.
func TestGKEsDevicePlugin(t *testing.T) {
	s := begin(t)
	minors := map[string]int{}
	for _, minor := range s.uuids() {
		minors[fmt.Sprintf("nvidia%d", minor)] = minor
	}
	other, plugin := s.devicePlugin("nvidiaGPU-1.sock", minors)
	s.event("Node", gpuNode, "OtherDevicePlugin", devicePluginDir+"/nvidiaGPU-1.sock", install.ResourceName)
	s.readyz(http.StatusServiceUnavailable, "limits", "claims", devicePluginDir+"/nvidiaGPU-1.sock")
	s.await(soon, "kubelet to offer the other plugin's GPUs", func() error { return s.offeredToPods(gpusANode) })
	s.manifest(one("limit", "old"))
	s.running(patient, 1, 0)
	before := s.seen()
	if given := plugin.Allocated(); len(before["old"]) != 1 || len(given) != 1 || plugin.Minor(given[0]) != before["old"][0] {
		t.Fatalf("the pod sees %v, the other plugin gave away %v", before, given)
	}
	s.await(soon, "claims to be offered nothing", func() error { return s.offeredToClaims(0) })
	s.manifest(singleTemplate)
	s.manifest(one("claim", "new-0"))
	s.running(soon, 1, 1)
	if err := other.Stop(); err != nil {
		t.Fatal(err)
	}
	s.readyz(http.StatusOK)
	s.ready()
	s.wantHolds(1, 1)
	s.killAgent()
	s.ready()
	for i := range 6 {
		s.manifest(one("claim", fmt.Sprintf("new-%d", i+1)))
	}
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
	s.same(before)
	s.manifest(one("claim", "late"))
	s.running(soon, gpusANode, 1)
	s.kubectl("delete", "pod", "-n", s.namespace, "old")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
}

// TestConflictingDriver: the same as TestConflictingDevicePlugin for another DRA driver of our name.
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
	s.manifest(one("limit", "limit-beside"))
	s.running(soon, 4, 1)
	s.same(before)
	if err := errors.Join(registration.Stop(), service.Stop()); err != nil {
		t.Fatal(err)
	}
	s.on(node(), "rmdir", filepath.Join(pluginsDir, "toy"))
	s.running(patient, 5, 0)
	s.kubectl("delete", "pod", "-n", s.namespace, "limit-beside")
	s.readyz(http.StatusOK)
	s.ready()
	s.undisturbed(before)
}

// TestFromNVIDIAsDevicePlugin: a node moves to Tandem while pods run. They keep their GPUs, no other pod gets these, and both
// APIs offer the other six.
func TestFromNVIDIAsDevicePlugin(t *testing.T) {
	s := begin(t)
	minors := s.uuids()
	if err := install.Uninstall(s.ctx, theCluster, install.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A story that failed in between has no Tandem.
		if err := install.Tandem(context.WithoutCancel(s.ctx), theCluster, install.Options{Values: installValues}); err != nil {
			t.Error(err)
		}
	})
	nvidia, _ := s.devicePlugin("nvidia-gpu.sock", minors)
	s.await(soon, "kubelet to offer the other plugin's GPUs", func() error { return s.offeredToPods(gpusANode) })
	for i := range 2 {
		s.manifest(one("limit", fmt.Sprintf("old-%d", i)))
	}
	s.running(soon, 2, 0)
	before := s.seen()
	if text := s.inside("old-0", "env"); !strings.Contains(text, "FOREIGN=true") {
		t.Fatalf("the pod was not served by the other plugin: %s", text)
	}
	if err := nvidia.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := install.Tandem(s.ctx, theCluster, install.Options{Values: installValues}); err != nil {
		t.Fatal(err)
	}
	s.wantHolds(0, 2)
	s.await(soon, "claims to be offered the other six", func() error { return s.offeredToClaims(gpusANode - 2) })
	s.manifest(singleTemplate)
	for i := range 6 {
		s.manifest(one("claim", fmt.Sprintf("new-%d", i)))
	}
	s.running(soon, gpusANode, 0)
	s.noDoubleOwners()
	s.manifest(one("claim", "late"))
	s.await(soon, "the scheduler to refuse what is too much", func() error {
		if conditions := s.pod("late").Status.Conditions; len(conditions) == 0 || conditions[0].Reason != corev1.PodReasonUnschedulable {
			return fmt.Errorf("%v", conditions)
		}
		return nil
	})
	s.same(before)
	for name := range before {
		if restarts := s.pod(name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			t.Errorf("%s restarted %d times", name, restarts)
		}
	}
	s.kubectl("delete", "pod", "-n", s.namespace, "old-0")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
}
