// SPDX-License-Identifier: Apache-2.0

package stacks

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// writes passes on what is written.
type writes chan string

func (w writes) Write(p []byte) (int, error) {
	w <- string(p)
	return len(p), nil
}

// Each signal writes all stacks in one piece.
func TestOnSignal(t *testing.T) {
	out := make(writes, 1)
	stop := OnSignal(out)
	defer stop()
	proc := procOf(t, os.Getpid(), "/usr/bin/kubelet-plugin\x00--v=1\x00")
	for range 2 {
		if err := request(proc, os.Getpid(), "kubelet-plugin"); err != nil {
			t.Fatal(err)
		}
		select {
		case text := <-out:
			for _, want := range []string{"Stacks of all goroutines", "stacks.TestOnSignal(", "stacks.write(", "End of the stacks\n"} {
				if !strings.Contains(text, want) {
					t.Errorf("%q is missing in\n%s", want, text)
				}
			}
		case <-time.After(time.Minute):
			t.Fatal("nothing was written")
		}
	}
}

// Another program gets no signal, which may end it: on a node, process 1 is the init.
func TestRequestOfAnotherProgram(t *testing.T) {
	for name, line := range map[string]string{"another": "/sbin/init\x00splash\x00", "similar": "/bin/kubelet\x00", "none": ""} {
		t.Run(name, func(t *testing.T) {
			if err := request(procOf(t, os.Getpid(), line), os.Getpid(), "kubelet-plugin"); err == nil {
				t.Error("it was sent")
			}
		})
	}
	if err := request(t.TempDir(), os.Getpid(), "kubelet-plugin"); err == nil {
		t.Error("it was sent to a process that does not exist")
	}
}

func procOf(t *testing.T, pid int, cmdline string) string {
	t.Helper()
	proc := t.TempDir()
	dir := filepath.Join(proc, strconv.Itoa(pid))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cmdline"), []byte(cmdline), 0o600); err != nil {
		t.Fatal(err)
	}
	return proc
}
