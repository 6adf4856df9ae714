// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/dropin"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// published is a manifest that NVIDIA publishes, or several that differ in names and commands only, with the state that NVIDIA's own
// test expects. The equivalent is a file of testdata/nvidia or, with the prefix "examples/", an example.
type published struct {
	manifests []string
	file      string
	// How many pods run, are Pending, succeed and fail.
	running, pending, succeeded, failed int
	// each is how many devices each running container sees; zero means one.
	each int
	// sharers are the numbers of containers that see the same device, for each device; nil where any will do.
	sharers []int
	// before prepares the machine, check looks at what else the test expects, after undoes what before has done. Each may be nil.
	before, check, after func(*story)
}

// publishedOn are manifests that need the same machine and values.
type publishedOn struct {
	profile, example string
	values           []string
	// since136 says that the API server needs a feature that is on by default from Kubernetes 1.36 on.
	since136 bool
	// limits and devices are how many the node offers while all is free. Devices of dynamic GPUs are not counted here.
	limits  int64
	devices int
	// shared is how slices offer GPUs to several claims (sharedAs).
	shared string
	rows   []published
}

const (
	sharedByNumber  = "number"
	sharedByMemory  = "memory"
	sharedUnlimited = "unlimited"
	timeSliced      = "TimeSlicing, limit Advisory"
	byClaimsDaemon  = "MPS, limit Daemon"
)

// allPublished are the manifests of kubernetes-sigs/dra-driver-nvidia-gpu (NVIDIA/k8s-dra-driver-gpu before), of NVIDIA's device plugin
// and of its documentation in the GPU Operator. docs/user/manifests.md lists those that are not served, and why.
var allPublished = []publishedOn{
	{limits: gpusANode, devices: gpusANode, rows: []published{
		{manifests: []string{"gpu-test1", "gpu-2pods-2gpus", "two-pods-distinct-gpus"}, file: "gpu-test1", running: 2, sharers: []int{1, 1}},
		{manifests: []string{"gpu-test2", "gpu-1pod-2cnt-1gpu", "two-containers-shared-gpu"}, file: "examples/shared-claim", running: 1, sharers: []int{2}},
		{manifests: []string{"gpu-test3", "gpu-2pods-1gpu", "two-pods-shared-gpu"}, file: "examples/shared-claim-pods", running: 2, sharers: []int{2}, check: reserved("our-gpu", 2)},
		{manifests: []string{"gpu-test5"}, file: "examples/sharing-by-request", running: 1, sharers: []int{2, 2}, check: func(s *story) {
			s.says(s.claimOf("sharing-by-request").Name, map[string]string{"ts-gpu": timeSliced, "mps-gpu": byClaimsDaemon})
		}},
		{manifests: []string{"gpu-test7"}, file: "gpu-test7", running: 1, sharers: []int{1, 1}},
		{manifests: []string{"gpu-test-count"}, file: "gpu-test-count", running: 1, each: 2, sharers: []int{1, 1}},
		{manifests: []string{"gpu-test-mps"}, file: "gpu-test-mps", running: 1, sharers: []int{2}, check: mpsOf("mps-gpu", "mps-ctr0", "mps-ctr1")},
		{manifests: []string{"gpu-mps"}, file: "gpu-mps", running: 1, sharers: []int{2}, check: mpsOf("gpu", "ctr0", "ctr1")},
		{manifests: []string{"gpu-timeslicing"}, file: "gpu-timeslicing", running: 1, sharers: []int{2}, check: func(s *story) {
			s.says(s.claimOf("short-slices").Name, map[string]string{"gpu": timeSliced})
			s.gpusAre(setting{}, map[int]setting{s.gpus("short-slices", "ctr0")[0]: {slice: 1}})
		}},
		{manifests: []string{"gpu-simple-full"}, file: "examples/claim-template", running: 1, sharers: []int{1}},
		{manifests: []string{"gpu-two-claims-one-pod"}, file: "gpu-two-claims-one-pod", running: 1, each: 2, sharers: []int{1, 1}},
		{manifests: []string{"gpu-cel-match"}, file: "gpu-cel-match", succeeded: 1},
		{manifests: []string{"gpu-cel-nomatch", "error-handling"}, file: "gpu-cel-nomatch", pending: 1, check: noSuchGPU},
		{manifests: []string{"gpu-cuda-demo-suite", "gpu-cuda-busgrind"}, file: "gpu-cuda", succeeded: 1},
		{manifests: []string{"gpu-job-rct"}, file: "gpu-job-rct", succeeded: 2},
		{manifests: []string{"gpu-job-rct-parallel"}, file: "gpu-job-rct-parallel", running: 2, sharers: []int{1, 1}},
		{manifests: []string{"rc-shared-gpu", "pods-shared-gpu"}, file: "pods-shared-gpu", running: 12, sharers: []int{12}, check: reserved("our-gpu", 12)},
		{manifests: []string{"product-type"}, file: "product-type", running: 1, sharers: []int{1}},
		{manifests: []string{"driver-version"}, file: "driver-version", running: 1, sharers: []int{1}},
		{manifests: []string{"memory-size"}, file: "memory-size", running: 1, sharers: []int{1}},
		{manifests: []string{"timeslicing"}, file: "timeslicing", running: 4, sharers: []int{4}, check: reserved("our-gpu", 4)},
		{manifests: []string{"prioritized-list-config"}, file: "prioritized-list-config", running: 2, each: 2, sharers: []int{2, 2}, check: func(s *story) {
			s.says("two-or-one", map[string]string{"gpu/dual": timeSliced})
		}},
		{manifests: []string{"gpu-pod"}, file: "gpu-pod", succeeded: 1},
		{manifests: []string{"job-1"}, file: "job-1", succeeded: 1},
	}},
	{
		// NVIDIA's tests install with a number of shares for the manifests that ask for memory, too.
		values: []string{"consumableShares=4"}, since136: true, limits: gpusANode, devices: gpusANode, shared: sharedByNumber, rows: []published{
			{manifests: []string{"integer-sharing"}, file: "integer-sharing", running: 4, sharers: []int{4}},
			{manifests: []string{"gpu-consumable-shares-integer"}, file: "gpu-consumable-shares-integer", running: 2, sharers: []int{2}},
			{manifests: []string{"gpu-consumable-shares-memory"}, file: "gpu-consumable-shares-memory", running: 2, sharers: []int{2}},
		},
	},
	{
		values: []string{"consumableShares=memory"}, since136: true, limits: gpusANode, devices: gpusANode, shared: sharedByMemory, rows: []published{
			{manifests: []string{"memory-sharing"}, file: "memory-sharing", running: 2, sharers: []int{2}},
			{manifests: []string{"consumable-shares-memory"}, file: "gpu-consumable-shares-memory", running: 2, sharers: []int{2}},
		},
	},
	{
		values: []string{"consumableShares=unlimited"}, since136: true, limits: gpusANode, devices: gpusANode, shared: sharedUnlimited, rows: []published{
			{manifests: []string{"unlimited-sharing"}, file: "unlimited-sharing", running: 2, sharers: []int{2}},
			{manifests: []string{"consumable-shares-unlimited"}, file: "consumable-shares-unlimited", running: 2, sharers: []int{2}},
		},
	},
	{
		values: []string{
			"config.version=v1", "config.sharing.timeSlicing.failRequestsGreaterThanOne=true",
			"config.sharing.timeSlicing.resources[0].name=nvidia.com/gpu", "config.sharing.timeSlicing.resources[0].replicas=10",
		},
		limits: 10 * gpusANode, devices: gpusANode, rows: []published{
			{manifests: []string{"time-slicing-verification"}, file: "time-slicing-verification", running: 5},
			{manifests: []string{"gpu-pod of two replicas"}, file: "gpu-pod-shared", failed: 1, check: func(s *story) {
				if reason := s.pod("gpu-pod").Status.Reason; reason != "UnexpectedAdmissionError" {
					s.Errorf("the pod failed with %s", reason)
				}
			}},
		},
	},
	{
		// Four whole GPUs, and four with four partitions each.
		profile: "a100x8-40gb-mig", example: "mig-limits.values.yaml", limits: 4, devices: 4 + 4*4, rows: []published{
			{manifests: []string{"gpu-test4"}, file: "gpu-test4", running: 4, sharers: slices.Repeat([]int{1}, 16), check: podsOnOneGPU},
			{manifests: []string{"gpu-test6"}, file: "gpu-test6", running: 4, sharers: []int{1, 1, 1, 1}, check: func(s *story) {
				long := setting{slice: 3}
				s.gpusAre(setting{}, map[int]setting{0: long, 2: long, 4: long, 6: long})
			}},
			{manifests: []string{"gpu-test-mig"}, file: "gpu-test-mig", running: 4, sharers: []int{1, 1, 1, 1}},
			{manifests: []string{"gpu-anymig"}, file: "gpu-anymig", running: 1, sharers: []int{1}, check: partitionsOnly},
			{manifests: []string{"mixed-strategy-example"}, file: "mixed-strategy-example", running: 1, sharers: []int{1}, check: partitionsOnly},
		},
	},
	{
		profile: "gh200x2", example: "claims-only.values.yaml",
		values:   []string{"config.tandem.devices[0].match.model=NVIDIA GH200 480GB", "config.tandem.devices[0].mig=dynamic"},
		since136: true, rows: []published{
			{manifests: []string{"gpu-simple-mig"}, file: "gpu-simple-mig", running: 1, sharers: []int{1}, check: partitionsOnly},
			{manifests: []string{"gpu-simple-mig of older releases"}, file: "gpu-simple-mig-profile", running: 1, sharers: []int{1}, check: partitionsOnly},
			{manifests: []string{"gpu-simple-mig-ts"}, file: "gpu-simple-mig-ts", running: 1, sharers: []int{1}, check: partitionsOnly},
			{manifests: []string{"gpu-multiple-mig"}, file: "gpu-multiple-mig", running: 1, sharers: []int{1, 1}, check: partitionsOnly},
			{manifests: []string{"gpu-smallest-slice-mig"}, file: "gpu-smallest-slice-mig", running: 1, sharers: []int{1}, check: partitionsOnly},
			{manifests: []string{"gpu-largest-slice-mig"}, file: "gpu-largest-slice-mig", running: 1, sharers: []int{1}, check: partitionsOnly},
			{manifests: []string{"gpu-full"}, file: "gpu-full", succeeded: 1, check: claimMadeFor("gpu-full")},
			{manifests: []string{"gpu-extres"}, file: "gpu-extres", running: 1, sharers: []int{1}, check: func(s *story) {
				claimMadeFor("gpu-extres")(s)
				claim := s.claim(s.pod("gpu-extres").Status.ExtendedResourceClaimStatus.ResourceClaimName)
				if claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "true" || claim.Status.Allocation.Devices.Results[0].Driver != install.DriverName {
					s.Errorf("the claim has annotations %v and is allocated %+v", claim.Annotations, claim.Status.Allocation)
				}
			}},
			{
				manifests: []string{"mig-1g-12gb"}, file: "mig-1g-12gb", running: 1, sharers: []int{1},
				before: sevenOnEach,
				check: func(s *story) {
					claimMadeFor("mig-1g-12gb")(s)
					partitionsOnly(s)
				},
				after: func(s *story) { s.uncut(0, 1) },
			},
		},
	},
}

// TestPublishedManifests: each manifest that NVIDIA publishes and that needs neither VFIO, IMEX nor a ComputeDomain gets to the state that
// NVIDIA's test expects, on the machine and with the values that it needs, and leaves nothing.
func TestPublishedManifests(t *testing.T) {
	s := begin(t)
	s.undo(func() error {
		return install.Tandem(context.WithoutCancel(s.ctx), theCluster, install.Options{Values: installValues})
	})
	manifests, running := 0, 0
	for i, on := range allPublished {
		if on.since136 && !s.extendedResources() {
			t.Logf("not served before Kubernetes 1.36: %d rows", len(on.rows))
			continue
		}
		// The first machine is the one that every story begins with.
		if i > 0 {
			s.becomes(on)
		}
		free := s.allOf(on)
		for _, row := range on.rows {
			manifests += len(row.manifests)
			ok := t.Run(row.manifests[0], func(t *testing.T) {
				part := *s
				part.T = t
				part.play(row, free)
			})
			if ok {
				running += len(row.manifests)
			}
			t.Logf("%s: %t", strings.Join(row.manifests, ", "), ok)
		}
	}
	dropin.Report(t, "manifests=%d running=%d", manifests, running)
}

// becomes installs with other values on another machine. The end of the story undoes that.
func (s *story) becomes(on publishedOn) {
	s.Helper()
	o := install.Options{Profile: on.profile, Detached: true, Values: append(slices.Clone(on.values), installValues...)}
	if on.example != "" {
		o.ValuesFiles = []string{filepath.Join("..", "..", "examples", on.example)}
	}
	if err := install.Tandem(s.ctx, theCluster, o); err != nil {
		s.Fatal(err)
	}
	s.rolledOut()
	s.retryAgent()
}

// allOf waits until the machine's devices are offered. It returns a function that reports whether all are free again.
func (s *story) allOf(on publishedOn) (free func() error) {
	s.Helper()
	instances := s.migInstances()
	free = func() error {
		var err error
		if now := s.migInstances(); !slices.Equal(now, instances) {
			err = fmt.Errorf("instances were %v, are %v", instances, now)
		}
		return errors.Join(err, s.offeredToPods(on.limits), s.offeredToClaims(on.devices), s.empty(), s.nothingShared())
	}
	if on.devices == 0 {
		s.await(patient, "a pool for each GPU", func() error {
			if pools := s.poolsOfGPUs(); len(pools) != len(s.uuidsInOrder()) {
				return fmt.Errorf("%v", pools)
			}
			return nil
		})
		var err error
		if on.devices, err = s.claimable(); err != nil {
			s.Fatal(err)
		}
	}
	s.await(patient, "the devices of the machine", func() error {
		shared, err := s.sharedAs()
		if err == nil && shared != on.shared {
			err = fmt.Errorf("claims share GPUs by %q, not by %q", shared, on.shared)
		}
		return errors.Join(err, free())
	})
	return free
}

// sharedAs tells how the slices offer the GPUs of the node to several claims at once.
func (s *story) sharedAs() (string, error) {
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
	if err != nil {
		return "", err
	}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			policy := d.Capacity["memory"].RequestPolicy
			switch {
			case d.AllowMultipleAllocations == nil || !*d.AllowMultipleAllocations:
				continue
			case d.Capacity["shares"].RequestPolicy != nil:
				return sharedByNumber, nil
			case policy != nil && policy.Default != nil && policy.Default.IsZero():
				return sharedUnlimited, nil
			}
			return sharedByMemory, nil
		}
	}
	return "", nil
}

// play applies the manifest, and deletes it at the end.
func (s *story) play(row published, free func() error) {
	path := filepath.Join("testdata", "nvidia", row.file+".yaml")
	if strings.HasPrefix(row.file, "examples/") {
		path = filepath.Join("..", "..", row.file+".yaml")
	}
	s.Cleanup(func() {
		if s.Failed() {
			s.explain()
		}
		s.kubectl("delete", "-n", s.namespace, "-f", path, "--now", "--ignore-not-found")
		s.noPods()
		if row.after != nil {
			row.after(s)
		}
		s.await(patient, "all to be free", free)
	})
	if row.before != nil {
		row.before(s)
	}
	s.kubectl("apply", "-n", s.namespace, "-f", path)
	want := map[corev1.PodPhase]int{}
	for phase, n := range map[corev1.PodPhase]int{
		corev1.PodRunning: row.running, corev1.PodPending: row.pending, corev1.PodSucceeded: row.succeeded, corev1.PodFailed: row.failed,
	} {
		if n > 0 {
			want[phase] = n
		}
	}
	s.await(patient, fmt.Sprintf("pods to be %v", want), func() error {
		now := map[corev1.PodPhase]int{}
		for _, pod := range s.pods() {
			now[pod.Status.Phase]++
		}
		if fmt.Sprint(now) != fmt.Sprint(want) {
			return fmt.Errorf("they are %v", now)
		}
		return nil
	})
	if row.running > 0 {
		if got := s.sharers(max(1, row.each)); row.sharers != nil && !slices.Equal(got, row.sharers) {
			s.Errorf("devices are seen by %v containers, want %v", got, row.sharers)
		}
	}
	if row.succeeded > 0 {
		s.sawAGPU()
	}
	if row.check != nil {
		row.check(s)
	}
	s.noDoubleOwners()
}

// seers are the story's containers.
func (s *story) seers() (found []oracle.Container) {
	s.Helper()
	for _, container := range s.picture().Containers {
		if container.Namespace == s.namespace && container.Name != "" {
			found = append(found, container)
		}
	}
	return found
}

// sharers counts the containers that see the same device, for each device, the largest number first. Each container must see so many.
func (s *story) sharers(each int) []int {
	s.Helper()
	containers := map[string]int{}
	for _, container := range s.seers() {
		if len(container.Devices) != each {
			s.Errorf("%s of %s sees %+v, not %d devices", container.Name, container.Title(), container.Devices, each)
		}
		for _, d := range container.Devices {
			containers[cmp.Or(d.Partition.UUID, d.GPU.UUID)]++
		}
	}
	var counts []int
	for _, n := range containers {
		counts = append(counts, n)
	}
	slices.SortFunc(counts, func(a, b int) int { return cmp.Compare(b, a) })
	return counts
}

// sawAGPU checks that each pod that has ended has listed one GPU.
func (s *story) sawAGPU() {
	s.Helper()
	for _, pod := range s.pods() {
		if listed := strings.Fields(s.kubectl("logs", "-n", s.namespace, pod.Name)); len(listed) != 1 || !strings.HasPrefix(listed[0], "/dev/nvidia") {
			s.Errorf("%s has seen %v", pod.Name, listed)
		}
	}
}

// reserved checks that a claim is reserved for so many pods.
func reserved(claim string, pods int) func(*story) {
	return func(s *story) {
		s.Helper()
		if got := s.claim(claim).Status.ReservedFor; len(got) != pods {
			s.Errorf("claim %s is reserved for %v, not for %d pods", claim, got, pods)
		}
	}
}

// mpsOf checks that two containers of the pod mps are clients of the claim's daemon.
func mpsOf(request string, containers ...string) func(*story) {
	return func(s *story) {
		s.Helper()
		claim := s.claimOf("mps")
		s.says(claim.Name, map[string]string{request: byClaimsDaemon})
		s.daemonOf(claim)
		gpu := s.gpus("mps", containers[0])[0]
		s.clients([]string{"mps"}, containers, halfOfThreads, limited(s.uuidsInOrder()[gpu], 10240))
	}
}

// noSuchGPU checks what the scheduler says, and that no claim is allocated.
func noSuchGPU(s *story) {
	s.Helper()
	if told := s.unschedulable(1); !strings.Contains(told[0], "cannot allocate all claims") {
		s.Errorf("the pod that waits is told %q", told[0])
	}
	for _, claim := range s.claims() {
		if claim.Status.Allocation != nil {
			s.Errorf("claim %s is allocated %+v", claim.Name, claim.Status.Allocation)
		}
	}
}

// partitionsOnly checks that no container sees a whole GPU.
func partitionsOnly(s *story) {
	s.Helper()
	for _, container := range s.seers() {
		if slices.ContainsFunc(container.Devices, oracle.Device.Whole) {
			s.Errorf("%s sees a whole GPU: %+v", container.Title(), container.Devices)
		}
	}
}

// podsOnOneGPU checks that the partitions of each pod are on one GPU, another one for each pod.
func podsOnOneGPU(s *story) {
	s.Helper()
	partitionsOnly(s)
	podOf := map[string]string{}
	for _, container := range s.seers() {
		for _, d := range container.Devices {
			if other := cmp.Or(podOf[d.GPU.UUID], container.Pod); other != container.Pod {
				s.Errorf("%s and %s have partitions of %s", container.Pod, other, d.GPU.UUID)
			}
			podOf[d.GPU.UUID] = container.Pod
		}
	}
	if pods := s.pods(); len(podOf) != len(pods) {
		s.Errorf("%d pods have partitions of %d GPUs", len(pods), len(podOf))
	}
}

// claimMadeFor checks that the scheduler has made a claim for the limits of a pod.
func claimMadeFor(pod string) func(*story) {
	return func(s *story) {
		s.Helper()
		status := s.pod(pod).Status.ExtendedResourceClaimStatus
		if status == nil {
			s.Fatalf("%s has no claim for its limits", pod)
		}
		if len(status.RequestMappings) != 1 || status.RequestMappings[0].ResourceName != install.ResourceName {
			s.Errorf("the claim of %s is for %+v", pod, status.RequestMappings)
		}
	}
}

// sevenOnEach has an administrator create seven partitions on each of two GPUs.
func sevenOnEach(s *story) {
	s.Helper()
	for _, gpu := range []string{"0", "1"} {
		s.administer("-i", gpu, "-mig", "1")
		s.administer("mig", "-i", gpu, "-cgi", strings.Join(slices.Repeat([]string{"1g.12gb"}, 7), ","), "-C")
	}
}
