// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestDoctor: doctor finds nothing on a cluster as the chart made it, and names what is broken afterwards.
func TestDoctor(t *testing.T) {
	s := begin(t)
	s.replaceAgent() // what agents reported in earlier stories is over
	plugin := s.buildPlugin()
	nothing := func() error {
		out, err := s.kubectlGPU(plugin, "doctor")
		if err == nil && !strings.HasPrefix(out, "no problem found: Kubernetes v1.") {
			err = errors.New(out)
		}
		return err
	}
	s.await(soon, "doctor to find nothing", nothing)

	const policy = "tandem-gpunode-status"
	startControllers := s.withoutControllers()
	binding := s.kubectl("get", "validatingadmissionpolicybinding", policy, "-o", "yaml")
	bind := s.undo(func() error { return s.apply(binding) })
	s.kubectl("delete", "validatingadmissionpolicybinding", policy)
	want := []string{
		"error deployment tandem-system/tandem-controller", "warning validatingadmissionpolicy " + policy, "warning validatingwebhookconfiguration tandem-webhook",
	}
	s.await(soon, "doctor to name what is broken", func() error {
		out, err := s.kubectlGPU(plugin, "doctor", "-o", "json")
		if err == nil || !strings.Contains(err.Error(), "the installation has errors") {
			return fmt.Errorf("exit status: %w, %s", err, out)
		}
		var found struct {
			Findings []struct{ Severity, Object, Action string }
		}
		if err := json.Unmarshal([]byte(out), &found); err != nil {
			return err
		}
		var got []string
		for _, f := range found.Findings {
			if f.Action != "" {
				got = append(got, f.Severity+" "+f.Object)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("it found %q", got)
		}
		return nil
	})
	bind()
	startControllers()
	s.await(soon, "doctor to find nothing again", nothing)
}
