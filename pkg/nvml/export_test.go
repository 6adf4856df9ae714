// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/pkg/cdi"
)

// Open is New followed by a Scan that has to succeed.
func Open(ctx context.Context, options Options) (*Node, error) {
	n := New(options)
	return n, n.Scan(ctx)
}

// ScanHealth is the scan of each second, which reads no more than health.
func (n *Node) ScanHealth(ctx context.Context) error { return n.scanOnce(ctx, false, false) }

func mustOpen(t *testing.T, options Options) *Node {
	t.Helper()
	n, err := Open(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func mustEdit(t *testing.T, n *Node) cdi.Edits {
	t.Helper()
	edits, err := n.ContainerEdits(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return edits
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
	return mustOpen(t, options)
}
