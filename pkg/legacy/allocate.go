// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Allocate takes the devices of all containers of the request, or none. It never waits for another holder: kubelet calls
// from its one loop, without a deadline, and an error fails the pod for good. Called for kubelet and by simulations; the same
// IDs again are reuse inside one pod. Safe for concurrent use.
func (p *Plugin) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	containers, err := p.requested(request)
	if err != nil {
		return nil, status.Errorf(status.Code(err), "invalid allocation request for %q: invalid request: %s", p.config.ResourceName, reason(err))
	}
	if err := ctx.Err(); err != nil {
		// Nobody would get the answer, and a hold that kubelet does not know of is left to the reconciler.
		return nil, status.FromContextError(err).Err()
	}
	if p.config.uses(Strategy.cdi) {
		if err := p.config.Specs.Ensure(ctx, uuidsOf(containers)...); err != nil {
			return nil, status.Errorf(codes.Unavailable, "allocate %s: ensure CDI specs: %v", p.config.ResourceName, err)
		}
	}
	if err := p.config.Ledger.ReserveLimits(p.limitRequests(containers)); err != nil {
		return nil, p.refuse(ctx, err)
	}
	response := &pluginapi.AllocateResponse{}
	for _, gpus := range containers {
		response.ContainerResponses = append(response.ContainerResponses, p.answer(gpus))
	}
	return response, nil
}

// requested resolves the GPUs of each container, in the order of the request.
func (p *Plugin) requested(request *pluginapi.AllocateRequest) ([][]device.GPU, error) {
	if len(request.GetContainerRequests()) == 0 {
		return nil, invalid("no container requests")
	}
	var containers [][]device.GPU
	seen := make(map[string]bool)
	for _, container := range request.GetContainerRequests() {
		gpus, err := p.lookup(container.GetDevicesIds(), seen)
		if err != nil {
			return nil, err
		}
		for _, gpu := range gpus {
			if !gpu.Health.Healthy() {
				return nil, status.Errorf(codes.FailedPrecondition, "unhealthy device: %s: %s: %s", gpu.UUID, gpu.Health.Reason, gpu.Health.Message)
			}
		}
		containers = append(containers, gpus)
	}
	return containers, nil
}

// lookup resolves device IDs, of which there must be at least one and each but once in a request (seen collects them).
func (p *Plugin) lookup(ids []string, seen map[string]bool) ([]device.GPU, error) {
	if len(ids) == 0 {
		return nil, invalid("no device IDs")
	}
	known := p.roster.catalog()
	gpus := make([]device.GPU, 0, len(ids))
	for _, id := range ids {
		i, ok := known.index[id]
		switch {
		case id == "":
			return nil, invalid("empty device ID")
		case !ok:
			return nil, status.Errorf(codes.NotFound, "unknown device: %s", id)
		case seen[id]:
			return nil, invalid("duplicate device: %s", id)
		}
		seen[id] = true
		gpus = append(gpus, known.gpus[i])
	}
	return gpus, nil
}

func (p *Plugin) limitRequests(containers [][]device.GPU) []ledger.LimitRequest {
	var requests []ledger.LimitRequest
	for _, gpus := range containers {
		for _, gpu := range gpus {
			requests = append(requests, ledger.LimitRequest{ID: gpu.UUID, Resource: p.config.ResourceName, Device: gpu.Ref()})
		}
	}
	return requests
}

// refuse turns the ledger's answer into the error for kubelet. That error ends up in the status of a pod whose owner may
// have no business knowing other namespaces, and so does the event: both name the holder by kind and UID. The log of the
// agent, which only operators read, has the names.
func (p *Plugin) refuse(ctx context.Context, err error) error {
	conflict, ok := errors.AsType[*ledger.ConflictError](err)
	if !ok {
		return status.Errorf(codes.Internal, "allocate %s: %v", p.config.ResourceName, err)
	}
	p.metrics.conflicts.Inc()
	klog.FromContext(ctx).Info("Refused a limit whose device is held", "resource", p.config.ResourceName, "conflict", conflict.Error())
	message := p.describe(conflict)
	p.config.Recorder.Eventf(p.node, corev1.EventTypeWarning, "LimitConflict", "Refused a pod's %s limit: %s", p.config.ResourceName, message)
	return status.Errorf(codes.FailedPrecondition, "allocate %s: %s", p.config.ResourceName, message)
}

func (p *Plugin) describe(conflict *ledger.ConflictError) string {
	known := p.roster.catalog()
	parts := make([]string, len(conflict.Holds))
	for i, h := range conflict.Holds {
		name := h.Device.String()
		if at, ok := known.index[h.Device.GPU]; ok {
			name = fmt.Sprintf("%s (%s)", name, known.gpus[at].Name())
		}
		parts[i] = fmt.Sprintf("device %s is held by %s", name, anonymous(h))
	}
	return strings.Join(parts, "; ")
}

// anonymous describes a holder without names.
func anonymous(h ledger.Hold) string {
	switch {
	case h.Unreadable:
		return fmt.Sprintf("a %s whose record is unreadable", h.Holder.Kind)
	case h.Holder.Kind == ledger.KindClaim:
		return fmt.Sprintf("claim %s (%s)", h.Holder.ID, h.State)
	case h.State == ledger.StateDraining:
		return "a limits pod that is gone but whose containers may still run"
	default:
		return fmt.Sprintf("a limits pod (%s)", h.State)
	}
}

func uuidsOf(containers [][]device.GPU) []string {
	var uuids []string
	for _, gpus := range containers {
		for _, gpu := range gpus {
			uuids = append(uuids, gpu.UUID)
		}
	}
	return uuids
}
