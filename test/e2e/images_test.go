// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestImagesThatNameDevices: a container runtime with CVE-2026-53492 or CVE-2026-92574 creates a container with the CDI names that a
// checkpoint image has. The story asks containerd for such containers itself, with each field that can have a name. An image can name a GPU
// by its UUID, until the node has secret names.
func TestImagesThatNameDevices(t *testing.T) {
	s := begin(t)
	pod := func(name, resources string) string {
		return fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %s}
  containers:
  - {name: work, image: "%s", imagePullPolicy: Never, command: [sh, -c, "trap exit TERM; while :; do sleep 1; done"], resources: %s}
`, name, gpuNode, restoredImage, resources)
	}
	s.Manifest(pod("earlier", "{limits: {"+install.ResourceName+": 1}}") + "---" + pod("restored", "{}"))
	s.Running(soon, 2, 0)
	held := s.GPUs("earlier", "")[0]
	uuids := s.uuidsInOrder()
	free := (held + 1) % len(uuids)
	stable := func(gpu int) string { return "k8s.gpu.nvidia.com/gpu=" + uuids[gpu] }
	ways := map[string]func(*cri.ContainerConfig, string){
		"an annotation": func(c *cri.ContainerConfig, name string) {
			c.Annotations = map[string]string{"cdi.k8s.io/restored": name}
		},
		"a CDI device": func(c *cri.ContainerConfig, name string) { c.CDIDevices = []*cri.CDIDevice{{Name: name}} },
	}
	// given awaits that a container whose image names a GPU gets it, or that the runtime knows no such name.
	given := func(gpu int, want bool) {
		t.Helper()
		for way, set := range ways {
			s.Await(patient, fmt.Sprintf("a container with %s of GPU %d: given is %t", way, gpu, want), func() error {
				got, err := s.restore("restored", func(c *cri.ContainerConfig) { set(c, stable(gpu)) })
				switch {
				case want && err == nil && slices.Equal(got, []string{fmt.Sprintf("/dev/nvidia%d", gpu)}):
					return nil
				case !want && err != nil && strings.Contains(err.Error(), "unresolvable CDI devices "+stable(gpu)):
					return nil
				}
				return fmt.Errorf("it got %v, %w", got, err)
			})
		}
	}
	given(free, true) // the hole

	s.Values("cdiDeviceNames=secret")
	s.Ready()
	given(free, false)
	// kubelet keeps the answer of before. So the container can start again, and an image can still name its GPU.
	given(held, true)
	if _, err := s.sh("earlier", "kill 1"); err != nil {
		t.Log(err) // the container may end first
	}
	s.Await(patient, "the container to run again", func() error {
		if got := s.Pod("earlier").Status.ContainerStatuses[0]; got.RestartCount == 0 || got.State.Running == nil {
			return fmt.Errorf("%d restarts, %v", got.RestartCount, got.State)
		}
		return nil
	})
	if got := s.GPUs("earlier", ""); !slices.Equal(got, []int{held}) {
		t.Errorf("after its restart the container has GPUs %v, had %d", got, held)
	}
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim") + "---" + pod("later", "{limits: {"+install.ResourceName+": 1}}"))
	s.Running(patient, 4, 0)
	s.NoDoubleOwners()
	for _, name := range []string{"claim", "later"} {
		if got := s.GPUs(name, ""); len(got) != 1 || got[0] == held {
			t.Errorf("%s has GPUs %v", name, got)
		} else {
			given(got[0], false)
		}
	}
	s.remove("earlier")
	given(held, false)
}

const restoredImage = "docker.io/library/busybox:1.37"

// restore creates a container in the sandbox of a pod, and returns the GPUs' device nodes that it would have.
func (s *story) restore(pod string, change func(*cri.ContainerConfig)) (gpus []string, err error) {
	root, err := node().Root()
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(root, "/run/containerd/containerd.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	runtime := cri.NewRuntimeServiceClient(conn)
	of := s.Pod(pod)
	sandboxes, err := runtime.ListPodSandbox(s.Ctx, &cri.ListPodSandboxRequest{
		Filter: &cri.PodSandboxFilter{LabelSelector: map[string]string{"io.kubernetes.pod.uid": string(of.UID)}},
	})
	if err != nil {
		return nil, err
	}
	if len(sandboxes.Items) == 0 {
		return nil, fmt.Errorf("pod %s has no sandbox", pod)
	}
	sandbox := sandboxes.Items[0]
	config := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "restored"}, Image: &cri.ImageSpec{Image: restoredImage}, Command: []string{"true"},
		Linux: &cri.LinuxContainerConfig{},
	}
	change(config)
	created, err := runtime.CreateContainer(s.Ctx, &cri.CreateContainerRequest{
		PodSandboxId: sandbox.Id, Config: config, SandboxConfig: &cri.PodSandboxConfig{Metadata: sandbox.Metadata, Linux: &cri.LinuxPodSandboxConfig{}},
	})
	if err != nil {
		return nil, err
	}
	status, err := runtime.ContainerStatus(s.Ctx, &cri.ContainerStatusRequest{ContainerId: created.ContainerId, Verbose: true})
	if err == nil {
		gpus, err = gpuNodes(status.Info["info"])
	}
	_, removeErr := runtime.RemoveContainer(s.Ctx, &cri.RemoveContainerRequest{ContainerId: created.ContainerId})
	return gpus, errors.Join(err, removeErr)
}

// gpuNodes are the device nodes of GPUs in what containerd says of a container.
func gpuNodes(info string) (nodes []string, err error) {
	var of struct {
		RuntimeSpec struct {
			Linux struct{ Devices []struct{ Path string } }
		}
	}
	if err := json.Unmarshal([]byte(info), &of); err != nil {
		return nil, err
	}
	for _, d := range of.RuntimeSpec.Linux.Devices {
		if number, isNVIDIA := strings.CutPrefix(d.Path, "/dev/nvidia"); isNVIDIA && strings.Trim(number, "0123456789") == "" {
			nodes = append(nodes, d.Path)
		}
	}
	return nodes, nil
}
