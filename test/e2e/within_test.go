// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/programs"
	"github.com/tandem-gpu/tandem/test/stories"
)

// The stories in this file share devices among the containers of one claim, by the claim's settings.

// Compute modes, as NVML numbers them.
const (
	modeDefault    = 0
	modeProhibited = 2
	modeExclusive  = 3
)

// setting is what was set on a GPU through the driver.
type setting struct{ mode, slice int }

func (t setting) String() string {
	return fmt.Sprintf("compute mode %d, time slice %d", t.mode, t.slice)
}

// toldOfGPUs is what the driver was told of each GPU of the node, by index.
func (s *story) toldOfGPUs() (all []setting) {
	s.Helper()
	data, err := os.ReadFile(filepath.Join(s.Machine(), simulated.MIGDir, simulated.MIGStateFile))
	var state simulated.MIGState
	if err == nil {
		err = yaml.Unmarshal(data, &state)
	}
	for _, uuid := range s.uuidsInOrder() {
		slice, sliceErr := simulated.TimeSlice(s.Machine(), uuid)
		err = errors.Join(err, sliceErr)
		all = append(all, setting{int(state.ComputeModes[uuid]), slice})
	}
	if err != nil {
		s.Fatal(err)
	}
	return all
}

// uuidsInOrder are the UUIDs of the node's GPUs, by index.
func (s *story) uuidsInOrder() (uuids []string) {
	s.Helper()
	profile, err := simulated.Load(filepath.Join(s.Machine(), simulated.ProfileFile))
	if err != nil {
		s.Fatal(err)
	}
	for _, gpu := range profile.GPUs {
		uuids = append(uuids, gpu.UUID)
	}
	return uuids
}

// administeredMode is a compute mode of all GPUs that only an administrator sets. The end of the story restores the default.
func (s *story) administeredMode(mode int) {
	s.Helper()
	s.Undo(func() error {
		_, err := s.SMI("-c", strconv.Itoa(modeDefault))
		return err
	})
	s.Administer("-c", strconv.Itoa(mode))
}

// gpusAre waits until the driver was told this of some GPUs, and the usual of all others.
func (s *story) gpusAre(usual setting, others map[int]setting) {
	s.Helper()
	s.Await(soon, fmt.Sprintf("GPUs with %v, others with %s", others, usual), func() error {
		for i, is := range s.toldOfGPUs() {
			want, ok := others[i]
			if !ok {
				want = usual
			}
			if is != want {
				return fmt.Errorf("GPU %d has %s, not %s", i, is, want)
			}
		}
		return nil
	})
}

// daemonOf is the pod of the one MPS daemon of a claim. It is where the claim is, and goes with the node's GPUNode.
func (s *story) daemonOf(claim *resourceapi.ResourceClaim) (daemon corev1.Pod) {
	s.Helper()
	s.Await(soon, "one MPS daemon of claim "+claim.Name, func() error {
		var names []string
		for _, pod := range s.Daemons() {
			if strings.HasPrefix(pod.Labels[stories.DaemonLabel], string(claim.UID)) {
				daemon, names = pod, append(names, pod.Name)
			}
		}
		if len(names) != 1 || !podstatus.Ready(&daemon) {
			return fmt.Errorf("there are %v, phase %s, ready: %t", names, daemon.Status.Phase, podstatus.Ready(&daemon))
		}
		return nil
	})
	owner := metav1.GetControllerOf(&daemon)
	if daemon.Spec.NodeName != gpuNode || owner == nil || owner.Kind != "GPUNode" || owner.Name != gpuNode {
		s.Errorf("MPS daemon %s is on %q and belongs to %v", daemon.Name, daemon.Spec.NodeName, owner)
	}
	return daemon
}

// claimOf is the claim that a pod got from its template.
func (s *story) claimOf(pod string) *resourceapi.ResourceClaim {
	s.Helper()
	return s.Claim(*s.Pod(pod).Status.ResourceClaimStatuses[0].ResourceClaimName)
}

// program is the MPS program of the simulated driver, which a container with a GPU finds, and which has a mode for clients.
const program = programs.MPSControl

// client has a container use CUDA for a moment, and returns what came of that.
func (s *story) client(pod, container string) string {
	s.Helper()
	out, err := s.tryClient(pod, container)
	if err != nil {
		s.Fatalf("%s of %s is not a client of MPS: %v", container, pod, err)
	}
	return out
}

func (s *story) tryClient(pod, container string) (string, error) {
	args := []string{"exec", "-n", s.Namespace, pod}
	if container != "" {
		args = append(args, "-c", container)
	}
	return theCluster.Kubectl(s.Ctx, append(args, "--", program, "client")...)
}

// halfOfThreads and limited are what a client reports.
const halfOfThreads = "Active threads: 50.0 %"

func limited(uuid string, mebibytes int) string {
	return fmt.Sprintf("%s: limited to %d MiB by the daemon", uuid, mebibytes)
}

// clients checks that containers are clients of the same server, and get this.
func (s *story) clients(pods, containers []string, want ...string) {
	s.Helper()
	servers := map[string]bool{}
	for _, pod := range pods {
		for _, container := range containers {
			// The server ends with its last client or goes on: it stays here, as the real one does.
			server, rest, _ := strings.Cut(strings.TrimSpace(s.client(pod, container)), "\n")
			servers[server] = true
			if got := strings.Split(rest, "\n"); !slices.Equal(got, want) {
				s.Errorf("%s of %s gets %q, want %q", container, pod, got, want)
			}
		}
	}
	if len(servers) != 1 {
		s.Errorf("containers of %v are clients of %v", pods, slices.Sorted(maps.Keys(servers)))
	}
}

// TestSharedWithinClaims: the shapes of parameters that NVIDIA's driver documents for whole GPUs, all at once. What the driver
// was told before comes back with the end of the last pod, and nothing is left.
func TestSharedWithinClaims(t *testing.T) {
	s := begin(t)
	s.Undo(func() error {
		_, err := theCluster.Kubectl(s.Ctx, "delete", "deviceclass", "mps.gpu.example.com", "--ignore-not-found")
		return err
	})
	// Neither of the modes that sharing takes.
	usual := setting{mode: modeProhibited}
	s.administeredMode(usual.mode)
	// A story that fails has nothing shared any more when the mode is put back.
	t.Cleanup(func() {
		s.DeleteAll()
		s.Await(soon, "nothing to be left", s.NothingShared)
	})
	for _, name := range []string{"time-slicing", "mps", "sharing-by-request", "sharing-class"} {
		s.Example(name + ".yaml")
	}
	s.Took("the pods to run", func() { s.Running(patient, 5, 0) })
	uuids := s.uuidsInOrder()
	slice, exclusive := setting{mode: modeDefault, slice: 3}, setting{mode: modeExclusive}
	where := map[int]setting{}
	sees := func(n int, want setting, who ...[2]string) (gpus []int) {
		t.Helper()
		for _, w := range who {
			got := s.GPUs(w[0], w[1])
			if gpus == nil {
				gpus = got
			}
			if len(got) != n || !slices.Equal(got, gpus) {
				t.Errorf("%v sees GPUs %v, not %d, or %v as the others", w, got, n, gpus)
			}
		}
		for _, gpu := range gpus {
			if _, taken := where[gpu]; taken {
				t.Errorf("GPU %d of %v is another's", gpu, who)
			}
			where[gpu] = want
		}
		return gpus
	}

	sees(1, slice, [2]string{"time-slicing", "first"}, [2]string{"time-slicing", "second"})
	s.Says(s.claimOf("time-slicing").Name, map[string]string{"gpu": "TimeSlicing, limit Advisory"})

	gpu := sees(1, exclusive, [2]string{"mps-a", "main"}, [2]string{"mps-b", "main"})[0]
	s.clients([]string{"mps-a", "mps-b"}, []string{"main"}, halfOfThreads, limited(uuids[gpu], 5120))
	s.Says("mps", map[string]string{"gpu": "MPS, limit Daemon"})
	s.daemonOf(s.Claim("mps"))

	sees(1, slice, [2]string{"sharing-by-request", "ts-ctr0"}, [2]string{"sharing-by-request", "ts-ctr1"})
	gpu = sees(1, exclusive, [2]string{"sharing-by-request", "mps-ctr0"}, [2]string{"sharing-by-request", "mps-ctr1"})[0]
	s.clients([]string{"sharing-by-request"}, []string{"mps-ctr0", "mps-ctr1"},
		halfOfThreads, limited(uuids[gpu], 10240))
	if out, err := s.tryClient("sharing-by-request", "ts-ctr0"); err == nil {
		t.Errorf("a container that has no part in MPS is its client: %s", out)
	}
	both := s.claimOf("sharing-by-request")
	s.Says(both.Name, map[string]string{"ts-gpu": "TimeSlicing, limit Advisory", "mps-gpu": "MPS, limit Daemon"})
	s.daemonOf(both)

	pair := sees(2, exclusive, [2]string{"sharing-class", "first"}, [2]string{"sharing-class", "second"})
	sorted := []string{uuids[pair[0]], uuids[pair[1]]}
	slices.Sort(sorted)
	s.clients([]string{"sharing-class"}, []string{"first", "second"},
		halfOfThreads, limited(sorted[0], 10240), limited(sorted[1], 5120))
	s.Says(s.claimOf("sharing-class").Name, map[string]string{"gpus": "MPS, limit Daemon"})
	s.daemonOf(s.claimOf("sharing-class"))

	s.gpusAre(usual, where)
	s.WantHolds(6, 0)
	s.NoDoubleOwners()

	// The first pod of two to go takes nothing from the other; the claim outlives both, and its daemon does not.
	s.remove("mps-a", "time-slicing", "sharing-by-request", "sharing-class")
	maps.DeleteFunc(where, func(_ int, was setting) bool { return was == slice })
	gpu = s.GPUs("mps-b", "")[0]
	s.gpusAre(usual, map[int]setting{gpu: exclusive})
	s.clients([]string{"mps-b"}, []string{"main"}, halfOfThreads, limited(uuids[gpu], 5120))
	if restarts := s.Pod("mps-b").Status.ContainerStatuses[0].RestartCount; restarts > 0 {
		t.Errorf("mps-b restarted %d times", restarts)
	}
	s.WantHolds(1, 0)
	s.remove("mps-b")
	s.gpusAre(usual, nil)
	s.Await(soon, "nothing to be left", s.NothingShared)
	if c := s.Claim("mps"); len(c.Status.ReservedFor) > 0 {
		t.Errorf("the claim is still reserved for %v", c.Status.ReservedFor)
	}
}

// TestSharedPartitions: alternatives of a claim are shared in the way of the one that it got, partitions as GPUs are.
func TestSharedPartitions(t *testing.T) {
	const last = "7"
	s := begin(t)
	t.Cleanup(func() { s.Uncut(gpusANode - 1) })
	// A story that fails leaves no pod on what the administrator removes.
	t.Cleanup(func() { s.DeleteAll() })
	s.Administer("-i", last, "-mig", "1")
	s.Administer("mig", "-i", last, "-cgi", "1g.10gb,3g.40gb", "-C")
	s.Published("1g.10gb", "3g.40gb")
	s.Example("mig-shared.yaml")
	s.Running(patient, 1, 0)

	used := map[string]string{}
	for _, container := range s.picture().Containers {
		if container.Namespace != s.Namespace || container.Name == "" {
			continue
		}
		if len(container.Devices) != 1 || container.Devices[0].Whole() {
			t.Errorf("%s can use %+v", container.Title(), container.Devices)
			continue
		}
		used[container.Name] = container.Devices[0].Partition.UUID
	}
	half, small := used["best-ctr0"], used["small-ctr0"]
	if half == "" || small == "" || half == small || half != used["best-ctr1"] || small != used["small-ctr1"] {
		t.Errorf("the containers can use %v", used)
	}
	s.clients([]string{"mig-shared"}, []string{"best-ctr0", "best-ctr1"}, halfOfThreads, limited(half, 10240))
	if out, err := s.tryClient("mig-shared", "small-ctr0"); err == nil {
		t.Errorf("a container that has no part in MPS is its client: %s", out)
	}
	claim := s.claimOf("mig-shared")
	s.Says(claim.Name, map[string]string{"best/half": "MPS, limit Daemon", "small": "TimeSlicing, limit Advisory"})
	s.daemonOf(claim)
	// A partition has no compute mode and no time slice of its own; that of its GPU is none of its business.
	s.gpusAre(setting{}, nil)
	s.explained()
	s.NoDoubleOwners()

	s.DeleteAll()
	s.Await(soon, "nothing to be left", func() error { return errors.Join(s.NothingShared(), s.Empty()) })
	if found := s.migInstances(); len(found) != 2 {
		t.Errorf("instances: %v", found)
	}
}
