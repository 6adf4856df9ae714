// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// onesAGPU is how many 1g.10gb an H100 has room for.
const onesAGPU = 7

// migInstances are the GPU instances that the machine has, as "GPU profile@start".
func (s *story) migInstances() []string {
	s.Helper()
	data, err := os.ReadFile(filepath.Join(s.Machine(), simulated.MIGDir, simulated.MIGStateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a node that has just booted has no driver yet
	}
	if err != nil {
		s.Fatal(err)
	}
	var state simulated.MIGState
	if err := yaml.Unmarshal(data, &state); err != nil {
		s.Fatal(err)
	}
	var found []string
	for _, gpu := range state.GPUs {
		for _, i := range gpu.Instances {
			found = append(found, fmt.Sprintf("%s %d@%d", gpu.UUID, i.Profile, i.Start))
		}
	}
	return found
}

// dynamic lets claims have partitions made of the node's GPUs, until the story ends.
func (s *story) dynamic() {
	s.Helper()
	s.Installed("mig-dynamic.values.yaml")
	s.RetryAgent()
	s.Await(patient, "a pool for each GPU", func() error {
		if pools := s.poolsOfGPUs(); len(pools) != gpusANode {
			return fmt.Errorf("%v", pools)
		}
		return s.OfferedToPods(gpusANode)
	})
}

func (s *story) noPartitions() error {
	if found := s.migInstances(); len(found) > 0 {
		return fmt.Errorf("%d instances: %v", len(found), found)
	}
	return s.Empty()
}

// poolsOfGPUs are the complete pools of GPUs of the node with the number of their devices.
func (s *story) poolsOfGPUs() map[string]int {
	s.Helper()
	list, err := s.Slices(gpuNode)
	if err != nil {
		s.Fatal(err)
	}
	devices, missing := map[string]int{}, map[string]int64{}
	for _, slice := range list {
		pool := slice.Spec.Pool
		if !strings.HasPrefix(pool.Name, gpuNode+"/") {
			continue
		}
		devices[pool.Name] += len(slice.Spec.Devices)
		if _, ok := missing[pool.Name]; !ok {
			missing[pool.Name] = pool.ResourceSliceCount
		}
		missing[pool.Name]--
	}
	maps.DeleteFunc(devices, func(pool string, n int) bool { return n == 0 || missing[pool] != 0 })
	return devices
}

// counters are those of all pools of the node, as "pool/counter".
func (s *story) counters() map[string]int64 {
	s.Helper()
	list, err := s.Slices(gpuNode)
	if err != nil {
		s.Fatal(err)
	}
	counters := map[string]int64{}
	for _, slice := range list {
		for _, set := range slice.Spec.SharedCounters {
			for name, counter := range set.Counters {
				counters[slice.Spec.Pool.Name+"/"+name] = counter.Value.Value()
			}
		}
	}
	return counters
}

// partitions are how many of the machine's instances the story's pods use, by the pods' names: the oracle looks at device nodes.
func (s *story) partitions() map[string][]string {
	s.Helper()
	found := map[string][]string{}
	for _, container := range s.picture().Containers {
		for _, device := range container.Devices {
			if container.Namespace == s.Namespace && !device.Whole() {
				found[container.Pod] = append(found[container.Pod], fmt.Sprintf("gpu%d/%s", device.GPU.Minor, device.Partition.Instance))
			}
		}
	}
	return found
}

// explained fails where a container can use a device that its claims and limits do not explain.
func (s *story) explained() {
	s.Helper()
	for _, container := range s.picture().Unexplained() {
		s.Errorf("%s can use %+v, which it has not asked for", container.Title(), container.Devices)
	}
}

// onDemand begins a story of GPUs that are partitioned for claims. It ends when the partitions are gone, the counters have their first
// values, and both APIs offer all GPUs again.
func onDemand(t *testing.T) *story {
	t.Helper()
	s := begin(t)
	if !s.CountersKept() {
		t.Skip(droppedCounters)
	}
	counters := s.counters()
	t.Cleanup(func() {
		s.Breaks()
		if t.Failed() {
			t.Logf("instances: %v\ncounters: %v", s.migInstances(), s.counters())
		}
		began := time.Now()
		s.DeleteAll()
		s.backTo(counters)
		t.Logf("pods and partitions gone, and counters back, after %.1f s", time.Since(began).Seconds())
	})
	return s
}

// TestPartitionPolicyEnds while a claim has a partition, without a restart: the partition stays, no other one is offered, and its GPU is
// whole when the claim ends.
func TestPartitionPolicyEnds(t *testing.T) {
	s := onDemand(t)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("one", "ones"))
	s.Running(soon, 1, 0)
	agents, before := s.AgentRestarts(), s.partitions()
	s.configure("{version: v1}")
	s.RetryAgent()
	s.Await(patient, "seven GPUs to be offered whole, and no pool of a GPU to be left", func() error {
		if pools := s.poolsOfGPUs(); len(pools) != 0 {
			return fmt.Errorf("pools of GPUs: %v", pools)
		}
		return s.OfferedToPods(gpusANode - 1)
	})
	s.Manifest(manifests.ClaimPod("late", "ones"))
	s.Unschedulable(1)
	if now := s.partitions(); !slices.Equal(now["one"], before["one"]) || s.AgentRestarts() != agents {
		t.Errorf("the pod could use %v, now %v; the agent restarted %d times", before, now, s.AgentRestarts()-agents)
	}
	s.remove("one", "late")
	s.Await(soon, "the partition to be gone", s.noPartitions)
}

// backTo waits until no partition is left and the counters have their first values.
func (s *story) backTo(counters map[string]int64) {
	s.Helper()
	s.Await(patient, "partitions gone and counters back", func() error {
		err := s.noPartitions()
		now := s.counters()
		for name, want := range counters {
			if now[name] != want {
				err = errors.Join(err, fmt.Errorf("counter %s is %d, was %d", name, now[name], want))
			}
		}
		return err
	})
}

// TestPartitionsOnDemand: a partition comes with its pod, is seen by it alone, and goes with it. If the scheduler has no counters, GPUs are
// offered whole and the node reports it.
func TestPartitionsOnDemand(t *testing.T) {
	if s := (&story{stories.New(t, theContext, &thePlace)}); !s.CountersKept() {
		s = begin(t)
		s.Event("Node", gpuNode, "NoPartitionsOnDemand", "shared counters", "1.36")
		s.Served("Dual", gpusANode, gpusANode)
		return
	}
	s := onDemand(t)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("one", "ones"))
	s.Running(soon, 1, 0)
	s.WantHolds(1, 0)
	if found := s.migInstances(); len(found) != 1 {
		s.Fatalf("instances: %v", found)
	}
	used := s.partitions()["one"]
	if len(used) != 1 || !strings.HasPrefix(used[0], "gpu0/") {
		s.Errorf("the pod can use %v", used)
	}
	nodes := strings.Fields(s.Kubectl("exec", "-n", s.Namespace, "one", "--", "sh", "-c", "ls -d /dev/nvidia[0-9]* /dev/nvidia-caps/*"))
	if len(nodes) != 3 {
		s.Errorf("the pod sees %v, not one GPU and two rights", nodes)
	}
	s.explained()
	s.NoDoubleOwners()
	s.remove("one")
	s.Await(soon, "the partition to be gone", s.noPartitions)
}

// TestPartitionsOfExamples: a pod for each profile, two partitions of one GPU, and the half of a GPU where none is free.
func TestPartitionsOfExamples(t *testing.T) {
	s := onDemand(t)
	s.Example("mig-profiles.yaml")
	s.Example("mig-same-gpu.yaml")
	s.Running(patient, 8, 0)
	used := s.partitions()
	for _, pod := range s.Pods() {
		if want := map[bool]int{true: 2, false: 1}[pod.Name == "mig-same-gpu"]; len(used[pod.Name]) != want {
			s.Errorf("%s can use %v", pod.Name, used[pod.Name])
		}
	}
	if pair := used["mig-same-gpu"]; len(pair) == 2 && pair[0][:4] != pair[1][:4] {
		s.Errorf("the partitions %v are not of one GPU", pair)
	}
	// Of the other GPUs all but one are taken by limits, and of that one the half that leaves a 3g.
	whole := gpusANode - len(s.gpusInUse()) - 1
	s.Manifest(manifests.Deployment("limits", whole))
	s.Running(patient, 8+whole, 0)
	s.Manifest(manifests.PartitionTemplate("four", "4g.40gb") + manifests.ClaimPod("four", "four"))
	s.Running(soon, 9+whole, 0)
	s.Example("mig-first-available.yaml")
	s.Running(soon, 10+whole, 0)
	if got := s.partitions()["mig-first-available"]; len(got) != 1 {
		s.Errorf("mig-first-available can use %v", got)
	}
	s.explained()
	s.NoDoubleOwners()
}

// gpusInUse counts the machine's instances by GPU.
func (s *story) gpusInUse() map[string]int {
	s.Helper()
	used := map[string]int{}
	for _, instance := range s.migInstances() {
		used[strings.Fields(instance)[0]]++
	}
	return used
}

// TestGPUsFullOfPartitions fills three GPUs with 21 of the smallest partitions, beside five that limits have.
func TestGPUsFullOfPartitions(t *testing.T) {
	const whole = 5
	const all = (gpusANode - whole) * onesAGPU
	s := onDemand(t)
	s.fillWithLimits(whole)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb"))
	began := time.Now()
	s.Manifest(manifests.ClaimDeployment("ones", "ones", all+1))
	s.Running(patient, 1+all, 1)
	s.Logf("%d partitions are used %.1f s after their pods were made", all, time.Since(began).Seconds())
	if found := s.migInstances(); len(found) != all {
		s.Errorf("%d instances: %v", len(found), found)
	}
	var used []string
	for _, partitions := range s.partitions() {
		used = append(used, partitions...)
	}
	slices.Sort(used)
	if len(used) != all || len(slices.Compact(used)) != all {
		s.Errorf("pods use %d partitions: %v", len(used), used)
	}
	s.explained()
	s.NoDoubleOwners()
	if told := s.Unschedulable(1); !strings.Contains(told[0], "cannot allocate all claims") {
		s.Errorf("the pod that waits is told %q", told[0])
	}
}

// profiles are all that an H100 of 80 GB has.
var profiles = []string{"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"}

// TestMixOfPartitions asks for more of every profile than there is room for, beside whole GPUs by limits. Whatever is given back is
// used again, and the scheduler never chooses what the hardware refuses.
func TestMixOfPartitions(t *testing.T) {
	const whole, first, each = 2, 1, 4
	s := onDemand(t)
	refusals := s.RefusedPrepares()
	s.Manifest(manifests.Deployment("limits", whole))
	s.Running(soon, whole, 0)
	deploymentOf := map[string]string{}
	// The largest first: so there is room for some of each.
	for _, profile := range slices.Backward(profiles) {
		name := "p-" + strings.NewReplacer(".", "-", "+", "-").Replace(profile)
		deploymentOf[profile] = name
		s.Manifest(manifests.PartitionTemplate(name, profile) + manifests.ClaimDeployment(name, name, first))
	}
	s.Running(patient, whole+first*len(profiles), 0)
	s.Kubectl("scale", "deployment", "-n", s.Namespace, "--all", fmt.Sprintf("--replicas=%d", each))
	s.saturated(deploymentOf)
	for _, profile := range profiles {
		for _, pod := range s.Pods() {
			if strings.HasPrefix(pod.Name, deploymentOf[profile]+"-") && pod.Labels["app"] == deploymentOf[profile] && pod.Status.Phase == corev1.PodRunning {
				s.remove(pod.Name)
				break
			}
		}
		s.saturated(deploymentOf)
	}
	s.Kubectl("scale", "deployment", "-n", s.Namespace, "limits", "--replicas=1")
	s.saturated(deploymentOf)
	s.Logf("limits pods that came too late: %v", s.failed())
	// A claim in conflict with a pod is refused once: its next pod is placed elsewhere. No claim gets a partition that the
	// hardware refuses.
	if refused := s.RefusedPrepares() - refusals; refused > 2*each {
		s.Errorf("%v Prepares were refused", refused)
	}
	if events := s.Kubectl("get", "events", "-n", s.Namespace, "--field-selector=reason=PartitionNotMade", "-o", "name"); events != "" {
		s.Errorf("the scheduler chose what the hardware refuses: %s", events)
	}
}

// saturated waits until every pod runs or is unschedulable, and no partition of a profile that a pod waits for would fit.
func (s *story) saturated(deploymentOf map[string]string) {
	s.Helper()
	began := time.Now()
	running := 0
	s.Await(patient, "the node to be full", func() error {
		running = 0
		waits := map[string]bool{}
		for _, pod := range s.Pods() {
			switch {
			case pod.DeletionTimestamp != nil:
				return fmt.Errorf("%s is going", pod.Name)
			case pod.Status.Phase == corev1.PodRunning:
				running++
			case pod.Status.Phase == corev1.PodFailed:
				// A limit that came in the moment in which a claim took the last GPU. Its owner has made another.
			case pod.Spec.NodeName != "" || pod.Status.Phase != corev1.PodPending:
				return fmt.Errorf("%s is on %q and %s", pod.Name, pod.Spec.NodeName, pod.Status.Phase)
			default:
				waits[pod.Labels["app"]] = true
			}
		}
		free, err := s.room()
		for profile, name := range deploymentOf {
			if waits[name] && free[profile] > 0 {
				err = errors.Join(err, fmt.Errorf("there is room for %d %s", free[profile], profile))
			}
		}
		return err
	})
	s.explained()
	s.NoDoubleOwners()
	s.Logf("full with %d pods and %d instances after %.1f s", running, len(s.migInstances()), time.Since(began).Seconds())
}

// room asks the hardware how many partitions of each profile fit now. A whole GPU without a holder is an error.
func (s *story) room() (map[string]int, error) {
	s.Helper()
	listed, err := s.SMI("mig", "-lgip")
	if err != nil {
		return nil, err
	}
	free := map[string]int{}
	// Only GPUs in MIG mode are listed. A line is "0 MIG 1g.10gb 19 7/7 0:1,1:1".
	for line := range strings.Lines(listed) {
		fields := strings.Fields(line)
		var n int
		if _, err := fmt.Sscanf(fields[4], "%d/", &n); err != nil {
			s.Fatalf("profile %q: %v", line, err)
		}
		free[fields[2]] += n
	}
	whole := map[uint32]bool{}
	for _, container := range s.picture().Containers {
		for _, device := range container.Devices {
			if container.Namespace == s.Namespace && device.Whole() {
				whole[device.Number.Minor] = true
			}
		}
	}
	if used := len(whole) + len(s.gpusInUse()); used != gpusANode {
		return nil, fmt.Errorf("%d of %d GPUs are used", used, gpusANode)
	}
	return free, nil
}

// TestWholeOrParts: a GPU is either a limit's or partitioned, and becomes the other when it is free.
func TestWholeOrParts(t *testing.T) {
	s := onDemand(t)
	s.Manifest(manifests.Deployment("limits", gpusANode))
	s.Running(soon, gpusANode, 0)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("one", "ones"))
	s.Unschedulable(1)
	s.Kubectl("scale", "deployment", "-n", s.Namespace, "limits", fmt.Sprintf("--replicas=%d", gpusANode-1))
	s.Running(patient, gpusANode, 0)
	if len(s.partitions()["one"]) != 1 {
		s.Errorf("the pod can use %v", s.partitions()["one"])
	}
	s.NoDoubleOwners()
	s.Await(soon, "its GPU to leave the limits", func() error { return s.OfferedToPods(gpusANode - 1) })
	s.Kubectl("scale", "deployment", "-n", s.Namespace, "limits", fmt.Sprintf("--replicas=%d", gpusANode))
	s.Unschedulable(1)
	s.remove("one")
	s.Running(patient, gpusANode, 0)
	s.NoDoubleOwners()
	if found := s.migInstances(); len(found) > 0 {
		s.Errorf("instances: %v", found)
	}
}

// failing is a fault of a call on all GPUs.
func failing(call string, fault simulated.CallFault) (faults []simulated.GPUFaults) {
	for gpu := range gpusANode {
		faults = append(faults, simulated.GPUFaults{GPU: strconv.Itoa(gpu), Calls: map[string]simulated.CallFault{call: fault}})
	}
	return faults
}

// TestPartitionFaults: calls fail, and the agent dies between them. What was half made is undone, what was half undone is gone in
// the end, and the pods run once nothing fails.
func TestPartitionFaults(t *testing.T) {
	const furnish, destroy = "GpuInstance.CreateComputeInstance", "GpuInstance.Destroy"
	s := onDemand(t)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.PartitionTemplate("threes", "3g.40gb"))
	s.Breaks(failing(furnish, simulated.CallFault{Return: "ERROR_UNKNOWN"})...)
	s.Manifest(manifests.ClaimPod("refused", "ones"))
	s.Await(soon, "the claim's owner to be told", func() error {
		events := s.Kubectl("get", "events", "-n", s.Namespace, "--field-selector=reason=PartitionNotMade")
		if !strings.Contains(events, "cannot be created") {
			return fmt.Errorf("events: %s", events)
		}
		return nil
	})
	s.Await(soon, "what was half made to be gone", s.noPartitions)
	s.Breaks()
	s.Running(patient, 1, 0)

	// Killed between GPU instance and compute instance.
	s.Breaks(failing(furnish, simulated.CallFault{Delay: simulated.Duration(time.Minute)})...)
	s.Manifest(manifests.ClaimPod("interrupted", "threes"))
	s.Await(soon, "a GPU instance", s.instances(2))
	s.KillAgent()
	s.Breaks()
	s.Ready()
	s.retry("interrupted")
	s.Running(patient, 2, 0)
	s.Await(soon, "nothing to be left over", s.instances(2))
	s.explained()

	// Killed after the compute instance has gone, before the GPU instance has.
	s.Breaks(failing(destroy, simulated.CallFault{Delay: simulated.Duration(time.Minute)})...)
	s.remove("interrupted", "refused")
	s.Await(soon, "a GPU instance to be empty", func() error {
		listed, err := s.SMI("mig", "-lci")
		if err == nil && strings.Count(listed, "\n") == 2 {
			err = errors.New("all are furnished")
		}
		return err
	})
	s.KillAgent()
	s.Breaks()
	s.Ready()
	s.Await(soon, "all to be gone", s.noPartitions)
}

// instances is a condition: the machine has so many.
func (s *story) instances(n int) func() error {
	return func() error {
		if found := s.migInstances(); len(found) != n {
			return fmt.Errorf("%d instances: %v", len(found), found)
		}
		return nil
	}
}

// TestBusyPartition: a partition outlives its pod, because an unknown process uses it. It is destroyed soon after that process ended, and
// delays only claims for the same placement.
func TestBusyPartition(t *testing.T) {
	s := onDemand(t)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("busy", "ones"))
	s.Running(soon, 1, 0)
	claim := s.claims()[0]
	place := strings.Split(s.migInstances()[0], "@")[1] + "+1"
	s.Breaks(simulated.GPUFaults{GPU: "0", Clients: []simulated.Client{{PID: 4242, Partition: place}}})
	s.remove("busy")
	s.Event("ResourceClaim", claim.Name, "PartitionInUse", "partition 1g.10gb of gpu-0", "process 4242", s.Namespace+"/busy")
	// The scheduler may choose the place before it hears that it is not free yet: that pod is moved.
	s.Manifest(manifests.ClaimDeployment("others", "ones", onesAGPU))
	s.Running(patient, onesAGPU, 0)
	s.NoDoubleOwners()
	s.Kubectl("scale", "deployment", "-n", s.Namespace, "others", "--replicas=0")
	s.Await(soon, "only the busy one to be left", s.instances(1))
	s.Breaks()
	s.Await(soon, "it to be gone", s.noPartitions)
}

// TestPartitionsRebooted: a reboot takes all partitions. The claims are the same, and theirs are made again in the same places.
func TestPartitionsRebooted(t *testing.T) {
	s := onDemand(t)
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.PartitionTemplate("threes", "3g.40gb"))
	s.Manifest(manifests.ClaimPod("one", "ones") + manifests.ClaimPod("three", "threes"))
	s.Running(soon, 2, 0)
	before := slices.Sorted(slices.Values(s.migInstances()))
	s.Manifest(manifests.Deployment("limits", gpusANode-1))
	s.Running(soon, gpusANode+1, 0)
	if err := node().Reboot(s.Ctx); err != nil {
		s.Fatal(err)
	}
	booted := time.Now()
	s.Await(patient, "all pods to run again", func() error {
		running := 0
		var others []string
		for _, pod := range s.Pods() {
			if pod.Status.Phase == corev1.PodRunning && podstatus.Ready(&pod) && pod.DeletionTimestamp == nil {
				running++
			} else {
				others = append(others, fmt.Sprintf("%s is %s: %s %v", pod.Name, pod.Status.Phase, pod.Status.Reason, pod.Status.ContainerStatuses))
			}
		}
		// The API server says what was before the reboot until kubelet says otherwise.
		after := slices.Sorted(slices.Values(s.migInstances()))
		if running != gpusANode+1 || !slices.Equal(before, after) {
			return fmt.Errorf("%d run, instances %v, before the reboot %v, and %s", running, after, before, strings.Join(others, "; "))
		}
		return nil
	})
	s.Logf("all pods ran %.1f s after the node was ready", time.Since(booted).Seconds())
	s.Ready()
	s.explained()
	s.NoDoubleOwners()
}
