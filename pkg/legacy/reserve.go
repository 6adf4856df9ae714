// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tandem-gpu/tandem/pkg/sharing"
)

// reserve takes all devices or none, and returns what each container needs to share its own.
func (p *Plugin) reserve(ctx context.Context, resource string, containers [][]item) ([]*sharing.Client, error) {
	if _, err := p.clients(containers); err != nil {
		return nil, unready(resource, err)
	}
	if err := p.config.Ledger.ReservePod(podRequests(resource, containers)); err != nil {
		return nil, p.refuse(ctx, resource, err)
	}
	// The policy marks a GPU before it reads the ledger, so one of both sides sees the other. The reconciler ends what is
	// reserved by then and unknown to kubelet: part of it may belong to an earlier container of the pod.
	clients, err := p.clients(containers)
	if err != nil {
		return nil, unready(resource, err)
	}
	return clients, nil
}

// clients are what containers need to share their devices, one of each, nil for nothing. An error says why one of them cannot use
// a device of its own at the moment.
func (p *Plugin) clients(containers [][]item) ([]*sharing.Client, error) {
	clients := make([]*sharing.Client, len(containers))
	if p.config.Sharing == nil {
		return clients, nil
	}
	for at, items := range containers {
		for _, i := range items {
			client, err := p.config.Sharing.Client(i.Device, i.share)
			if err != nil {
				return nil, err
			}
			if client != nil {
				clients[at] = client // of its only item
			}
		}
	}
	return clients, nil
}

func unready(resource string, err error) error {
	return status.Errorf(codes.Unavailable, "allocate %s: %v", resource, err)
}
