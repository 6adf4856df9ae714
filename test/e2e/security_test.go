// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/test/stories"
)

// writes to slices that are never stored.
type writes struct {
	*story
	client kubernetes.Interface
}

var dryRun = []string{metav1.DryRunAll}

func (w writes) update(slice *resourceapi.ResourceSlice) error {
	_, err := w.client.ResourceV1().ResourceSlices().Patch(w.Ctx, slice.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"stolen":"true"}}}`), metav1.PatchOptions{DryRun: dryRun})
	return err
}

// TestAgentIsConfined: what the kernel says of the agent's process on a node without real GPUs, where it needs no privilege.
func TestAgentIsConfined(t *testing.T) {
	s := begin(t)
	pid := strings.TrimSpace(s.On(node(), "pgrep", "-x", "kubelet-plugin"))
	status := s.On(node(), "cat", "/proc/"+pid+"/status")
	for field, want := range map[string]string{
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000", "CapBnd": "0000000000000000",
		"NoNewPrivs": "1",
		"Seccomp":    "2", // a filter
	} {
		if !strings.Contains(status, field+":\t"+want+"\n") {
			t.Errorf("%s is not %s:\n%s", field, want, status)
		}
	}
	for _, namespace := range []string{"net", "pid", "ipc", "mnt"} {
		own, host := s.On(node(), "readlink", "/proc/"+pid+"/ns/"+namespace), s.On(node(), "readlink", "/proc/1/ns/"+namespace)
		if own == host {
			t.Errorf("the agent is in the node's %s namespace", namespace)
		}
	}
	// What it may write to, of the node's files: its own, and the directories in which it meets kubelet and the runtime.
	may := []string{
		"/run/tandem", "/var/run/cdi", "/var/lib/kubelet/plugins/gpu.nvidia.com", "/var/lib/kubelet/plugins_registry",
		"/var/lib/kubelet/device-plugins", "/dev/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/var/termination-log", "/proc", "/dev",
		"/sys/fs/cgroup", // the container's own
		// What stands for the partitions that are in the GPUs themselves. The rest of the simulated machine stays read-only, and
		// with real GPUs nothing is mounted here.
		stories.SimulatedMachine + "/mig",
	}
	for line := range strings.Lines(s.On(node(), "cat", "/proc/"+pid+"/mounts")) {
		fields := strings.Fields(line)
		at, options := fields[1], strings.Split(fields[3], ",")
		if slices.Contains(options, "ro") || slices.ContainsFunc(may, func(path string) bool {
			return at == path || strings.HasSuffix(path, "/") && strings.HasPrefix(at, path)
		}) {
			continue
		}
		// Volumes of other pods are there, under a mount that hides them.
		if strings.HasPrefix(at, "/var/lib/kubelet/pods/") {
			if names := s.On(node(), "ls", "-A", "/proc/"+pid+"/root/var/lib/kubelet/pods"); names != "" {
				t.Errorf("the agent sees the volumes of pods: %s", names)
			}
			continue
		}
		// Masked parts of /proc are not the node's files.
		if fields[2] != "proc" && !strings.HasPrefix(at, "/proc/") && !strings.HasPrefix(at, "/node/proc/") {
			t.Errorf("the agent may write to %s: %s", at, line)
		}
	}
}

// TestHostIsHidden: with the chart's mounts for driverRoot auto, a container sees the host's driver, and neither kubelet's files nor
// the host's processes, also of pods that start later. That holds for an agent without SYS_ADMIN, which the pod here does not have either:
// with it, the agent could unmount what hides them. The simulated machine needs no such mounts, so a pod has them here.
func TestHostIsHidden(t *testing.T) {
	s := begin(t)
	s.Manifest(`
apiVersion: v1
kind: Pod
metadata: {name: sees-host}
spec:
  nodeName: ` + gpuNode + `
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    securityContext: {readOnlyRootFilesystem: true}
    volumeMounts:
    - {name: host, mountPath: /host, readOnly: true, mountPropagation: HostToContainer}
    - {name: nothing, mountPath: /host/var/lib/kubelet, readOnly: true}
    - {name: nothing, mountPath: /host/proc, readOnly: true}
  volumes:
  - {name: host, hostPath: {path: /, type: Directory}}
  - {name: nothing, emptyDir: {}}
`)
	s.Running(soon, 1, 0)
	s.Manifest(`
apiVersion: v1
kind: Secret
metadata: {name: secret}
stringData: {key: value}
---
apiVersion: v1
kind: Pod
metadata: {name: later}
spec:
  nodeName: ` + gpuNode + `
  terminationGracePeriodSeconds: 1
  containers:
  - {name: c, image: "docker.io/library/busybox:1.37", imagePullPolicy: Never, command: [sleep, infinity], volumeMounts: [{name: v, mountPath: /v}]}
  volumes: [{name: v, secret: {secretName: secret}}]
`)
	s.Running(soon, 2, 0)
	if seen := s.Kubectl("exec", "-n", s.Namespace, "sees-host", "--", "ls", "/host"); !strings.Contains(seen, "usr") {
		t.Errorf("the host's root has %q", seen)
	}
	if seen := s.Kubectl("exec", "-n", s.Namespace, "sees-host", "--", "ls", "-A", "/host/var/lib/kubelet", "/host/proc"); strings.TrimSpace(seen) != "/host/proc:\n\n/host/var/lib/kubelet:" {
		t.Errorf("of kubelet and of processes there is %q", seen)
	}
}
