// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"testing"
	"time"
)

// A scan beside a reset that takes longer than a call may leaves all as it was.
func TestScansBesideALongReset(t *testing.T) {
	n := newHangNode(t)
	n.options.patience = 100 * time.Millisecond
	if err := n.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	resets := make(chan struct{})
	go func() {
		defer close(resets)
		for ctx.Err() == nil {
			_ = n.session.suspend(time.Second, func() error { time.Sleep(250 * time.Millisecond); return nil })
			time.Sleep(20 * time.Millisecond)
		}
	}()
	for ctx.Err() == nil {
		if err := n.Scan(t.Context()); err != nil {
			t.Errorf("a scan: %v", err)
		}
		if !n.all("") {
			t.Errorf("a GPU is unhealthy during a reset: %+v", n.Inventory().GPUs)
			cancel()
		}
	}
	<-resets
}
