// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"testing"
	"time"
)

// Open is New followed by a Scan that has to succeed.
func Open(ctx context.Context, options Options) (*Node, error) {
	n := New(options)
	return n, n.Scan(ctx)
}

// Unidentified returns the number of GPUs that do not say who they are.
func (n *Node) Unidentified() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.unidentified
}

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
