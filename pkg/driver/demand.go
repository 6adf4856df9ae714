// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/partition"
)

// toForeign is who a claim has lost to, for the metric, where nobody's hold but a partition of somebody else is in the way.
const toForeign = "foreign"

// meetDemands makes the partitions that the claim has reserved. Nothing is locked meanwhile but the GPU in question.
func (d *Driver) meetDemands(ctx context.Context, p *preparation) error {
	for _, demand := range p.demands {
		err := d.meetDemand(ctx, p, demand)
		if err == nil {
			continue
		}
		name := p.answer[demand.entry].DeviceName
		if foreign, ok := errors.AsType[*partition.ForeignError](err); ok {
			// Who still holds a device has not lost it.
			d.giveBack(ctx, p)
			return d.recordConflict(ctx, p, toForeign, reasonForeignPartition, foreign.Error(), []device.Ref{demand.device.Ref()})
		}
		return refuse(reasonNotMade, "device %s cannot be had, trying again: %v", name, err)
	}
	return nil
}

func (d *Driver) meetDemand(ctx context.Context, p *preparation, demand demand) error {
	entry := &p.answer[demand.entry]
	switch {
	case d.Partitions == nil && (!demand.device.Whole() || demand.device.GPU.MIGEnabled):
		return errors.New("partitions are not served on this node")
	case demand.device.Whole():
		if d.Partitions != nil {
			if err := d.Partitions.Whole(ctx, demand.device.GPU.UUID); err != nil {
				return err
			}
		}
		d.show(p, entry, demand.device.GPU.UUID)
		return nil
	}
	made, err := d.Partitions.Make(ctx, demand.device.Partition, func() bool { return d.holds(p, demand.device.Ref()) })
	if err != nil {
		return err
	}
	if err := d.Specs.Add(ctx, made); err != nil {
		return fmt.Errorf("describe it to the container runtime: %w", err)
	}
	d.show(p, entry, made.UUID)
	p.made(made)
	return nil
}

// holds reports whether the claim still has what it has reserved.
func (d *Driver) holds(p *preparation, ref device.Ref) bool {
	return slices.ContainsFunc(d.Ledger.Holds(), func(h ledger.Hold) bool {
		return h.Holder == ledger.Holder{Kind: ledger.KindClaim, ID: p.request.UID} && h.Device == ref && h.State == ledger.StateHeld
	})
}
