// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"cmp"
	"encoding/json"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// kubelets are the directories of testdata: files as the checkpoint code of these versions of kubelet wrote them.
func kubelets(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob("testdata/kubelet-*")
	must(t, err)
	if len(dirs) < 4 {
		t.Fatalf("got %v, want files of four kubelets", dirs)
	}
	return dirs
}

// kubeletDir lays out the two files as kubelet does.
func kubeletDir(t *testing.T, checkpoint, claims []byte) string {
	t.Helper()
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "device-plugins"), 0o755))
	if checkpoint != nil {
		must(t, os.WriteFile(DeviceCheckpointPath(dir), checkpoint, 0o600))
	}
	if claims != nil {
		must(t, os.WriteFile(filepath.Join(dir, "dra_manager_state"), claims, 0o600))
	}
	return dir
}

func read0(t *testing.T, path ...string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(path...))
	must(t, err)
	return data
}

func TestFilesOfKubelets(t *testing.T) {
	for _, version := range kubelets(t) {
		t.Run(filepath.Base(version), func(t *testing.T) {
			dir := kubeletDir(t, read0(t, version, "kubelet_internal_checkpoint"), read0(t, version, "dra_manager_state"))
			written := time.Now().Add(-time.Hour)
			must(t, os.Chtimes(DeviceCheckpointPath(dir), written, written))
			checkpoint, err := ReadDeviceCheckpoint(dir)
			must(t, err)
			if !checkpoint.Written.Equal(written) {
				t.Errorf("written at %s, want %s", checkpoint.Written, written)
			}
			slices.SortFunc(checkpoint.Devices, func(a, b PodDevice) int { return cmp.Compare(a.ID, b.ID) })
			const pod = "11111111-1111-1111-1111-111111111111"
			if want := []PodDevice{
				{PodUID: pod, Container: "main", Resource: "nvidia.com/gpu", ID: "GPU-a"},
				{PodUID: pod, Container: "main", Resource: "nvidia.com/gpu", ID: "GPU-b"},
				{PodUID: pod, Container: "side", Resource: "example.com/nic", ID: "nic-1"},
			}; !reflect.DeepEqual(checkpoint.Devices, want) {
				t.Errorf("devices are %+v, want %+v", checkpoint.Devices, want)
			}
			if want := map[string][]string{"nvidia.com/gpu": {"GPU-a", "GPU-b", "GPU-c"}, "example.com/nic": {}}; !reflect.DeepEqual(checkpoint.Registered, want) {
				t.Errorf("registered is %v, want %v", checkpoint.Registered, want)
			}
			claims, err := ReadClaimState(dir, "gpu.nvidia.com")
			must(t, err)
			if want := []KubeletClaim{
				{UID: "c1", Namespace: "apps", Name: "one", PodUIDs: []string{"p1", "p2"}, Devices: []PoolDevice{{"node-1", "gpu-0"}, {"node-1", "gpu-3"}}, CDIDevices: []string{"k8s.gpu.nvidia.com/gpu=GPU-a"}},
				{UID: "c3", Namespace: "apps", Name: "unprepared"},
			}; !reflect.DeepEqual(claims, want) {
				t.Errorf("claims are %+v, want %+v", claims, want)
			}
		})
	}
}

func TestNoKubeletFiles(t *testing.T) {
	for _, dir := range []string{t.TempDir(), filepath.Join(t.TempDir(), "absent")} {
		checkpoint, err := ReadDeviceCheckpoint(dir)
		if err != nil || !checkpoint.Written.IsZero() || checkpoint.Devices != nil {
			t.Errorf("got %+v, %v", checkpoint, err)
		}
		if claims, err := ReadClaimState(dir, "gpu.nvidia.com"); err != nil || claims != nil {
			t.Errorf("got %+v, %v", claims, err)
		}
	}
}

// Every byte that a claim state loses or changes must be noticed, or change nothing that is read.
func TestDamagedClaimState(t *testing.T) {
	whole := read0(t, kubelets(t)[0], "dra_manager_state")
	want, err := ReadClaimState(kubeletDir(t, nil, whole), "gpu.nvidia.com")
	if err != nil || len(want) == 0 {
		t.Fatal(want, err)
	}
	dir := kubeletDir(t, nil, whole)
	path := filepath.Join(dir, "dra_manager_state")
	check := func(what string, i int, data []byte) {
		must(t, os.WriteFile(path, data, 0o600))
		if got, err := ReadClaimState(dir, "gpu.nvidia.com"); err == nil && !reflect.DeepEqual(got, want) {
			t.Fatalf("%s at byte %d: got %+v", what, i, got)
		}
	}
	for i := range whole {
		check("cut", i, whole[:i])
		flipped := slices.Clone(whole)
		flipped[i] ^= 0x04
		check("flipped", i, flipped)
	}
	for _, cut := range []int{0, 1, len(whole) / 2, len(whole) - 1} {
		must(t, os.WriteFile(path, whole[:cut], 0o600))
		if _, err := ReadClaimState(dir, "gpu.nvidia.com"); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("cut at %d: error is %v, want one that names the file", cut, err)
		}
	}
}

func TestDamagedDeviceCheckpoint(t *testing.T) {
	whole := read0(t, kubelets(t)[0], "kubelet_internal_checkpoint")
	for _, data := range [][]byte{{}, whole[:1], whole[:len(whole)/2], whole[:len(whole)-1], []byte("[]")} {
		dir := kubeletDir(t, data, nil)
		if got, err := ReadDeviceCheckpoint(dir); err == nil || !strings.Contains(err.Error(), "device checkpoint") {
			t.Errorf("of %q: got %+v, %v", data, got, err)
		}
	}
}

func TestFieldsOfALaterKubelet(t *testing.T) {
	inner := `{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v2","Later":{},"ClaimInfoStateList":[` +
		`{"ClaimUID":"c1","ClaimName":"one","Namespace":"apps","PodUIDs":{"p1":{}},"New":[1],` +
		`"DriverState":{"gpu.nvidia.com":{"New":1,"Devices":[{"PoolName":"node-1","DeviceName":"gpu-0","New":true}]}}}]}`
	state, err := json.Marshal(map[string]any{"Data": inner, "Checksum": crc32.ChecksumIEEE([]byte(inner)), "New": 1})
	must(t, err)
	checkpoint := `{"New":1,"Data":{"New":1,"PodDeviceEntries":[{"PodUID":"p1","ContainerName":"c","ResourceName":"nvidia.com/gpu",` +
		`"DeviceIDs":{"-1":["GPU-a"]},"New":1}],"RegisteredDevices":null},"Checksum":18446744073709551615}`
	dir := kubeletDir(t, []byte(checkpoint), state)
	claims, err := ReadClaimState(dir, "gpu.nvidia.com")
	if err != nil || len(claims) != 1 || len(claims[0].Devices) != 1 {
		t.Errorf("claims are %+v, %v", claims, err)
	}
	devices, err := ReadDeviceCheckpoint(dir)
	if err != nil || len(devices.Devices) != 1 || devices.Devices[0].ID != "GPU-a" {
		t.Errorf("devices are %+v, %v", devices, err)
	}
}
