// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"strings"
	"testing"
	"unicode/utf8"

	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
)

func TestNote(t *testing.T) {
	// The API server accepts 1,024 bytes.
	if got := shorten("short", 1024); got != "short" {
		t.Errorf("%q", got)
	}
	for shift := range 4 {
		got := shorten(strings.Repeat("x", shift)+strings.Repeat("ü", 1024), 1024)
		if len(got) > 1024 || len(got) < 1023 || !utf8.ValidString(got) || !strings.HasSuffix(got, "ü …") {
			t.Errorf("%d bytes, valid %t, ends in %q", len(got), utf8.ValidString(got), got[len(got)-8:])
		}
	}
}

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
