// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// shows waits until the node's GPUNode satisfies the condition, and returns it.
func (s *story) shows(what string, condition func(gpunode.GPUNode) bool) (shown gpunode.GPUNode) {
	s.Helper()
	s.await(soon, "GPUNode to show "+what, func() (err error) {
		if shown, err = s.gpuNodeObject(); err == nil && !condition(shown) {
			err = fmt.Errorf("it has %+v", shown.Status)
		}
		return err
	})
	return shown
}
