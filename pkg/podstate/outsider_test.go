// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

func TestPodOfProcess(t *testing.T) {
	const uid = "0a1b2c3d-0000-4000-8000-000000000001"
	for name, test := range map[string]struct{ cgroups, want string }{
		"cgroup v2, systemd": {
			"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_0000_4000_8000_000000000001.slice/cri-containerd-f00.scope\n", uid,
		},
		"seen from another pod's cgroup namespace": {
			"0::/../../../kubepods-pod0a1b2c3d_0000_4000_8000_000000000001.slice/cri-containerd-f00.scope\n", uid,
		},
		"cgroup v1, cgroupfs": {"12:pids:/kubepods/besteffort/pod" + uid + "/f00\n1:name=systemd:/kubepods/besteffort/pod" + uid + "/f00\n", uid},
		"a service":           {"0::/system.slice/sshd.service\n", ""},
		"a podman container":  {"0::/machine.slice/libpod-f00.scope\n", ""},
		"podman's monitor":    {"0::/machine.slice/podman-17.scope\n", ""},
		"a static pod":        {"0::/kubepods/besteffort/poda79c0f1e2f1d0c8b7a6958473625140f/f00\n", "a79c0f1e2f1d0c8b7a6958473625140f"},
		"the root":            {"0::/\n", ""},
		"nothing":             {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := podOfProcess([]byte(test.cgroups)); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestOutsider(t *testing.T) {
	const (
		gpu, other = "GPU-1", "GPU-2"
		podC       = "0a1b2c3d-1111-2222-3333-444455556669"
		podD       = "0a1b2c3d-1111-2222-3333-44445555666a"
		monitor    = "0a1b2c3d-1111-2222-3333-44445555666b"
		prepared   = "0a1b2c3d-1111-2222-3333-44445555666c"
	)
	f := known(t, newTree(t), pod(podA, "a", names("shared")), pod(podB, "b", phase(corev1.PodFailed)), pod(podC, "c", asks("1")), pod(podD, "d", asks("1")),
		pod(monitor, "dcgm", in("monitoring")), pod(prepared, "admin"))
	proc := t.TempDir()
	process := func(pid int, cgroups, command string) {
		dir := filepath.Join(proc, strconv.Itoa(pid))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for file, content := range map[string]string{"cgroup": cgroups, "stat": fmt.Sprintf("%d (%s) R 1", pid, command)} {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for pid, uid := range []string{"", podA, podB, static, "", podC, podD, monitor, prepared} {
		if uid != "" {
			process(pid, "0::/kubepods/pod"+uid+"/c\n", "python3")
		}
	}
	process(3, "0::/kubepods/pod"+static+"/c\n", "train\xff")
	process(4, "0::/user.slice/session-1.scope\n", "vectorAdd")
	holdOf := func(h ledger.Hold, gpu string) ledger.Hold { h.Device.GPU = gpu; return h }
	sharedClaim := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "shared-uid"}, Namespace: "apps", Name: "shared", Device: device.Ref{GPU: gpu}}
	stateOf := func(devices string) {
		inner := fmt.Sprintf(`{"ClaimInfoStateList":[{"DriverState":{"gpu.nvidia.com":{"Devices":[%s]}},"ClaimUID":"admin-uid","ClaimName":"all","Namespace":"apps","PodUIDs":{%q:{}}}]}`, devices, prepared)
		text := fmt.Sprintf(`{"Data":%q,"Checksum":%d}`, inner, crc32.ChecksumIEEE([]byte(inner)))
		must(t, os.WriteFile(ClaimStatePath(f.kubeletDir), []byte(text), 0o600))
	}
	const noHolder = "process %d (python3, state R) of pod %s, which does not hold the GPU"
	without := map[int]string{
		1: fmt.Sprintf(noHolder, 1, podA), 2: "process 2 (python3, state R) of pod " + podB + ", which has ended",
		3: "process 3 (train?, state R) of pod " + static + ", which has ended", 4: "process 4 (vectorAdd, state R)",
		5: fmt.Sprintf(noHolder, 5, podC), 6: fmt.Sprintf(noHolder, 6, podD), 7: fmt.Sprintf(noHolder, 7, monitor),
		8: fmt.Sprintf(noHolder, 8, prepared), 9: "",
	}
	const one = `{"PoolName":"p","DeviceName":"gpu-0"}`
	holdOfAdmin := ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "admin-uid"}, Device: device.Ref{GPU: other}}
	podNames := map[int]string{1: "apps/a", 5: "apps/c", 6: "apps/d", 7: "monitoring/dcgm", 8: "apps/admin"}
	for name, c := range map[string]struct {
		devices    string
		holds      []ledger.Hold
		namespaces []string
		may        []int
	}{
		"no holder":                     {},
		"by a claim":                    {holds: []ledger.Hold{sharedClaim}, may: []int{1}},
		"by a limit":                    {holds: []ledger.Hold{holdOf(limit(ledger.StateHeld, 0, podC), gpu)}, may: []int{5}},
		"another GPU":                   {holds: []ledger.Hold{holdOf(limit(ledger.StateHeld, 0, podC), other)}},
		"a pod not known yet, of two":   {holds: []ledger.Hold{holdOf(limit(ledger.StateHeld, 0), gpu), holdOf(limit(ledger.StateHeld, 0, podC), other)}, may: []int{6}},
		"a pod not known yet":           {holds: []ledger.Hold{holdOf(limit(ledger.StateHeld, 0), gpu)}, may: []int{5, 6}},
		"a monitor":                     {namespaces: []string{"kube-system", "monitoring"}, may: []int{7}},
		"admin access":                  {devices: one, may: []int{8}},
		"a claim that waits":            {},
		"a claim with devices and hold": {devices: one, holds: []ledger.Hold{holdOfAdmin}},
		"the same device twice":         {devices: one + "," + one, holds: []ledger.Hold{holdOfAdmin}},
		"a hold and admin access":       {devices: one + `,{"PoolName":"p","DeviceName":"gpu-1"}`, holds: []ledger.Hold{holdOfAdmin}, may: []int{8}},
		"a namespace without a name":    {namespaces: []string{""}},
	} {
		stateOf(c.devices)
		users := Users{Holds: c.holds, Driver: "gpu.nvidia.com", Namespaces: c.namespaces}
		var want []Outsider
		for _, pid := range slices.Sorted(maps.Keys(without)) {
			if without[pid] != "" && !slices.Contains(c.may, pid) {
				want = append(want, Outsider{without[pid], podNames[pid]})
			}
		}
		if got := f.Outsiders(proc, gpu, slices.Sorted(maps.Keys(without)), users); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if got := InPods(proc, []int{1, 2, 3, 4, 9}); !slices.Equal(got, []int{1, 2, 3}) {
		t.Errorf("processes %v are in pods, want 1, 2 and 3", got)
	}
	// Without kubelet's state it is not known who has admin access. The reason says so.
	must(t, os.WriteFile(ClaimStatePath(f.kubeletDir), []byte("nothing"), 0o600))
	const unless = ", which does not hold the GPU, unless it has admin access: read kubelet's claim state"
	got := f.Outsiders(proc, gpu, []int{7, 8}, Users{Driver: "gpu.nvidia.com", Namespaces: []string{"monitoring"}})
	if len(got) != 1 || !strings.Contains(got[0].Description, prepared+unless) {
		t.Errorf("without kubelet's state: %q", got)
	}
}
