// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/mps"
)

func TestRun(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"version"}, &out); err != nil || out.Len() == 0 {
		t.Errorf("version: %q, %v", out.String(), err)
	}
	for _, args := range [][]string{nil, {"run", "x"}} {
		if err := run(t.Context(), args, io.Discard); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v", args, err)
		}
	}
	if err := run(t.Context(), []string{"run"}, io.Discard); err == nil || !strings.Contains(err.Error(), mps.SettingsEnv) {
		t.Errorf("outside of a pod: %v", err)
	}
	t.Setenv(mps.SettingsEnv, `{"devices":["GPU-a"],"driverRoot":"/"}`)
	t.Setenv(mps.PodUIDEnv, "uid")
	t.Setenv(mps.KubeletDirEnv, "/var/lib/kubelet")
	if err := run(t.Context(), []string{"what"}, io.Discard); !errors.Is(err, errUsage) {
		t.Errorf("what: %v", err)
	}
	// Nothing is ready here, which is no reason to be restarted.
	if err := run(t.Context(), []string{"ready"}, io.Discard); err == nil || !strings.Contains(err.Error(), "not ready") {
		t.Errorf("ready: %v", err)
	}
	if err := run(t.Context(), []string{"live"}, io.Discard); err != nil {
		t.Errorf("live: %v", err)
	}
	// Without the directory no daemon is requested.
	if err := run(t.Context(), []string{"run"}, io.Discard); err != nil {
		t.Errorf("run: %v", err)
	}
}
