// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// onNUMANode sends a pod to the node where kubelet aligns; only pods that ask for it run there.
const onNUMANode = `{"spec": {"nodeSelector": {"` + numaKey + `": "true"}, "tolerations": [{"key": "` + numaKey + `", "operator": "Exists"}]}}`

// patched applies a file with a patch, for what an example cannot know of this cluster.
func (s *story) patched(path, patch string) {
	s.Helper()
	s.Manifest(s.Kubectl("patch", "--local", "-f", path, "--type=merge", "-p", patch, "-o", "yaml"))
}

// inside runs a command in a pod's container and answers its output. A kubelet that has just started does not know its
// pods yet.
func (s *story) inside(pod string, command ...string) (out string) {
	s.Helper()
	s.Await(soon, "kubelet to run a command in "+pod, func() (err error) {
		out, err = theCluster.Kubectl(s.Ctx, append([]string{"exec", "-n", s.Namespace, pod, "--"}, command...)...)
		return err
	})
	return out
}

// cpus are those the pod's container may run on, read from inside it.
func (s *story) cpus(pod string) string {
	s.Helper()
	text := s.inside(pod, "sed", "-n", "s/^Cpus_allowed_list:[[:space:]]*//p", "/proc/self/status")
	return strings.TrimSpace(text)
}

func (s *story) awaitCPUs(pod, want string) {
	s.Helper()
	s.Await(soon, fmt.Sprintf("%s to be on CPUs %s", pod, want), func() error {
		if got := s.cpus(pod); got != want {
			return fmt.Errorf("it is on %s", got)
		}
		return nil
	})
}

// openable checks what the kernel lets the container open: all GPUs it sees and no other. No driver answers on a simulated
// node, so who may open a GPU gets "no such device" (ENXIO), and who may not "not permitted" (EPERM).
func (s *story) openable(pod string) {
	s.Helper()
	seen := s.devices(pod)
	if len(seen) == 0 {
		s.Fatalf("%s sees no GPU", pod)
	}
	other := (seen[0].Number.Minor + 1) % gpusANode
	for _, d := range seen {
		if said := s.open(pod, d.Path); !strings.Contains(said, "No such device or address") {
			s.Errorf("%s cannot open its %s: %s", pod, d.Path, said)
		}
		if d.Number.Minor == other {
			other = (other + 1) % gpusANode
		}
	}
	s.inside(pod, "sh", "-c", fmt.Sprintf("rm -f /tmp/other; mkdir -p /tmp; mknod /tmp/other c 195 %d", other))
	if said := s.open(pod, "/tmp/other"); !strings.Contains(said, "Operation not permitted") {
		s.Errorf("%s can open GPU %d, which is not its own: %s", pod, other, said)
	}
}

// open answers what opening a device in a pod says; it never succeeds.
func (s *story) open(pod, path string) string {
	s.Helper()
	return s.inside(pod, "sh", "-c", "cat "+path+" 2>&1 || true")
}

// TestNUMAAligned: GPU and exclusive CPU on one NUMA node, and the GPU stays open through updates of the cpuset and a
// restart of kubelet.
func TestNUMAAligned(t *testing.T) {
	begin(t).aligned()
}

// TestNUMAAlignedByDeviceSpecs is the same for the answer that names device nodes, for runtimes without CDI.
func TestNUMAAlignedByDeviceSpecs(t *testing.T) {
	s := begin(t)
	s.aligned()
	if text := s.inside("shared", "env"); !strings.Contains(text, "NVIDIA_VISIBLE_DEVICES=GPU-") {
		t.Errorf("the strategy was not in force: %s", text)
	}
}

func (s *story) aligned() {
	s.Helper()
	n := theCluster.Node(numaNode)
	s.Cleanup(func() {
		s.remove()
		s.Await(patient, "the ledger of "+numaNode+" to be empty", func() error {
			if holds := s.Holds(n); len(holds) > 0 {
				return fmt.Errorf("holds: %v", holds)
			}
			return nil
		})
	})
	// It runs on all CPUs that no pod has exclusively.
	s.Manifest(manifests.Pod("limit", "shared") + `
  nodeSelector: {` + numaKey + `: "true"}
  tolerations: [{key: ` + numaKey + `, operator: Exists}]
`)
	s.Running(soon, 1, 0)
	everywhere := s.cpus("shared")
	s.patched(filepath.Join("..", "..", "examples", "numa-aligned.yaml"), onNUMANode)
	s.Running(soon, 2, 0)

	exclusive := s.cpus("numa-aligned")
	devices := s.devices("numa-aligned")
	if len(devices) != 1 {
		s.Fatalf("numa-aligned sees %v", devices)
	}
	cpus := strings.TrimSpace(s.On(n, "cat", fmt.Sprintf("/sys/devices/system/node/node%d/cpulist", devices[0].GPU.NUMANode)))
	if exclusive != cpus {
		s.Errorf("CPU %s beside GPU %d of NUMA node %d, whose CPUs are %s", exclusive, devices[0].GPU.Minor, devices[0].GPU.NUMANode, cpus)
	}
	s.Await(soon, "the shared pool to shrink", func() error {
		if now := s.cpus("shared"); now == everywhere {
			return fmt.Errorf("it is %s", now)
		}
		return nil
	})
	s.openable("shared")
	s.openable("numa-aligned")

	// After its start kubelet sets every container's cpuset anew; a wrong one shows when it has.
	if err := n.Component(cluster.Kubelet).Stop(s.Ctx); err != nil {
		s.Fatal(err)
	}
	s.spoilCPUs(n, "numa-aligned", exclusive)
	if err := n.Component(cluster.Kubelet).Start(s.Ctx); err != nil {
		s.Fatal(err)
	}
	s.Ready()
	s.awaitCPUs("numa-aligned", exclusive)
	s.openable("shared")
	s.openable("numa-aligned")

	s.remove("numa-aligned")
	s.awaitCPUs("shared", everywhere)
	s.openable("shared")
	s.NoDoubleOwners()
}

// spoilCPUs gives a container's processes all CPUs, behind kubelet's back.
func (s *story) spoilCPUs(n *cluster.Node, pod, own string) {
	s.Helper()
	before := s.Pod(pod)
	id := strings.TrimPrefix(before.Status.ContainerStatuses[0].ContainerID, "containerd://")
	file := strings.TrimSpace(s.On(n, "find", "/sys/fs/cgroup", "-path", "*"+string(before.UID)+"*"+id+"/cpuset.cpus"))
	if file == "" || strings.Contains(file, "\n") {
		s.Fatalf("cpuset of container %s: %q", id, file)
	}
	s.On(n, "sh", "-c", "cat $(dirname $(dirname $0))/cpuset.cpus > $0", file)
	if now := strings.TrimSpace(s.On(n, "cat", file)); now == own {
		s.Fatalf("the container's cpuset is still %s", now)
	}
}
