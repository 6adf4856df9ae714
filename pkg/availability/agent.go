// SPDX-License-Identifier: Apache-2.0

package availability

import (
	"time"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
)

// SilentAfter is how old GPUNode.status.seen is when the agent counts as gone. An agent writes at least once a minute, so two writes are
// missing.
const SilentAfter = 150 * time.Second

// AsOf returns a GPUNode as it is to be read at a time: if its agent is silent, status.waiting says so, unless the agent gave a reason itself.
// Every view reads GPUNodes through it. An agent of an older version does not write status.seen, and is never silent. AsOf is a pure function
// and does not change the node.
func AsOf(now time.Time, node v1alpha1.GPUNode) v1alpha1.GPUNode {
	if s := &node.Status; s.Waiting == "" && s.Seen != nil && now.Sub(s.Seen.Time) > SilentAfter {
		s.Waiting, s.WaitingSince = silent, s.Seen
	}
	return node
}

const silent = "the agent is silent, and this is the state of that time"
