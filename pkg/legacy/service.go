// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// service answers kubelet on one socket.
type service struct {
	pluginapi.UnsafeDevicePluginServer
	registrar *registrar
	endpoint  *endpoint
}

// options are sent with Register and again when kubelet asks. PreStartRequired stays false: kubelet would require it for pods
// whose GPUs come from a claim, and find no devices for them.
func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

func (s *service) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

func (s *service) GetPreferredAllocation(_ context.Context, request *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	defer s.endpoint.calls.enter()()
	defer func(start time.Time) { s.registrar.metrics.preferred.Observe(time.Since(start).Seconds()) }(time.Now())
	return s.registrar.Preferred(s.registrar.resource, request), nil
}

func (s *service) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	defer s.endpoint.calls.enter()()
	defer func(start time.Time) { s.registrar.metrics.allocate.Observe(time.Since(start).Seconds()) }(time.Now())
	return s.registrar.Allocate(klog.NewContext(ctx, s.endpoint.logger), s.registrar.resource, request)
}

// PreStartContainer reports whether the devices exist. kubelet does not call it, because options do not require it.
func (s *service) PreStartContainer(_ context.Context, request *pluginapi.PreStartContainerRequest,
) (*pluginapi.PreStartContainerResponse, error) {
	defer s.endpoint.calls.enter()()
	if _, err := s.registrar.lookup(s.registrar.resource, request.GetDevicesIds(), make(map[string]bool)); err != nil {
		return nil, status.Errorf(status.Code(err), "invalid pre-start request for %q: %s", s.registrar.resource, reason(err))
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

// reason returns the message of a gRPC error without its code.
func reason(err error) string { return status.Convert(err).Message() }

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}
