// SPDX-License-Identifier: Apache-2.0

package availability

import (
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// SilentAfter is how old GPUNode.status.seen is when the agent counts as gone. An agent writes at least once a minute, so two writes are
// missing.
const SilentAfter = 150 * time.Second

// What status.waiting says of an agent that does not run. An agent writes Stopped at its end, and AsOf sets Silent.
const (
	Stopped = "the agent has stopped"
	Silent  = "the agent is silent"
)

// IsSilent reports whether the agent of a status counts as gone. Pure.
func IsSilent(now time.Time, status v1alpha1.GPUNodeStatus) bool {
	return status.Seen != nil && now.Sub(status.Seen.Time) > SilentAfter
}

// AsOf returns a GPUNode as it is to be read at a time, by the clock of who reads it: if its agent is silent, status.waiting says so, behind a
// reason that the agent gave. Every view reads GPUNodes through it; the controller, which has no views, asks IsSilent. An agent of an older
// version does not write status.seen, and is never silent. AsOf is a pure function and does not change the node.
func AsOf(now time.Time, node v1alpha1.GPUNode) v1alpha1.GPUNode {
	s := &node.Status
	if !IsSilent(now, *s) {
		return node
	}
	switch suffix := "; " + Silent + " since " + s.Seen.UTC().Format(time.RFC3339); {
	case s.Waiting == "":
		s.Waiting, s.WaitingSince = Silent, s.Seen
	case s.Waiting != Stopped && s.Waiting != Silent && !strings.HasSuffix(s.Waiting, suffix):
		s.Waiting += suffix
	}
	return node
}
