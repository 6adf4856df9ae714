// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"testing"
)

// TestWrongModesAreRefused: nothing changes, and an event on the node gives the reason.
func TestWrongModesAreRefused(t *testing.T) {
	s := begin(t)
	s.unlabelAtEnd()
	gpus := s.occupy()
	containers := s.containers()
	s.labelled("Splitt")
	s.event("Node", gpuNode, "ConfigRejected", "Splitt", "Dual, ClaimsOnly, DevicePluginOnly, Split")
	s.labelled("Split")
	s.event("Node", gpuNode, "ConfigRejected", "tandem.devices: is required")
	s.served("Dual", 6, 6)
	s.unchanged(containers, gpus)
}
