// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestMigrateValues(t *testing.T) {
	p, stdout, _ := world{}.plugin(t)
	p.streams.In = strings.NewReader("nvidiaDriverRoot: /run/nvidia/driver")
	if err := p.execute(t.Context(), p.command(), []string{"migrate", "-f", "nvidia-device-plugin=-"}); err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(stdout.String(), "\ndriverRoot: /run/nvidia/driver\n") {
		t.Errorf("values:\n%s", stdout)
	}
}

// TestMigrateReadsTheCluster: an API server without anything of NVIDIA's. The plan refuses, and nothing is written.
func TestMigrateReadsTheCluster(t *testing.T) {
	w := world{deniedVerbs: []string{"create", "update", "patch", "delete"}}
	for line, want := range map[string][]string{
		"migrate":         {"the cluster has no Helm release of NVIDIA's device plugin"},
		"migrate --plan":  {"Plan: move 0 nodes"},
		"migrate --apply": {"Plan: move 0 nodes", "no DaemonSet of NVIDIA's device plugin or DRA driver was found"},
	} {
		got := w.run(t, strings.Fields(line)...)
		for _, part := range want {
			if !strings.Contains(got, part) {
				t.Errorf("%s: %s, want %s", line, got, part)
			}
		}
	}
}
