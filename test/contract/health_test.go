// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/gpufaults"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// seenWithin and recoveredWithin are the goals for when a fault and its end are seen everywhere. The latter counts from the end of the fault.
// They fail no story, because other clusters run beside it; make bench measures.
const seenWithin, recoveredWithin = 2 * time.Second, 4 * time.Second

// place is a place where a user sees the health of GPUs.
type place struct {
	name string
	// shows returns nil if the place shows the GPUs as unhealthy, or as healthy.
	shows func(unhealthy bool) error
}

// TestFaultsAreSeen: each fault of a GPU that a claim has and of one that a limit has is seen wherever users look, and so is its end.
// An XID of an application changes nothing. What was measured is in the log.
func TestFaultsAreSeen(t *testing.T) {
	s := begin(t)
	machine := s.Machine()
	t.Cleanup(func() {
		if err := gpufaults.Clear(machine); err != nil {
			t.Error(err)
		}
	})
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim") + manifests.Pod("limit", "limit"))
	s.Running(soon, 2, 0)
	seen := s.Seen()
	gpus := []int{seen["claim"][0], seen["limit"][0]}
	s.Await(soon, "six GPUs to be allocatable to limits", func() error { return s.OfferedToPods(gpusANode - 1) })

	places := s.places(gpus)
	s.Await(soon, "the GPUs to be healthy everywhere", func() error { return everywhere(places, false) })
	for _, xid := range gpufaults.Applications {
		if err := gpufaults.RaiseXID(machine, xid, gpus...); err != nil {
			t.Fatal(err)
		}
	}
	for until := time.Now().Add(seenWithin); time.Now().Before(until); {
		if err := everywhere(places, false); err != nil {
			t.Fatalf("after XIDs of applications: %v", err)
		}
		time.Sleep(stories.SampleEvery)
	}

	samples := map[string][]time.Duration{}
	for _, fault := range gpufaults.All {
		began := time.Now()
		events := s.events()
		if err := fault.Raise(machine, gpus...); err != nil {
			t.Fatal(err)
		}
		all := append(slices.Clone(places), place{"event", func(bool) error { return s.reported(events, gpus) }})
		appeared := s.timed(fault.Name, all, true, began)
		began = time.Now()
		if err := gpufaults.Clear(machine); err != nil {
			t.Fatal(err)
		}
		recovered := s.timed(fault.Name, places, false, began)
		line := fmt.Sprintf("%-20s", fault.Name)
		for _, p := range all {
			samples[p.name] = append(samples[p.name], appeared[p.name])
			line += fmt.Sprintf("  %s %.2f s", p.name, appeared[p.name].Seconds())
		}
		var last time.Duration
		for _, took := range recovered {
			last = max(last, took)
		}
		samples["recovered"] = append(samples["recovered"], last)
		t.Logf("%s  recovered %.2f s", line, last.Seconds())
	}
	for name, took := range samples {
		slices.Sort(took)
		bound := seenWithin
		if name == "recovered" {
			bound = recoveredWithin
		}
		half, most := took[len(took)/2], took[len(took)-1]
		t.Logf("%-20s p50 %.2f s, p99 %.2f s of %d faults, goal %v", name, half.Seconds(), most.Seconds(), len(took), bound)
	}
	if now := s.Seen(); !slices.Equal(now["claim"], seen["claim"]) || !slices.Equal(now["limit"], seen["limit"]) {
		t.Errorf("the pods saw %v, now %v", seen, now)
	}
	for _, pod := range s.Pods() {
		if pod.Status.Phase != corev1.PodRunning || pod.Status.ContainerStatuses[0].RestartCount > 0 {
			t.Errorf("%s is %s after %d restarts", pod.Name, pod.Status.Phase, pod.Status.ContainerStatuses[0].RestartCount)
		}
	}
}

// timed returns how long after began each place shows the state.
func (s *story) timed(fault string, places []place, unhealthy bool, began time.Time) map[string]time.Duration {
	s.Helper()
	took := map[string]time.Duration{}
	s.Await(soon, fmt.Sprintf("fault %q to be seen everywhere: %v", fault, unhealthy), func() error {
		var missing error
		for _, p := range places {
			if took[p.name] != 0 {
				continue
			}
			if err := p.shows(unhealthy); err != nil {
				missing = errors.Join(missing, fmt.Errorf("%s: %w", p.name, err))
				continue
			}
			took[p.name] = time.Since(began)
		}
		return missing
	})
	return took
}

func everywhere(places []place, unhealthy bool) (err error) {
	for _, p := range places {
		if shown := p.shows(unhealthy); shown != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", p.name, shown))
		}
	}
	return err
}

// places are where users see the health of two GPUs, of which a claim has the first and a limit the second.
func (s *story) places(gpus []int) []place {
	s.Helper()
	differ := func(what string, got, want bool) error {
		if got != want {
			return fmt.Errorf("%s is unhealthy: %v", what, got)
		}
		return nil
	}
	places := []place{
		{"slice", func(unhealthy bool) (err error) {
			list, listErr := s.Slices(gpuNode)
			if listErr != nil {
				return listErr
			}
			for _, slice := range list {
				for _, d := range slice.Spec.Devices {
					if !slices.ContainsFunc(gpus, func(gpu int) bool { return d.Name == fmt.Sprintf("gpu-%d", gpu) }) {
						continue
					}
					tainted := false
					for _, taint := range d.Taints {
						tainted = tainted || taint.Key == "tandem-gpu.dev/unhealthy"
					}
					err = errors.Join(err, differ(d.Name, tainted, unhealthy))
				}
			}
			return err
		}},
		{"allocatable", func(unhealthy bool) error {
			want := int64(gpusANode - 1) // all but the claim's
			if unhealthy {
				want--
			}
			return s.OfferedToPods(want)
		}},
		{"GPUNode", func(unhealthy bool) (err error) {
			object, err := s.GPUNodeObject()
			if err != nil {
				return err
			}
			for _, d := range object.Status.Devices {
				if slices.ContainsFunc(gpus, func(gpu int) bool { return d.Name == fmt.Sprintf("gpu-%d", gpu) }) {
					err = errors.Join(err, differ(d.Name, d.UnhealthyReason != "", unhealthy))
				}
			}
			return err
		}},
		{"condition", func(unhealthy bool) error {
			node, err := theClient.CoreV1().Nodes().Get(s.Ctx, gpuNode, metav1.GetOptions{})
			if err != nil {
				return err
			}
			is := map[corev1.NodeConditionType]corev1.NodeCondition{}
			for _, c := range node.Status.Conditions {
				is[c.Type] = c
			}
			healthy, repair := is[controller.ConditionGPUsHealthy], is[controller.ConditionGPURepairNeeded]
			object, err := s.GPUNodeObject()
			if err != nil {
				return err
			}
			if want := controller.GPURepairNeeded(object.Status); repair.Status != want.Status || repair.Reason != want.Reason {
				return fmt.Errorf("the condition %s is %s, %s, want %s, %s", want.Type, repair.Status, repair.Reason, want.Status, want.Reason)
			}
			return differ(healthy.Message, healthy.Status == corev1.ConditionFalse, unhealthy)
		}},
		{"metric", func(unhealthy bool) (err error) {
			for _, gpu := range gpus {
				err = errors.Join(err, differ(fmt.Sprintf("gpu-%d", gpu), s.hasMetric(fmt.Sprintf(`tandem_unhealthy_device{device="gpu-%d"`, gpu)), unhealthy))
			}
			return err
		}},
	}
	if !s.CountersKept() { // kubelet reports health by default from 1.36 on, as it keeps counters
		return places
	}
	return append(places, place{"pod status", func(unhealthy bool) (err error) {
		for _, pod := range s.Pods() {
			var health []string
			for _, resource := range pod.Status.ContainerStatuses[0].AllocatedResourcesStatus {
				for _, r := range resource.Resources {
					health = append(health, string(r.Health))
				}
			}
			want := string(corev1.ResourceHealthStatusHealthy)
			if unhealthy {
				want = string(corev1.ResourceHealthStatusUnhealthy)
			}
			if !slices.Equal(health, []string{want}) {
				err = errors.Join(err, fmt.Errorf("%s: %v", pod.Name, health))
			}
		}
		return err
	}})
}

// events returns the versions of the events about the node.
func (s *story) events() map[string]string {
	s.Helper()
	versions := map[string]string{}
	list, err := theClient.CoreV1().Events(metav1.NamespaceDefault).List(s.Ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=Node"})
	if err != nil {
		s.Fatal(err)
	}
	for _, e := range list.Items {
		versions[e.Name] = e.ResourceVersion
	}
	return versions
}

// reported reports whether an event since before says of one of the GPUs that it is unhealthy. Similar events are combined, and name the
// last one.
func (s *story) reported(before map[string]string, gpus []int) error {
	list, err := theClient.CoreV1().Events(metav1.NamespaceDefault).List(s.Ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=Node"})
	if err != nil {
		return err
	}
	for _, e := range list.Items {
		for _, gpu := range gpus {
			if e.Reason == "GPUUnhealthy" && before[e.Name] != e.ResourceVersion && strings.Contains(e.Message, fmt.Sprintf("gpu-%d ", gpu)) {
				return nil
			}
		}
	}
	return errors.New("no event GPUUnhealthy")
}

// withoutRecoveryAction is a driver older than the recovery action: only a record of an XID says whether the XID has ended.
var withoutRecoveryAction = simulated.Condition{Fields: map[string]string{"230": "ERROR_NOT_SUPPORTED"}}

// TestRestartForgetsNoXID: an agent that is killed knows an XID afterwards, and does not count it again once an administrator has ended it.
func TestRestartForgetsNoXID(t *testing.T) {
	const gpu = 3
	s := begin(t)
	machine := s.Machine()
	t.Cleanup(func() { s.Breaks() })
	s.Breaks(simulated.GPUFaults{GPU: strconv.Itoa(gpu), Condition: withoutRecoveryAction})
	s.ReplaceAgent() // the next one knows this driver from its first scan on
	if err := simulated.RaiseXID(machine, simulated.Event{GPU: strconv.Itoa(gpu), XID: 48}); err != nil {
		t.Fatal(err)
	}
	unhealthy := func() error {
		return errors.Join(s.Withdrawn(gpu), s.OfferedToPods(gpusANode-1), s.unhealthyFor(map[string]string{fmt.Sprintf("gpu-%d", gpu): device.ReasonXID}))
	}
	s.Await(soon, "the GPU to be withdrawn", unhealthy)
	record := s.recordOfFaults()
	s.Event("Node", gpuNode, "GPUUnhealthy", fmt.Sprintf("gpu-%d ", gpu), "48", record)

	s.KillAgent()
	s.Ready()
	s.Await(soon, "the new agent to withdraw the GPU", unhealthy)
	s.Manifest(manifests.Deployment("others", gpusANode))
	s.Running(soon, gpusANode-1, 1)
	s.Unschedulable(1)
	for _, pod := range s.Pods() {
		if pod.Status.Phase == corev1.PodRunning && slices.Contains(s.GPUs(pod.Name, ""), gpu) {
			t.Errorf("%s got GPU %d, which has an XID", pod.Name, gpu)
		}
	}

	s.On(node(), "rm", record)
	s.Took("the last pod to run", func() { s.Running(soon, gpusANode, 0) })
	s.DeleteAll()
	s.AllFree()
	s.ReplaceAgent()
	s.AllFree()
	for until := time.Now().Add(seenWithin); time.Now().Before(until); {
		if err := errors.Join(s.OfferedToPods(gpusANode), s.OfferedToClaims(s.Offered)); err != nil {
			t.Fatalf("the XID that was ended is back: %v", err)
		}
		time.Sleep(stories.SampleEvery)
	}
}

// TestFaultOfAPartition stays in the partition: the other one of its GPU is given to new pods. A fault of the GPU reaches both.
func TestFaultOfAPartition(t *testing.T) {
	const last, resource = "7", "nvidia.com/mig-1g.10gb"
	s := begin(t)
	s.Installed("mig-limits.values.yaml")
	t.Cleanup(func() { s.Uncut(gpusANode - 1) })
	t.Cleanup(func() { s.DeleteAll() })
	t.Cleanup(func() { s.Breaks() })
	s.RetryAgent()
	s.Breaks(simulated.GPUFaults{GPU: last, Condition: withoutRecoveryAction})
	s.Administer("-i", last, "-mig", "1")
	s.Administer("mig", "-i", last, "-cgi", "1g.10gb,1g.10gb", "-C")
	s.Published("1g.10gb", "1g.10gb")
	s.Await(patient, "limits to see them", func() error { return s.Allocatable(resource, 2) })

	instances := s.InstanceIDs(last, "1g.10gb")
	instance, err := strconv.Atoi(instances[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := simulated.RaiseXID(s.Machine(), simulated.Event{GPU: last, XID: 94, GPUInstance: &instance}); err != nil {
		t.Fatal(err)
	}
	s.Await(soon, "one partition to be withdrawn", func() error { return s.Allocatable(resource, 1) })
	s.Published("1g.10gb")
	s.Shows("one partition as unhealthy", func(n gpunode.GPUNode) bool {
		unhealthy := slices.DeleteFunc(n.Status.Devices, func(d gpunode.DeviceStatus) bool { return d.UnhealthyReason == "" })
		return len(unhealthy) == 1 && strings.HasPrefix(unhealthy[0].UnhealthyReason, device.ReasonXID+":")
	})
	s.Manifest(manifests.PartitionTemplate("ones", "1g.10gb") + manifests.ClaimPod("healthy", "ones") + manifests.ClaimPod("waits", "ones"))
	s.Running(soon, 1, 1)
	s.DeleteAll()
	s.Await(soon, "the ledger to be empty", s.Empty)

	// The fault ends with the partition.
	s.Administer("mig", "-i", last, "-dci", "-gi", instances[0])
	s.Administer("mig", "-i", last, "-dgi", "-gi", instances[0])
	s.Await(soon, "the partition to be gone", func() error { return s.unhealthyFor(map[string]string{}) })
	s.Administer("mig", "-i", last, "-cgi", "1g.10gb", "-C")
	s.Published("1g.10gb", "1g.10gb")

	if err := simulated.RaiseXID(s.Machine(), simulated.Event{GPU: last, XID: 95}); err != nil {
		t.Fatal(err)
	}
	s.Await(soon, "both partitions to be withdrawn", func() error {
		return errors.Join(s.Allocatable(resource, 0), s.OfferedToPods(gpusANode-1), s.OfferedToClaims(gpusANode-1))
	})
	s.On(node(), "rm", s.recordOfFaults())
	s.Published("1g.10gb", "1g.10gb")
}

// TestFaultEndsByAReset: where the administrator wants it, a GPU with a fault is reset, but not while a pod has it.
func TestFaultEndsByAReset(t *testing.T) {
	for _, api := range []string{"claim", "limit"} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			s.Installed("health.values.yaml")
			s.RetryAgent()
			t.Cleanup(func() { s.Breaks() })
			s.Await(patient, "the GPUs to be offered", func() error {
				return errors.Join(s.OfferedToPods(gpusANode), s.OfferedToClaims(gpusANode))
			})
			s.Manifest(manifests.SingleTemplate + manifests.Pod(api, "holder"))
			s.Running(patient, 1, 0)
			gpu := s.GPUs("holder", "")[0]
			uuid := s.UUIDOf(gpu)
			before := s.Resets(uuid)
			s.Breaks(simulated.GPUFaults{GPU: strconv.Itoa(gpu), Condition: simulated.Condition{RecoveryAction: "reset", EndsWithReset: true}})
			s.Await(soon, "the GPU to be withdrawn", func() error {
				return errors.Join(s.Withdrawn(gpu), s.OfferedToPods(gpusANode-1))
			})
			s.Manifest(manifests.Pod(api, "other"))
			s.Running(soon, 2, 0)
			if now := s.Resets(uuid); now != before {
				t.Errorf("the GPU was reset although a pod has it")
			}
			s.Kubectl("delete", "pod", "-n", s.Namespace, "holder", "--timeout=60s")
			s.Event("Node", gpuNode, "GPUReset", fmt.Sprintf("gpu-%d", gpu))
			s.Kubectl("delete", "pod", "-n", s.Namespace, "other", "--timeout=60s")
			s.AllFree()
			if now := s.Resets(uuid); now != before+1 {
				t.Errorf("%d resets, not one", now-before)
			}
		})
	}
}

// TestMissingDeviceNode: the same for a GPU whose device node was removed.
func TestMissingDeviceNode(t *testing.T) {
	s := begin(t)
	missing := map[int]bool{}
	remove := func(gpus ...int) {
		for gpu := range gpusANode {
			path := fmt.Sprintf("%s/driver/dev/nvidia%d", stories.SimulatedMachine, gpu)
			switch wanted := slices.Contains(gpus, gpu); {
			case wanted && !missing[gpu]:
				s.On(node(), "rm", path)
			case !wanted && missing[gpu]:
				s.On(node(), "mknod", "-m", "666", path, "c", "195", strconv.Itoa(gpu))
			}
			missing[gpu] = slices.Contains(gpus, gpu)
		}
	}
	t.Cleanup(func() { remove() })
	s.broken(remove)
}

// TestLostGPU: a GPU falls off the bus, first a free one, then one in use. The other GPUs do not change, and it is back when the fault ends.
func TestLostGPU(t *testing.T) {
	s := begin(t)
	lose := func(gpus ...int) {
		var faults []simulated.GPUFaults
		for _, gpu := range gpus {
			faults = append(faults, simulated.GPUFaults{GPU: strconv.Itoa(gpu), Lost: true})
		}
		s.Breaks(faults...)
	}
	t.Cleanup(func() { lose() })
	s.broken(lose)
}

// broken plays the story of GPUs that are broken by a function that breaks exactly those it is given.
func (s *story) broken(breaks func(gpus ...int)) {
	s.Helper()
	before := s.Occupy()
	used := map[int]bool{}
	for _, gpus := range before {
		for _, gpu := range gpus {
			used[gpu] = true
		}
	}
	free := 0
	for used[free] {
		free++
	}
	inUse := before["claim-0"][0]
	s.Await(soon, "the node to offer what is free", func() error {
		return errors.Join(s.OfferedToPods(gpusANode-2), s.OfferedToClaims(gpusANode-2))
	})

	breaks(free, inUse)
	s.Await(soon, "the broken GPUs to be withdrawn, and no other", func() error {
		// Limits did not have the one that a claim holds.
		return errors.Join(s.OfferedToPods(gpusANode-3), s.Withdrawn(append(before["limit-0"], before["limit-1"][0], free, inUse)...))
	})
	if now := s.Seen(); !maps.EqualFunc(before, now, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", before, now)
	}
	s.Manifest(manifests.Pod("claim", "claim-late"))
	s.Running(soon, 5, 0)
	s.Manifest(manifests.Pod("limit", "limit-late"))
	s.Running(soon, 6, 0)
	for _, name := range []string{"claim-late", "limit-late"} {
		if got := s.GPUs(name, ""); len(got) != 1 || got[0] == free || used[got[0]] {
			s.Errorf("%s sees GPUs %v; %d is broken, %v are in use", name, got, free, slices.Sorted(maps.Keys(used)))
		}
	}

	breaks()
	s.Await(soon, "the GPU to be offered again", func() error {
		return errors.Join(s.OfferedToPods(gpusANode-3), s.OfferedToClaims(gpusANode-3))
	})
	s.Manifest(manifests.Pod("claim", "claim-last"))
	s.Running(soon, 7, 0)
	if got := s.GPUs("claim-last", ""); !slices.Equal(got, []int{free}) {
		s.Errorf("the GPU %d is whole again and the first that is free, but the claim got %v", free, got)
	}
	s.NoDoubleOwners()
	for _, pod := range s.Pods() {
		if restarts := pod.Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			s.Errorf("%s restarted %d times", pod.Name, restarts)
		}
	}
}

// TestSocketDeletedByHand: the device plugin is back soon, under another name.
func TestSocketDeletedByHand(t *testing.T) {
	s := begin(t)
	list := func() string {
		return s.On(node(), "sh", "-c", "ls /var/lib/kubelet/device-plugins | grep tandem || true")
	}
	before := list()
	s.On(node(), "sh", "-c", "rm /var/lib/kubelet/device-plugins/tandem-*.sock")
	s.Took("a new socket", func() {
		s.Await(15*time.Second, "a new socket", func() error {
			if now := list(); now == "" || now == before {
				return fmt.Errorf("sockets: %q, before: %q", now, before)
			}
			return nil
		})
	})
	s.Ready()
	s.Manifest(manifests.Pod("limit", "limit"))
	s.Running(soon, 1, 0)
}
