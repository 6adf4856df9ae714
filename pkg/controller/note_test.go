// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

// A claim for a whole node that lost every GPU of it has the longest story.
func TestHealTellsLongStories(t *testing.T) {
	conflict := pendingEviction("a", "gpu-0")
	conflict.Message = strings.Repeat("device gpu-0 is held by a pod in another namespace by its resource limits; ", 20)
	w := newWorld(t, interceptor.Funcs{}, gpuNode(losing(conflict)), newClaim("a", "gpu-0"), newPod("a"))
	w.twice(w.healer(), "node-1")
	for range 2 {
		e, kept := strings.CutPrefix(w.event(), "Normal EvictedAfterConflict ")
		if !kept || len(e) > 1024 {
			t.Errorf("a note of %d bytes: %q", len(e), e)
		}
	}
}
