// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestProcesses(t *testing.T) {
	proc := t.TempDir()
	for pid, p := range map[string]struct{ cgroup, stat string }{
		"1":  {"0::/init.scope", "1 (systemd) S 0"},
		"30": {"12:pids:/kubepods/burstable/pod" + podA + "/abc\n1:name=systemd:/\n", "30 (sh) S 1"},
		"20": {"0::/../../kubepods-burstable-pod11111111_1111_1111_1111_111111111111.slice/cri-x.scope", "20 (py) D 1"},
		"40": {"0::/kubepods.slice/kubepods-pod" + "11111111_1111_1111_1111_111111111111" + ".slice/cri-x.scope", "40 (a\n) D (b) D 1"},
		// It calls a cgroup of its own like another pod's.
		"50":   {"0::/kubepods/burstable/pod" + podB + "/pod" + podA, "50 (evil) D 1"},
		"60":   {"0::/kubepods/burstable/pod" + podA, "nothing"},
		"self": {"0::/kubepods/burstable/pod" + podA, "30 (sh) S 1"},
	} {
		must(t, os.Mkdir(filepath.Join(proc, pid), 0o755))
		must(t, os.WriteFile(filepath.Join(proc, pid, "cgroup"), []byte(p.cgroup), 0o600))
		must(t, os.WriteFile(filepath.Join(proc, pid, "stat"), []byte(p.stat), 0o600))
	}
	must(t, os.Mkdir(filepath.Join(proc, "70"), 0o755)) // it has just ended
	for uid, want := range map[string]string{
		podA:                                   "[process 30 (sh, state S)]",
		podB:                                   "[process 50 (evil, state D)]",
		"11111111-1111-1111-1111-111111111111": "[process 20 (py, state D) process 40 (a?) D (b, state D)]",
		"without-processes":                    "[]",
	} {
		got, err := Processes(proc, uid)
		if err != nil || fmt.Sprint(got) != want {
			t.Errorf("processes of %s: %v, %v, want %s", uid, got, err, want)
		}
	}
	if _, err := Processes(filepath.Join(proc, "absent"), podA); err == nil {
		t.Error("no error without proc")
	}
}

// A process whose files cannot be read for another reason than its end, such as EMFILE, counts as one that uses the GPU.
func TestUnreadableProcess(t *testing.T) {
	proc := t.TempDir()
	write := func(pid, name, text string) {
		must(t, os.MkdirAll(filepath.Join(proc, pid), 0o755))
		if text == "" {
			must(t, os.Mkdir(filepath.Join(proc, pid, name), 0o755)) // EISDIR
			return
		}
		must(t, os.WriteFile(filepath.Join(proc, pid, name), []byte(text), 0o600))
	}
	write("1", "cgroup", "")
	write("1", "stat", "1 (python3) R 1")
	write("2", "cgroup", "0::/user.slice\n")
	write("2", "stat", "")
	write("3", "cgroup", "0::/user.slice\n") // it ends meanwhile
	p := &Pods{kubeletDir: t.TempDir()}
	var described []string
	for _, o := range p.Outsiders(proc, "GPU-0", []int{1, 2, 3, 4}, Users{}) {
		described = append(described, o.Description)
	}
	if len(described) != 2 || !strings.Contains(described[0], "process 1, whose pod is not known: ") || described[1] != "process 2" {
		t.Errorf("outsiders are %q", described)
	}
	if got := InPods(proc, []int{1, 2, 4}); !slices.Equal(got, []int{1}) {
		t.Errorf("in pods are %v", got)
	}
}
