// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"testing"
	"time"
)

// OpenImpatient is Open with less patience.
func OpenImpatient(t *testing.T, options Options, patience time.Duration) *Node {
	t.Helper()
	options.patience = patience
	node, err := Open(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	return node
}
