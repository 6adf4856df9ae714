// SPDX-License-Identifier: Apache-2.0

// Package nodriver has the hardware of tests whose devices need no driver: they have no processes, no settings and no XIDs.
package nodriver

import (
	"context"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/wiring"
)

// Root is where the driver of a node would be.
const Root = "/"

// Hardware is for embedding: Inventory and Changed are the test's own. A call of another method that neither has panics.
type Hardware struct{ wiring.Hardware }

// DriverRoot implements wiring.Hardware.
func (Hardware) DriverRoot() string { return Root }

// Processes implements handover.Hardware.
func (Hardware) Processes(context.Context, string) (compute, graphics []int, err error) {
	return nil, nil, nil
}

// Settings implements handover.Hardware.
func (Hardware) Settings(context.Context, string) (device.Settings, error) {
	return device.Settings{}, nil
}

// RestoreSettings implements handover.Hardware.
func (Hardware) RestoreSettings(context.Context, string, device.Settings) error { return nil }

// LastRead implements health.Hardware.
func (Hardware) LastRead(string) time.Time { return time.Now() }

// WatchXIDs implements health.Hardware.
func (Hardware) WatchXIDs(ctx context.Context, _ func(device.XIDEvent)) error {
	<-ctx.Done()
	return nil
}
