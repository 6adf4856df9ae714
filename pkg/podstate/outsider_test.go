// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
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
	f := known(t, newTree(t), pod(podA, "a"), pod(podB, "b", phase(corev1.PodFailed)))
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
	process(1, "0::/kubepods/pod"+podA+"/c\n", "python3")
	process(2, "0::/kubepods/pod"+podB+"/c\n", "python3")
	process(3, "0::/kubepods/pod"+static+"/c\n", "train\xff")
	process(4, "0::/user.slice/session-1.scope\n", "vectorAdd")
	for pid, want := range map[int]string{
		1: "", 2: "process 2 (python3, state R) of pod " + podB + ", which has ended",
		3: "process 3 (train?, state R) of pod " + static + ", which has ended", 4: "process 4 (vectorAdd, state R)", 5: "",
	} {
		if got, outside := f.Outsider(proc, pid); got != want || outside != (want != "") {
			t.Errorf("process %d: %q, %t, want %q", pid, got, outside, want)
		}
	}
}
