// SPDX-License-Identifier: Apache-2.0

// Claims that were allocated devices which this node cannot give, so that the scheduler allocates others.

package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// unusableGrace is how long an allocated device may be unhealthy or unknown before its claim is in conflict: the inventory of an agent
// that has just started may be incomplete, and a GPU may be reset. unusableKept is longer than kubelet waits between two calls.
const unusableGrace, unusableKept = 10 * time.Second, 5 * time.Minute

// unusable is when a claim was refused because a device was unhealthy or unknown, first and last.
type unusable struct{ first, last time.Time }

// recordUnusable records the conflicts of claims whose devices have been unhealthy or unknown for longer than unusableGrace. These
// conflicts are resolved like those with another holder. Before that time, kubelet retries the call.
func (d *Driver) recordUnusable(ctx context.Context, preparations []*preparation, now time.Time) {
	for _, p := range preparations {
		refused := p.unusable()
		since := d.unusableSince(p.claim.UID, refused != nil, now)
		switch {
		case refused == nil:
			continue
		case now.Sub(since) < unusableGrace:
			refused.message += ": retrying"
			continue
		}
		p.names[refused.ref] = refused.device
		p.err = d.recordConflict(ctx, p, kindDevice, refused.reason, adviceRecreate, ledger.Conflict{Message: refused.message, Devices: []device.Ref{refused.ref}})
	}
}

// unusableSince records that a claim was refused now, or was not, and returns when it was refused first.
func (d *Driver) unusableSince(claim types.UID, refused bool, now time.Time) time.Time {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.unusable, func(uid types.UID, u unusable) bool {
		return uid == claim && !refused || now.Sub(u.last) > unusableKept
	})
	if !refused {
		return now
	}
	u, known := d.unusable[claim]
	if !known {
		u.first = now
	}
	u.last = now
	d.unusable[claim] = u
	return u.first
}

// unusable returns the refusal of a claim that was allocated an unhealthy or unknown device; nil for another claim.
func (p *preparation) unusable() *refusal {
	if refused, ok := errors.AsType[*refusal](p.err); ok && refused.device != "" {
		return refused
	}
	return nil
}

// refuseUnusable returns the refusal of a claim whose allocated device cannot be used any more. Devices of admin access are not held, so
// their claim is not in conflict.
func refuseUnusable(reason, name string, ref device.Ref, admin bool, format string, args ...any) error {
	refused := &refusal{reason: reason, message: fmt.Sprintf(format, args...)}
	if !admin {
		refused.device, refused.ref = name, ref
	}
	return refused
}
