// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/dropin"
	"github.com/tandem-gpu/tandem/test/oracle"
	"github.com/tandem-gpu/tandem/test/stories"
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

const (
	sharedByNumber  = "number"
	sharedByMemory  = "memory"
	sharedUnlimited = "unlimited"
	timeSliced      = "TimeSlicing, limit Advisory"
	byClaimsDaemon  = "MPS, limit Daemon"
)

// The manifests are those of kubernetes-sigs/dra-driver-nvidia-gpu (NVIDIA/k8s-dra-driver-gpu before), of NVIDIA's device plugin and of its
// documentation in the GPU Operator. docs/user/manifests.md lists those that are not served, and why. Each gets to the state that NVIDIA's
// test expects, on the machine and with the values of its story's group, and leaves nothing.

func TestPublishedManifests(t *testing.T) {
	publishedManifests(t, [][]published{{
		{manifests: []string{"gpu-test1", "gpu-2pods-2gpus", "two-pods-distinct-gpus"}, file: "gpu-test1", running: 2, sharers: []int{1, 1}},
		{manifests: []string{"gpu-test2", "gpu-1pod-2cnt-1gpu", "two-containers-shared-gpu"}, file: "examples/shared-claim", running: 1, sharers: []int{2}},
		{manifests: []string{"gpu-test3", "gpu-2pods-1gpu", "two-pods-shared-gpu"}, file: "examples/shared-claim-pods", running: 2, sharers: []int{2}, check: reserved("our-gpu", 2)},
		{manifests: []string{"gpu-test5"}, file: "examples/sharing-by-request", running: 1, sharers: []int{2, 2}, check: func(s *story) {
			s.Says(s.claimOf("sharing-by-request").Name, map[string]string{"ts-gpu": timeSliced, "mps-gpu": byClaimsDaemon})
		}},
		{manifests: []string{"gpu-test7"}, file: "gpu-test7", running: 1, sharers: []int{1, 1}},
	}, {
		{manifests: []string{"gpu-test-count"}, file: "gpu-test-count", running: 1, each: 2, sharers: []int{1, 1}},
		{manifests: []string{"gpu-test-mps"}, file: "gpu-test-mps", running: 1, sharers: []int{2}, check: mpsOf("mps-gpu", "mps-ctr0", "mps-ctr1")},
		{manifests: []string{"gpu-mps"}, file: "gpu-mps", running: 1, sharers: []int{2}, check: mpsOf("gpu", "ctr0", "ctr1")},
		{manifests: []string{"gpu-simple-full"}, file: "examples/claim-template", running: 1, sharers: []int{1}},
		{manifests: []string{"gpu-two-claims-one-pod"}, file: "gpu-two-claims-one-pod", running: 1, each: 2, sharers: []int{1, 1}},
		{manifests: []string{"gpu-cel-match"}, file: "gpu-cel-match", succeeded: 1},
		{manifests: []string{"gpu-cel-nomatch", "error-handling"}, file: "gpu-cel-nomatch", pending: 1, check: noSuchGPU},
	}, {
		// Of these only the first sets anything on a GPU.
		{manifests: []string{"gpu-timeslicing"}, file: "gpu-timeslicing", running: 1, sharers: []int{2}, check: func(s *story) {
			s.Says(s.claimOf("short-slices").Name, map[string]string{"gpu": timeSliced})
			s.gpusAre(setting{}, map[int]setting{s.GPUs("short-slices", "ctr0")[0]: {slice: 1}})
		}},
		{manifests: []string{"gpu-cuda-demo-suite", "gpu-cuda-busgrind"}, file: "gpu-cuda", succeeded: 1},
		{manifests: []string{"gpu-job-rct"}, file: "gpu-job-rct", succeeded: 2},
		{manifests: []string{"gpu-job-rct-parallel"}, file: "gpu-job-rct-parallel", running: 2, sharers: []int{1, 1}},
		{manifests: []string{"product-type"}, file: "product-type", running: 1, sharers: []int{1}},
		{manifests: []string{"driver-version"}, file: "driver-version", running: 1, sharers: []int{1}},
		{manifests: []string{"memory-size"}, file: "memory-size", running: 1, sharers: []int{1}},
	}, {
		{manifests: []string{"rc-shared-gpu", "pods-shared-gpu"}, file: "pods-shared-gpu", running: 12, sharers: []int{12}, check: reserved("our-gpu", 12)},
		{manifests: []string{"timeslicing"}, file: "timeslicing", running: 4, sharers: []int{4}, check: reserved("our-gpu", 4)},
		{manifests: []string{"prioritized-list-config"}, file: "prioritized-list-config", running: 2, each: 2, sharers: []int{2, 2}, check: func(s *story) {
			s.Says("two-or-one", map[string]string{"gpu/dual": timeSliced})
		}},
	}, {
		// By limits: a claim that gets the same GPU at the same moment waits for it.
		{manifests: []string{"gpu-pod"}, file: "gpu-pod", succeeded: 1},
		{manifests: []string{"job-1"}, file: "job-1", succeeded: 1},
	}})
}

func TestPublishedSharesByNumber(t *testing.T) {
	publishedManifests(t, oneByOne(
		published{manifests: []string{"integer-sharing"}, file: "integer-sharing", running: 4, check: func(s *story) {
			// Kubernetes' scheduler counts what a claim consumes twice for a moment, while it allocates (GatherAllocatedState of its plugin
			// DynamicResources). The third and fourth claim may then get another GPU.
			if got := fmt.Sprint(s.sharers(1)); !slices.Contains([]string{"[4]", "[3 1]", "[2 2]"}, got) {
				s.Errorf("devices are seen by %s containers, want four on one GPU or two", got)
			}
		}},
		published{manifests: []string{"gpu-consumable-shares-integer"}, file: "gpu-consumable-shares-integer", running: 2, sharers: []int{2}},
		published{manifests: []string{"gpu-consumable-shares-memory"}, file: "gpu-consumable-shares-memory", running: 2, sharers: []int{2}},
	))
}

func TestPublishedSharesByMemory(t *testing.T) {
	publishedManifests(t, oneByOne(
		published{manifests: []string{"memory-sharing"}, file: "memory-sharing", running: 2, sharers: []int{2}},
		published{manifests: []string{"consumable-shares-memory"}, file: "gpu-consumable-shares-memory", running: 2, sharers: []int{2}},
	))
}

func TestPublishedSharesUnlimited(t *testing.T) {
	publishedManifests(t, oneByOne(
		published{manifests: []string{"unlimited-sharing"}, file: "unlimited-sharing", running: 2, sharers: []int{2}},
		published{manifests: []string{"consumable-shares-unlimited"}, file: "consumable-shares-unlimited", running: 2, sharers: []int{2}},
	))
}

func TestPublishedReplicas(t *testing.T) {
	publishedManifests(t, [][]published{{
		{manifests: []string{"time-slicing-verification"}, file: "time-slicing-verification", running: 5},
		{manifests: []string{"gpu-pod of two replicas"}, file: "gpu-pod-shared", failed: 1, check: func(s *story) {
			if reason := s.Pod("gpu-pod").Status.Reason; reason != "UnexpectedAdmissionError" {
				s.Errorf("the pod failed with %s", reason)
			}
		}},
	}})
}

func TestPublishedPartitions(t *testing.T) {
	publishedManifests(t, oneByOne(
		published{manifests: []string{"gpu-test4"}, file: "gpu-test4", running: 4, sharers: slices.Repeat([]int{1}, 16), check: podsOnOneGPU},
		published{manifests: []string{"gpu-test6"}, file: "gpu-test6", running: 4, sharers: []int{1, 1, 1, 1}, check: func(s *story) {
			long := setting{slice: 3}
			s.gpusAre(setting{}, map[int]setting{0: long, 2: long, 4: long, 6: long})
		}},
		published{manifests: []string{"gpu-test-mig"}, file: "gpu-test-mig", running: 4, sharers: []int{1, 1, 1, 1}},
		published{manifests: []string{"gpu-anymig"}, file: "gpu-anymig", running: 1, sharers: []int{1}, check: partitionsOnly},
		published{manifests: []string{"mixed-strategy-example"}, file: "mixed-strategy-example", running: 1, sharers: []int{1}, check: partitionsOnly},
	))
}

func TestPublishedPartitionsOnDemand(t *testing.T) {
	publishedManifests(t, oneByOne(
		published{manifests: []string{"gpu-simple-mig"}, file: "gpu-simple-mig", running: 1, sharers: []int{1}, check: partitionsOnly},
		published{manifests: []string{"gpu-simple-mig of older releases"}, file: "gpu-simple-mig-profile", running: 1, sharers: []int{1}, check: partitionsOnly},
		published{manifests: []string{"gpu-simple-mig-ts"}, file: "gpu-simple-mig-ts", running: 1, sharers: []int{1}, check: partitionsOnly},
		published{manifests: []string{"gpu-multiple-mig"}, file: "gpu-multiple-mig", running: 1, sharers: []int{1, 1}, check: partitionsOnly},
		published{manifests: []string{"gpu-smallest-slice-mig"}, file: "gpu-smallest-slice-mig", running: 1, sharers: []int{1}, check: partitionsOnly},
		published{manifests: []string{"gpu-largest-slice-mig"}, file: "gpu-largest-slice-mig", running: 1, sharers: []int{1}, check: partitionsOnly},
		published{manifests: []string{"gpu-full"}, file: "gpu-full", succeeded: 1, check: claimMadeFor("gpu-full")},
		published{manifests: []string{"gpu-extres"}, file: "gpu-extres", running: 1, sharers: []int{1}, check: func(s *story) {
			claimMadeFor("gpu-extres")(s)
			claim := s.Claim(s.Pod("gpu-extres").Status.ExtendedResourceClaimStatus.ResourceClaimName)
			if claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "true" || claim.Status.Allocation.Devices.Results[0].Driver != install.DriverName {
				s.Errorf("the claim has annotations %v and is allocated %+v", claim.Annotations, claim.Status.Allocation)
			}
		}},
		published{
			manifests: []string{"mig-1g-12gb"}, file: "mig-1g-12gb", running: 1, sharers: []int{1},
			before: func(s *story) {
				// The scheduler has to know the newer class before it knows the pod.
				class, _, _ := strings.Cut(published{file: "mig-1g-12gb"}.text(s.T), "\n---\n")
				s.Manifest(class)
				sevenOnEach(s)
			},
			check: func(s *story) {
				claimMadeFor("mig-1g-12gb")(s)
				partitionsOnly(s)
			},
			after: func(s *story) {
				s.Kubectl("delete", "deviceclass", "1g-12gb.example.com", "--ignore-not-found")
				s.Uncut(0, 1)
			},
		},
	))
}

// oneByOne are batches of one manifest each.
func oneByOne(rows ...published) [][]published { return slices.Collect(slices.Chunk(rows, 1)) }

// publishedManifests plays batches one after the other: the manifests of one at the same time, each in a namespace of its own, because the
// machine has GPUs for all of them.
func publishedManifests(t *testing.T, batches [][]published) {
	s := begin(t)
	instances := s.migInstances()
	manifests, running := 0, 0
	for _, batch := range batches {
		var parts []*story
		for _, row := range batch {
			part := s.beside(filepath.Base(row.file))
			parts = append(parts, part)
			if row.after != nil {
				s.Cleanup(func() {
					if s.Failed() {
						part.Gone()
						row.after(s)
					}
				})
			}
			if row.before != nil {
				row.before(part)
			}
			part.Manifest(row.text(t))
		}
		for i, row := range batch {
			manifests += len(row.manifests)
			ok := t.Run(row.manifests[0], func(t *testing.T) {
				part := *parts[i]
				part.T = t
				part.becomes(row)
			})
			if ok {
				running += len(row.manifests)
			}
			t.Logf("%s: %t", strings.Join(row.manifests, ", "), ok)
		}
		s.NoDoubleOwners()
		for _, part := range parts {
			part.Clear()
		}
		for i, part := range parts {
			part.Gone()
			if after := batch[i].after; after != nil {
				after(part)
			}
		}
		s.Await(patient, "all to be free", func() error {
			if now := s.migInstances(); !slices.Equal(now, instances) {
				return fmt.Errorf("instances were %v, are %v", instances, now)
			}
			return s.Free()
		})
	}
	dropin.Report(t, "manifests=%d running=%d", manifests, running)
}

// sharedAs tells how the slices offer the GPUs of the node to several claims at once.
func (s *story) sharedAs() (string, error) {
	list, err := s.Slices(gpuNode)
	if err != nil {
		return "", err
	}
	for _, slice := range list {
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

// text is the manifest.
func (row published) text(t *testing.T) string {
	t.Helper()
	path := filepath.Join("testdata", "nvidia", row.file+".yaml")
	if strings.HasPrefix(row.file, "examples/") {
		path = filepath.Join("..", "..", row.file+".yaml")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// becomes waits until the pods of the manifest are as NVIDIA's test expects them, and looks at their devices.
func (s *story) becomes(row published) {
	s.Helper()
	s.Cleanup(func() {
		if s.Failed() {
			s.Explain()
		}
	})
	want := map[corev1.PodPhase]int{}
	for phase, n := range map[corev1.PodPhase]int{
		corev1.PodRunning: row.running, corev1.PodPending: row.pending, corev1.PodSucceeded: row.succeeded, corev1.PodFailed: row.failed,
	} {
		if n > 0 {
			want[phase] = n
		}
	}
	s.Await(patient, fmt.Sprintf("pods to be %v", want), func() error {
		now := map[corev1.PodPhase]int{}
		for _, pod := range s.Pods() {
			now[pod.Status.Phase]++
		}
		if now[corev1.PodFailed] > row.failed {
			return stories.Never(fmt.Errorf("they are %v", now))
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
}

// seers are the story's containers.
func (s *story) seers() (found []oracle.Container) {
	s.Helper()
	for _, container := range s.picture().Containers {
		if container.Namespace == s.Namespace && container.Name != "" {
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
	for _, pod := range s.Pods() {
		log, err := s.log(pod.Name)
		if err != nil {
			s.Fatal(err)
		}
		if listed := strings.Fields(log); len(listed) != 1 || !strings.HasPrefix(listed[0], "/dev/nvidia") {
			s.Errorf("%s has seen %v", pod.Name, listed)
		}
	}
}

// reserved checks that a claim is reserved for so many pods.
func reserved(claim string, pods int) func(*story) {
	return func(s *story) {
		s.Helper()
		if got := s.Claim(claim).Status.ReservedFor; len(got) != pods {
			s.Errorf("claim %s is reserved for %v, not for %d pods", claim, got, pods)
		}
	}
}

// mpsOf checks that two containers of the pod mps are clients of the claim's daemon.
func mpsOf(request string, containers ...string) func(*story) {
	return func(s *story) {
		s.Helper()
		claim := s.claimOf("mps")
		s.Says(claim.Name, map[string]string{request: byClaimsDaemon})
		s.daemonOf(claim)
		gpu := s.GPUs("mps", containers[0])[0]
		s.clients([]string{"mps"}, containers, halfOfThreads, limited(s.uuidsInOrder()[gpu], 10240))
	}
}

// noSuchGPU checks what the scheduler says, and that no claim is allocated.
func noSuchGPU(s *story) {
	s.Helper()
	if told := s.Unschedulable(1); !strings.Contains(told[0], "cannot allocate all claims") {
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
	if pods := s.Pods(); len(podOf) != len(pods) {
		s.Errorf("%d pods have partitions of %d GPUs", len(pods), len(podOf))
	}
}

// claimMadeFor checks that the scheduler has made a claim for the limits of a pod.
func claimMadeFor(pod string) func(*story) {
	return func(s *story) {
		s.Helper()
		status := s.Pod(pod).Status.ExtendedResourceClaimStatus
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
		s.Administer("-i", gpu, "-mig", "1")
		s.Administer("mig", "-i", gpu, "-cgi", strings.Join(slices.Repeat([]string{"1g.12gb"}, 7), ","), "-C")
	}
}
