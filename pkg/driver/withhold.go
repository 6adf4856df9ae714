// SPDX-License-Identifier: Apache-2.0

// Other processes and drivers that give the same GPUs away: while there is one, no device is given to new holders.

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// sourceConflicting is the driver's source of ledger.Withhold: the other process may give any GPU away.
const sourceConflicting = "conflicting driver"

// FindConflicting looks once for another process that serves our driver name, and for a driver of another name that publishes our GPUs, and
// withholds devices in both APIs while there is one. The agent calls it before it serves either API. Then it calls Run, which looks again.
func (d *Driver) FindConflicting(ctx context.Context) {
	// Run reports the conflicting driver.
	_ = d.withhold(ctx, d.findConflicting(ctx, nil, map[string]fs.FileInfo{}))
	_ = d.lookForForeign(ctx)
}

// withhold withholds devices while there is a conflicting driver. When that driver is gone, withhold first adds holds for what it gave
// away, and then ends the withholding. An error says why claims must not be served.
func (d *Driver) withhold(ctx context.Context, conflicting error) error {
	if conflicting == nil && d.withholds {
		// By then kubelet's claim state has the last claim that the other process prepared.
		if !broadcast.Sleep(ctx, d.takeOver) {
			return ctx.Err()
		}
		conflicting = d.findConflicting(ctx, nil, map[string]fs.FileInfo{})
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case conflicting != nil:
		d.withholds = true
		d.Ledger.Withhold(sourceConflicting, conflicting)
		return conflicting
	case !d.withholds:
		return nil
	}
	if err := d.Adopt(ctx); err != nil {
		return fmt.Errorf("take over from another process of DRA driver %s that is gone: %w", d.DriverName, err)
	}
	d.withholds = false
	d.Ledger.Withhold(sourceConflicting, nil)
	return nil
}

// conflicted reports whether devices are withheld because of the process at a socket. A process that does not answer may only be slow.
func (d *Driver) conflicted(socket string) bool {
	before, known := errors.AsType[*ConflictingDriverError](d.Ledger.Withheld())
	return d.withholds && known && before.Socket == socket
}

// withheldDetail is the value of TaintUnhealthy on the devices of a node that serves nothing new.
const withheldDetail = "Withheld"

// withdrawAll withdraws all devices.
func withdrawAll(inv device.Inventory, withdrawn []withdrawal) []withdrawal {
	for _, d := range inv.Devices() {
		if d.Health().Healthy() { // one taint for each key
			withdrawn = append(withdrawn, withdrawal{use: use{Device: d.Ref(), Reason: availability.Unhealthy}, health: device.Health{Reason: withheldDetail}})
		}
	}
	slices.SortFunc(withdrawn, compareWithdrawals)
	return withdrawn
}
