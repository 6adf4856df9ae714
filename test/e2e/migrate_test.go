// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/cli/migrate"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/faults"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// nvidiaPlugin is a DaemonSet like that of NVIDIA's device plugin. Its pods only sleep.
const nvidiaPlugin = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nvidia-device-plugin, namespace: kube-system}
spec:
  selector: {matchLabels: {name: nvidia-device-plugin-ds}}
  template:
    metadata: {labels: {name: nvidia-device-plugin-ds}}
    spec:
      terminationGracePeriodSeconds: 1
      nodeSelector: {kubernetes.io/hostname: ` + gpuNode + `}
      containers:
      - name: nvidia-device-plugin-ctr
        image: docker.io/library/busybox:1.37
        imagePullPolicy: Never
        command: [sleep, infinity]
`

// nvidiaStandIn installs a DaemonSet, and serves the node's GPUs in its pod's stead while the pod runs.
func (s *story) nvidiaStandIn(minors map[string]int) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.Ctx)
	ended := make(chan error, 1)
	go func() { ended <- playNVIDIA(ctx, minors) }()
	s.Undo(func() error {
		cancel()
		return <-ended
	})
	s.Undo(func() error {
		err := theClient.AppsV1().DaemonSets("kube-system").Delete(context.WithoutCancel(s.Ctx), "nvidia-device-plugin", metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
	if err := s.ApplyAnywhere(nvidiaPlugin); err != nil {
		s.Fatal(err)
	}
}

// playNVIDIA serves while a pod of the stand-in runs on the node, until ctx is done.
func playNVIDIA(ctx context.Context, minors map[string]int) error {
	var server *faults.Server
	stop := func() error {
		if server == nil {
			return nil
		}
		stopped := server
		server = nil
		return stopped.Stop()
	}
	for {
		pods, err := theClient.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "name=nvidia-device-plugin-ds"})
		switch {
		case ctx.Err() != nil:
			return stop()
		case err != nil:
			return errors.Join(err, stop())
		}
		runs := false
		for _, pod := range pods.Items {
			runs = runs || pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil
		}
		switch {
		case runs && server == nil:
			server, err = faults.Serve(node(), filepath.Join(faults.DevicePluginDir, "nvidia-gpu.sock"), func(server *grpc.Server) {
				pluginapi.RegisterDevicePluginServer(server, faults.NewDevicePlugin(minors))
			})
			if err == nil {
				err = server.Register(ctx, install.ResourceName)
			}
		case !runs:
			err = stop()
		}
		if err != nil && ctx.Err() == nil {
			return errors.Join(err, stop())
		}
		select {
		case <-ctx.Done():
			return stop()
		case <-time.After(stories.LookAgain):
		}
	}
}

// migrates runs `kubectl gpu migrate` for the node.
func (s *story) migrates(plugin string, args ...string) string {
	s.Helper()
	out, err := s.KubectlGPU(plugin, append([]string{"migrate", "--node", gpuNode}, args...)...)
	if err != nil {
		s.Fatalf("%v\n%s", err, out)
	}
	return out
}

// TestMigrateThereAndBack: eight pods run by limits on a node that NVIDIA's device plugin serves. The node moves to Tandem, which serves
// the next pod, and back. No container restarts, and each keeps its GPU.
func TestMigrateThereAndBack(t *testing.T) {
	s := begin(t)
	plugin := s.BuildPlugin()
	minors := s.uuids()
	s.nvidiaStandIn(minors)
	s.Event("Node", gpuNode, "OtherDevicePlugin", faults.DevicePluginDir+"/nvidia-gpu.sock", install.ResourceName)
	s.Readyz(http.StatusServiceUnavailable, "limits", "nvidia-gpu.sock")
	s.Await(soon, "kubelet to offer NVIDIA's GPUs", func() error { return s.OfferedToPods(gpusANode) })
	for i := range gpusANode {
		s.Manifest(manifests.Pod("limit", fmt.Sprintf("old-%d", i)))
	}
	s.Running(patient, gpusANode, 0)
	if text := s.inside("old-0", "env"); !strings.Contains(text, "FOREIGN=true") {
		t.Fatalf("the pod was not served by the stand-in: %s", text)
	}
	containers, gpus := s.Containers(), s.Seen()

	if plan := s.migrates(plugin, "--plan"); !strings.Contains(plan, "node "+gpuNode+": 8 running pods") {
		t.Errorf("plan:\n%s", plan)
	}
	if out := s.migrates(plugin, "--apply"); !strings.Contains(out, "node "+gpuNode+": done") {
		t.Errorf("migrate --apply:\n%s", out)
	}
	s.Unchanged(containers, gpus)
	s.WantHolds(0, gpusANode)
	s.Readyz(http.StatusOK)

	// Tandem serves the next pod.
	s.remove("old-0")
	s.Manifest(manifests.Pod("limit", "new"))
	s.Running(patient, gpusANode, 0)
	if text := s.inside("new", "env"); strings.Contains(text, "FOREIGN=true") {
		t.Errorf("the new pod was served by the stand-in: %s", text)
	}
	s.NoDoubleOwners()

	containers, gpus = s.Containers(), s.Seen()
	if out := s.migrates(plugin, "--apply", "--back"); !strings.Contains(out, "node "+gpuNode+": done") {
		t.Errorf("migrate --apply --back:\n%s", out)
	}
	s.Unchanged(containers, gpus)
	n, err := theClient.CoreV1().Nodes().Get(s.Ctx, gpuNode, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, left := n.Labels[migrate.Label]; left {
		t.Errorf("node labels %v", n.Labels)
	}
	// NVIDIA's plugin serves the next pod, once it has registered.
	s.Readyz(http.StatusServiceUnavailable, "limits", "nvidia-gpu.sock")
	s.remove("old-1")
	s.Manifest(manifests.Pod("limit", "newer"))
	s.Running(patient, gpusANode, 0)
	if text := s.inside("newer", "env"); !strings.Contains(text, "FOREIGN=true") {
		t.Errorf("the newer pod was not served by the stand-in: %s", text)
	}
	s.NoDoubleOwners()
}
