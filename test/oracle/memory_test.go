// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// glimpse of pods that see one device each, in processes that live as long as the test does.
func glimpse(t *testing.T, minors map[string]uint32) Glimpse {
	t.Helper()
	started, err := startTime("/proc/self")
	if err != nil {
		t.Fatal(err)
	}
	var g Glimpse
	for _, pod := range slices.Sorted(maps.Keys(minors)) {
		g.sightings = append(g.sightings, sighting{
			node: node, pid: os.Getpid(), started: started, pod: pod, container: id(pod),
			devices: []Device{{Number: Number{nvidiaMajor, minors[pod]}}},
		})
	}
	return g
}

func theOnly(t *testing.T, g Glimpse) Suspicion {
	t.Helper()
	found := g.Suspicions()
	if len(found) != 1 {
		t.Fatalf("suspicions: %v", found)
	}
	return found[0]
}

func TestSuspicionsNeedTwoLiveProcesses(t *testing.T) {
	g := glimpse(t, map[string]uint32{"a": 1, "b": 1, "c": 2})
	if key := theOnly(t, g).Key(); !strings.Contains(key, id("a")) || !strings.Contains(key, id("b")) {
		t.Errorf("suspects %s", key)
	}
	g.sightings[1].started += "0"
	if found := g.Suspicions(); len(found) > 0 {
		t.Errorf("one of the two has ended: %v", found)
	}
	same := glimpse(t, map[string]uint32{"a": 1})
	same.sightings = append(same.sightings, same.sightings[0])
	if found := same.Suspicions(); len(found) > 0 {
		t.Errorf("two containers of one pod: %v", found)
	}
}

// TestMemoryOutlivesObjects: pods that shared a claim are one owner, also when the claim has moved on and they are gone; pods
// that did not are two.
func TestMemoryOutlivesObjects(t *testing.T) {
	w := (&world{}).pod("a", claim("shared")).pod("b", claim("shared")).pod("l", limits(1))
	m := NewMemory()
	for i := range w.pods {
		m.Pod(&w.pods[i])
	}
	shared := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "shared", Namespace: "ns", UID: "u"}}
	for _, device := range []string{"gpu-1", "gpu-2"} {
		now := shared.DeepCopy()
		now.Status.Allocation = &resourceapi.AllocationResult{}
		now.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{{Driver: driverName, Pool: node, Device: device}}
		m.Claim(now)
	}
	m.Claim(shared)
	if double, judgement := m.Judge(theOnly(t, glimpse(t, map[string]uint32{"a": 1, "b": 1}))); judgement != Innocent {
		t.Errorf("they share it: %s", double)
	}
	if _, judgement := m.Judge(theOnly(t, glimpse(t, map[string]uint32{"a": 1, "l": 1}))); judgement != Guilty {
		t.Error("a claim and limits are two owners")
	}
	if _, judgement := m.Judge(theOnly(t, glimpse(t, map[string]uint32{"a": 1, "unknown": 1}))); judgement != Guilty {
		t.Error("an unknown pod is an owner of its own")
	}
	unseen := (&world{}).pod("u", claim("unseen"))
	m.Pod(&unseen.pods[0])
	if _, judgement := m.Judge(theOnly(t, glimpse(t, map[string]uint32{"a": 1, "u": 1}))); judgement != Undecided {
		t.Errorf("the claim of one was not seen: %s", judgement)
	}
	three := glimpse(t, map[string]uint32{"a": 1, "l": 1, "u": 1})
	for _, seen := range three.sightings {
		seen.devices[0].GPU.Replicas = 2
	}
	if _, judgement := m.Judge(theOnly(t, three)); judgement != Guilty {
		t.Errorf("two others are guilty without it: %s", judgement)
	}
	m.Forget("ns")
	if _, judgement := m.Judge(theOnly(t, glimpse(t, map[string]uint32{"a": 1, "b": 1}))); judgement != Guilty {
		t.Error("what was forgotten is known no more")
	}
}

func TestContainersBelow(t *testing.T) {
	const uid = "0f5ef1a5-1111-4222-8333-944444444444"
	for _, top := range []string{"sys/fs/cgroup", "sys/fs/cgroup/pids"} {
		root := t.TempDir()
		container := filepath.Join(root, top, "kubepods/besteffort/pod"+uid, id("c"))
		for _, dir := range []string{container, filepath.Join(container, "nested")} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("12\n13\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		found, err := containersBelow(root)
		if err != nil || len(found) != 1 || found[0].pod != uid || found[0].id != id("c") {
			t.Fatalf("found %+v: %v", found, err)
		}
		if pids, err := processesBelow(found[0].path); err != nil || !slices.Equal(pids, []int{12, 13, 12, 13}) {
			t.Errorf("processes %v: %v", pids, err)
		}
	}
}

func TestReadingWhatKubeletGranted(t *testing.T) {
	got := granted(&podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{
		{Namespace: "ns", Name: "limits", Containers: []*podresources.ContainerResources{{Devices: []*podresources.ContainerDevices{
			{ResourceName: resourceName, DeviceIds: []string{"GPU-5"}}, {ResourceName: "nvidia.com/mig-1g.10gb", DeviceIds: []string{"MIG-1"}},
			{ResourceName: "nvidia.com/gpu.shared", DeviceIds: []string{"GPU-6::1"}}, {ResourceName: "else", DeviceIds: []string{"GPU-5"}},
		}}}},
		{Namespace: "ns", Name: "claim", Containers: []*podresources.ContainerResources{{DynamicResources: []*podresources.DynamicResource{{
			ClaimResources: []*podresources.ClaimResource{{DriverName: driverName, DeviceName: "gpu-3"}, {DriverName: "else", DeviceName: "gpu-4"}},
		}}}}},
	}})
	if !slices.Equal(got["ns/limits"], []string{"GPU-5", "GPU-6::1", "MIG-1"}) || !slices.Equal(got["ns/claim"], []string{"gpu-3"}) {
		t.Errorf("granted %v", got)
	}
}

func TestSuspectsThePartOfAGPU(t *testing.T) {
	g := glimpse(t, map[string]uint32{"a": 1, "b": 1})
	whole, part := Device{Number: Number{nvidiaMajor, 1}}, Device{Number: Number{235, 7}, Partition: Partition{Instance: "gi0/ci0", GPU: Number{nvidiaMajor, 1}}}
	beside := Device{Number: Number{235, 8}, Partition: Partition{Instance: "gi1/ci0", GPU: Number{nvidiaMajor, 1}}}
	for _, pair := range [][2]Device{{whole, part}, {part, whole}} {
		g.sightings[0].devices, g.sightings[1].devices = pair[:1], pair[1:]
		suspicion := theOnly(t, g)
		if _, judgement := NewMemory().Judge(suspicion); judgement != Guilty {
			t.Errorf("suspicion %s is judged %s", suspicion, judgement)
		}
	}
	g.sightings[0].devices, g.sightings[1].devices = []Device{beside}, []Device{part}
	if found := g.Suspicions(); len(found) > 0 {
		t.Errorf("two partitions of a GPU: %v", found)
	}
}

// TestRecorded: kubelet's checkpoint names devices of GPUs, by their pods. A node without one has given nothing.
func TestRecorded(t *testing.T) {
	root := t.TempDir()
	if pods, err := Recorded(root); err != nil || len(pods) > 0 {
		t.Error(pods, err)
	}
	path := filepath.Join(root, deviceCheckpoint)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	const text = `{"Data":{"PodDeviceEntries":[
		{"PodUID":"a","ContainerName":"init","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["nvidia3"]},"AllocResp":"eA=="},
		{"PodUID":"a","ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["nvidia3","nvidia1"]},"AllocResp":"eA=="},
		{"PodUID":"b","ContainerName":"main","ResourceName":"example.com/other","DeviceIDs":{"0":["x"]},"AllocResp":"eA=="}
	],"RegisteredDevices":{"nvidia.com/gpu":["nvidia3"]}},"Checksum":1}`
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if pods, err := Recorded(root); err != nil || fmt.Sprint(pods) != "map[a:[nvidia1 nvidia3]]" {
		t.Error(pods, err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Recorded(root); err == nil {
		t.Error("half a file, without an error")
	}
}

func TestForeignID(t *testing.T) {
	for id, want := range map[string]int{
		"nvidia0": 0, "nvidia12": 12, "slot-7": 7, "gpu-3": -1, "GPU-00000000-0000-0000-0000-000000000001": -1,
		"GPU-00000000-0000-0000-0000-000000000001::2": -1, "nvidia": -1, "": -1, "gpu-3-mig-1g10gb-19-4": -1,
	} {
		minor, is := ForeignID(id)
		if is != (want >= 0) || is && minor != want {
			t.Errorf("%q: %d %t", id, minor, is)
		}
	}
	whole := Device{Number: Number{Major: 195, Minor: 3}}
	if !whole.Is("nvidia3") || !whole.Is("slot-3") || whole.Is("nvidia4") {
		t.Error("a GPU is not what a foreign plugin calls it")
	}
}
