// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/pkg/cdi"
)

// Both APIs are served although a hung GPU keeps the first CDI specs from being written.
func TestSpecsAreAwaitedForAWhile(t *testing.T) {
	hung := cdi.New(cdi.Options{Dir: t.TempDir()}) // nothing runs it
	a := &Agent{times: times{specsWait: time.Millisecond}}
	if !a.awaitSpecs(t.Context(), hung) {
		t.Error("a start ends because a GPU hangs")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if a.awaitSpecs(ctx, hung) {
		t.Error("a start goes on after its end")
	}
}
