// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/smi"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// onesAGPU is how many 1g.10gb an H100 has room for.
const onesAGPU = 7

// machine is the directory of the node's simulated machine, from outside.
func (s *story) machine() string {
	s.Helper()
	root, err := node().Root()
	if err != nil {
		s.Fatal(err)
	}
	return filepath.Join(root, simulatedMachine)
}

// smi does what an administrator does with nvidia-smi.
func (s *story) smi(args ...string) (string, error) {
	s.Helper()
	var out bytes.Buffer
	if err := smi.At(s.machine(), args, &out); err != nil {
		return "", fmt.Errorf("smi %s: %w", strings.Join(args, " "), err)
	}
	return out.String(), nil
}

// migInstances are the GPU instances that the machine has, as "GPU profile@start".
func (s *story) migInstances() []string {
	s.Helper()
	data, err := os.ReadFile(filepath.Join(s.machine(), simulated.MIGDir, simulated.MIGStateFile))
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
	s.installed("mig-dynamic.values.yaml")
	s.retryAgent()
	s.await(patient, "a pool for each GPU", func() error {
		if pools := s.poolsOfGPUs(); len(pools) != gpusANode {
			return fmt.Errorf("%v", pools)
		}
		return s.offeredToPods(gpusANode)
	})
}

// countersKept reports whether the API server keeps the counters of partitionable devices, as it does by default from 1.36 on.
func (s *story) countersKept() bool {
	s.Helper()
	return s.extendedResources()
}

// retryAgent has kubelet bring a changed configuration now, not within a minute or two.
func (s *story) retryAgent() {
	s.Helper()
	s.kubectl("annotate", "pod", "-n", install.Namespace, s.agentPod(gpuNode).Name, "--overwrite", fmt.Sprintf("look=%d", time.Now().UnixNano()))
}

func (s *story) noPartitions() error {
	if found := s.migInstances(); len(found) > 0 {
		return fmt.Errorf("%d instances: %v", len(found), found)
	}
	return s.empty()
}

// poolsOfGPUs are the complete pools of GPUs of the node with the number of their devices.
func (s *story) poolsOfGPUs() map[string]int {
	s.Helper()
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
	if err != nil {
		s.Fatal(err)
	}
	devices, missing := map[string]int{}, map[string]int64{}
	for _, slice := range list.Items {
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
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
	if err != nil {
		s.Fatal(err)
	}
	counters := map[string]int64{}
	for _, slice := range list.Items {
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
			if container.Namespace == s.namespace && !device.Whole() {
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
	if !s.countersKept() {
		t.Skip(droppedCounters)
	}
	counters := s.counters()
	t.Cleanup(func() {
		s.breaks()
		if t.Failed() {
			t.Logf("instances: %v\ncounters: %v", s.migInstances(), s.counters())
		}
		began := time.Now()
		s.deleteAll()
		s.backTo(counters)
		t.Logf("pods and partitions gone, and counters back, after %.1f s", time.Since(began).Seconds())
	})
	return s
}

// TestPartitionPolicyEnds while a claim has a partition, without a restart: the partition stays, no other one is offered, and its GPU is
// whole when the claim ends.
func TestPartitionPolicyEnds(t *testing.T) {
	s := onDemand(t)
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("one", "ones"))
	s.running(soon, 1, 0)
	agents, before := s.agentRestarts(), s.partitions()
	s.configure("{version: v1}")
	s.retryAgent()
	s.await(patient, "seven GPUs to be offered whole", func() error {
		if pools := s.poolsOfGPUs(); len(pools) != 1 {
			return fmt.Errorf("pools of GPUs: %v", pools)
		}
		return s.offeredToPods(gpusANode - 1)
	})
	s.manifest(manifests.ClaimPod("late", "ones"))
	s.unschedulable(1)
	if now := s.partitions(); !slices.Equal(now["one"], before["one"]) || s.agentRestarts() != agents {
		t.Errorf("the pod could use %v, now %v; the agent restarted %d times", before, now, s.agentRestarts()-agents)
	}
	s.remove("one", "late")
	s.await(soon, "the partition to be gone", s.noPartitions)
}

// backTo waits until no partition is left and the counters have their first values.
func (s *story) backTo(counters map[string]int64) {
	s.Helper()
	s.await(patient, "partitions gone and counters back", func() error {
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
	if s := (&story{T: t}); !s.countersKept() {
		s = begin(t)
		s.event("Node", gpuNode, "NoPartitionsOnDemand", "shared counters", "1.36")
		s.served("Dual", gpusANode, gpusANode)
		return
	}
	s := onDemand(t)
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("one", "ones"))
	s.running(soon, 1, 0)
	s.wantHolds(1, 0)
	if found := s.migInstances(); len(found) != 1 {
		s.Fatalf("instances: %v", found)
	}
	used := s.partitions()["one"]
	if len(used) != 1 || !strings.HasPrefix(used[0], "gpu0/") {
		s.Errorf("the pod can use %v", used)
	}
	nodes := strings.Fields(s.kubectl("exec", "-n", s.namespace, "one", "--", "sh", "-c", "ls -d /dev/nvidia[0-9]* /dev/nvidia-caps/*"))
	if len(nodes) != 3 {
		s.Errorf("the pod sees %v, not one GPU and two rights", nodes)
	}
	s.explained()
	s.noDoubleOwners()
	s.remove("one")
	s.await(soon, "the partition to be gone", s.noPartitions)
}

// TestPartitionsOfExamples: a pod for each profile, two partitions of one GPU, and the half of a GPU where none is free.
func TestPartitionsOfExamples(t *testing.T) {
	s := onDemand(t)
	s.example("mig-profiles.yaml")
	s.example("mig-same-gpu.yaml")
	s.running(patient, 8, 0)
	used := s.partitions()
	for _, pod := range s.pods() {
		if want := map[bool]int{true: 2, false: 1}[pod.Name == "mig-same-gpu"]; len(used[pod.Name]) != want {
			s.Errorf("%s can use %v", pod.Name, used[pod.Name])
		}
	}
	if pair := used["mig-same-gpu"]; len(pair) == 2 && pair[0][:4] != pair[1][:4] {
		s.Errorf("the partitions %v are not of one GPU", pair)
	}
	// Of the other GPUs all but one are taken by limits, and of that one the half that leaves a 3g.
	whole := gpusANode - len(s.gpusInUse()) - 1
	s.manifest(manifests.Deployment("limits", whole))
	s.running(patient, 8+whole, 0)
	s.manifest(manifests.PartitionTemplate("four", "4g.40gb") + manifests.ClaimPod("four", "four"))
	s.running(soon, 9+whole, 0)
	s.example("mig-first-available.yaml")
	s.running(soon, 10+whole, 0)
	if got := s.partitions()["mig-first-available"]; len(got) != 1 {
		s.Errorf("mig-first-available can use %v", got)
	}
	s.explained()
	s.noDoubleOwners()
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
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb"))
	began := time.Now()
	s.manifest(manifests.ClaimDeployment("ones", "ones", all+1))
	s.running(patient, 1+all, 1)
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
	s.noDoubleOwners()
	if told := s.unschedulable(1); !strings.Contains(told[0], "cannot allocate all claims") {
		s.Errorf("the pod that waits is told %q", told[0])
	}
}

// unschedulable waits until so many pods, and no others, wait for the scheduler, and answers what they are told.
func (s *story) unschedulable(n int) (told []string) {
	s.Helper()
	s.await(soon, "the scheduler to say why", func() error {
		told = nil
		for _, pod := range s.pods() {
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
					told = append(told, c.Message)
				}
			}
		}
		if len(told) != n {
			return fmt.Errorf("%d pods are unschedulable", len(told))
		}
		return nil
	})
	return told
}

// profiles are all that an H100 of 80 GB has.
var profiles = []string{"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"}

// TestMixOfPartitions asks for more of every profile than there is room for, beside whole GPUs by limits. Whatever is given back is
// used again, and the scheduler never chooses what the hardware refuses.
func TestMixOfPartitions(t *testing.T) {
	const whole, first, each = 2, 1, 4
	s := onDemand(t)
	refusals := s.refusedPrepares()
	s.manifest(manifests.Deployment("limits", whole))
	s.running(soon, whole, 0)
	deploymentOf := map[string]string{}
	// The largest first: so there is room for some of each.
	for _, profile := range slices.Backward(profiles) {
		name := "p-" + strings.NewReplacer(".", "-", "+", "-").Replace(profile)
		deploymentOf[profile] = name
		s.manifest(manifests.PartitionTemplate(name, profile) + manifests.ClaimDeployment(name, name, first))
	}
	s.running(patient, whole+first*len(profiles), 0)
	s.kubectl("scale", "deployment", "-n", s.namespace, "--all", fmt.Sprintf("--replicas=%d", each))
	s.saturated(deploymentOf)
	for _, profile := range profiles {
		for _, pod := range s.pods() {
			if strings.HasPrefix(pod.Name, deploymentOf[profile]+"-") && pod.Labels["app"] == deploymentOf[profile] && pod.Status.Phase == corev1.PodRunning {
				s.remove(pod.Name)
				break
			}
		}
		s.saturated(deploymentOf)
	}
	s.kubectl("scale", "deployment", "-n", s.namespace, "limits", "--replicas=1")
	s.saturated(deploymentOf)
	s.Logf("limits pods that came too late: %v", s.failed())
	// A claim in conflict with a pod is refused once: its next pod is placed elsewhere. No claim gets a partition that the
	// hardware refuses.
	if refused := s.refusedPrepares() - refusals; refused > 2*each {
		s.Errorf("%v Prepares were refused", refused)
	}
	if events := s.kubectl("get", "events", "-n", s.namespace, "--field-selector=reason=PartitionNotMade", "-o", "name"); events != "" {
		s.Errorf("the scheduler chose what the hardware refuses: %s", events)
	}
}

// saturated waits until every pod runs or is unschedulable, and no partition of a profile that a pod waits for would fit.
func (s *story) saturated(deploymentOf map[string]string) {
	s.Helper()
	began := time.Now()
	running := 0
	s.await(patient, "the node to be full", func() error {
		running = 0
		waits := map[string]bool{}
		for _, pod := range s.pods() {
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
	s.noDoubleOwners()
	s.Logf("full with %d pods and %d instances after %.1f s", running, len(s.migInstances()), time.Since(began).Seconds())
}

// room asks the hardware how many partitions of each profile fit now. A whole GPU without a holder is an error.
func (s *story) room() (map[string]int, error) {
	s.Helper()
	listed, err := s.smi("mig", "-lgip")
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
			if container.Namespace == s.namespace && device.Whole() {
				whole[device.Number.Minor] = true
			}
		}
	}
	if used := len(whole) + len(s.gpusInUse()); used != gpusANode {
		return nil, fmt.Errorf("%d of %d GPUs are used", used, gpusANode)
	}
	return free, nil
}

// refusedPrepares counts the Prepares that the agent of the node has answered with an error.
func (s *story) refusedPrepares() float64 {
	s.Helper()
	return s.metric(`tandem_prepare_duration_seconds_count{result="error"}`)
}

// metricsText is what the agent of the node serves.
func (s *story) metricsText() string {
	s.Helper()
	text, err := theClient.Discovery().RESTClient().Get().
		AbsPath("/api/v1/namespaces", install.Namespace, "pods", s.agentPod(gpuNode).Name+":8080", "proxy/metrics").DoRaw(s.ctx)
	if err != nil {
		s.Fatal(err)
	}
	return string(text)
}

// metric of the agent of the node; zero where it has none.
func (s *story) metric(name string) float64 {
	s.Helper()
	for line := range strings.Lines(s.metricsText()) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			number, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				s.Fatalf("metric %s: %v", name, err)
			}
			return number
		}
	}
	return 0
}

// TestWholeOrParts: a GPU is either a limit's or partitioned, and becomes the other when it is free.
func TestWholeOrParts(t *testing.T) {
	s := onDemand(t)
	s.manifest(manifests.Deployment("limits", gpusANode))
	s.running(soon, gpusANode, 0)
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("one", "ones"))
	s.unschedulable(1)
	s.kubectl("scale", "deployment", "-n", s.namespace, "limits", fmt.Sprintf("--replicas=%d", gpusANode-1))
	s.running(patient, gpusANode, 0)
	if len(s.partitions()["one"]) != 1 {
		s.Errorf("the pod can use %v", s.partitions()["one"])
	}
	s.noDoubleOwners()
	s.await(soon, "its GPU to leave the limits", func() error { return s.offeredToPods(gpusANode - 1) })
	s.kubectl("scale", "deployment", "-n", s.namespace, "limits", fmt.Sprintf("--replicas=%d", gpusANode))
	s.unschedulable(1)
	s.remove("one")
	s.running(patient, gpusANode, 0)
	s.noDoubleOwners()
	if found := s.migInstances(); len(found) > 0 {
		s.Errorf("instances: %v", found)
	}
}

// breaks puts faults of calls and clients into force on every GPU, in place of those before.
func (s *story) breaks(faults ...simulated.GPUFaults) {
	s.Helper()
	if err := simulated.WriteFaults(s.machine(), simulated.Faults{GPUs: faults}); err != nil {
		s.Error(err)
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
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.PartitionTemplate("threes", "3g.40gb"))
	s.breaks(failing(furnish, simulated.CallFault{Return: "ERROR_UNKNOWN"})...)
	s.manifest(manifests.ClaimPod("refused", "ones"))
	s.await(soon, "the claim's owner to be told", func() error {
		events := s.kubectl("get", "events", "-n", s.namespace, "--field-selector=reason=PartitionNotMade")
		if !strings.Contains(events, "cannot be created") {
			return fmt.Errorf("events: %s", events)
		}
		return nil
	})
	s.await(soon, "what was half made to be gone", s.noPartitions)
	s.breaks()
	s.running(patient, 1, 0)

	// Killed between GPU instance and compute instance.
	s.breaks(failing(furnish, simulated.CallFault{Delay: simulated.Duration(time.Minute)})...)
	s.manifest(manifests.ClaimPod("interrupted", "threes"))
	s.await(soon, "a GPU instance", s.instances(2))
	s.killAgent()
	s.breaks()
	s.ready()
	s.running(patient, 2, 0)
	s.await(soon, "nothing to be left over", s.instances(2))
	s.explained()

	// Killed after the compute instance has gone, before the GPU instance has.
	s.breaks(failing(destroy, simulated.CallFault{Delay: simulated.Duration(time.Minute)})...)
	s.remove("interrupted", "refused")
	s.await(soon, "a GPU instance to be empty", func() error {
		listed, err := s.smi("mig", "-lci")
		if err == nil && strings.Count(listed, "\n") == 2 {
			err = errors.New("all are furnished")
		}
		return err
	})
	s.killAgent()
	s.breaks()
	s.ready()
	s.await(soon, "all to be gone", s.noPartitions)
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
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("busy", "ones"))
	s.running(soon, 1, 0)
	claim := s.claims()[0]
	place := strings.Split(s.migInstances()[0], "@")[1] + "+1"
	s.breaks(simulated.GPUFaults{GPU: "0", Clients: []simulated.Client{{PID: 4242, Partition: place}}})
	s.remove("busy")
	s.event("ResourceClaim", claim.Name, "PartitionInUse", "partition 1g.10gb of gpu-0", "process 4242", s.namespace+"/busy")
	// The scheduler may choose the place before it hears that it is not free yet: that pod is moved.
	s.manifest(manifests.ClaimDeployment("others", "ones", onesAGPU))
	s.running(patient, onesAGPU, 0)
	s.noDoubleOwners()
	s.kubectl("scale", "deployment", "-n", s.namespace, "others", "--replicas=0")
	s.await(soon, "only the busy one to be left", s.instances(1))
	s.breaks()
	s.await(soon, "it to be gone", s.noPartitions)
}

// TestPartitionsRebooted: a reboot takes all partitions. The claims are the same, and theirs are made again in the same places.
func TestPartitionsRebooted(t *testing.T) {
	s := onDemand(t)
	s.manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.PartitionTemplate("threes", "3g.40gb"))
	s.manifest(manifests.ClaimPod("one", "ones") + manifests.ClaimPod("three", "threes"))
	s.running(soon, 2, 0)
	before := slices.Sorted(slices.Values(s.migInstances()))
	s.manifest(manifests.Deployment("limits", gpusANode-1))
	s.running(soon, gpusANode+1, 0)
	if err := node().Reboot(s.ctx); err != nil {
		s.Fatal(err)
	}
	booted := time.Now()
	s.await(patient, "all pods to run again", func() error {
		running := 0
		for _, pod := range s.pods() {
			if pod.Status.Phase == corev1.PodRunning && podstatus.Ready(&pod) && pod.DeletionTimestamp == nil {
				running++
			}
		}
		// The API server says what was before the reboot until kubelet says otherwise.
		after := slices.Sorted(slices.Values(s.migInstances()))
		if running != gpusANode+1 || !slices.Equal(before, after) {
			return fmt.Errorf("%d run, instances %v, before the reboot %v", running, after, before)
		}
		return nil
	})
	s.Logf("all pods ran %.1f s after the node was ready", time.Since(booted).Seconds())
	s.ready()
	s.explained()
	s.noDoubleOwners()
}
