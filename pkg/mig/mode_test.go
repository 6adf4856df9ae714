// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"testing"

	"github.com/tandem-gpu/tandem/pkg/device"
)

func TestSwitchable(t *testing.T) {
	for capability, want := range map[string]bool{"8.0": false, "9.0": true, "10.0": true, "12.0": true, "": false, "?": false} {
		if got := Switchable(device.GPU{MIGCapable: true, ComputeCapability: capability}); got != want {
			t.Errorf("compute capability %q: switchable is %v", capability, got)
		}
	}
	if Switchable(device.GPU{ComputeCapability: "9.0"}) {
		t.Error("a GPU without MIG is switchable")
	}
}
