// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// In the agent's container the command finds the driver where the agent does, which the chart tells by flags.
func TestInspectTakesTheAgentsFlags(t *testing.T) {
	for name, test := range map[string]struct {
		line string
		want []string
	}{
		"the agent":       {"/usr/bin/kubelet-plugin\x00--host-root=/host\x00-v=2\x00", []string{"--host-root=/host", "-v=2"}},
		"without flags":   {"kubelet-plugin\x00", nil},
		"another command": {"/usr/bin/kubelet-plugin\x00simulate\x00--root=/x\x00", nil},
		"another program": {"/sbin/init\x00--host-root=/host\x00", nil},
		"a kernel thread": {"", nil},
	} {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			if err := os.MkdirAll(filepath.Join(proc, "1"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(proc, "1/cmdline"), []byte(test.line), 0o644); err != nil {
				t.Fatal(err)
			}
			if got := Flags(proc); !slices.Equal(got, test.want) {
				t.Errorf("flags %q, want %q", got, test.want)
			}
		})
	}
	if got := Flags(t.TempDir()); got != nil {
		t.Errorf("flags %q without proc, want none", got)
	}
}
