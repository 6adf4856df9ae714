// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/test/figure"
)

// rounds of measureModes: what the machine does beside it changes from minute to minute.
const rounds = 8

// idleOf says how the figures of an idle agent in a mode end, and its goal for memory in MiB. Those of Dual are measured before.
var idleOf = map[config.Mode]struct {
	suffix string
	memory float64
}{
	config.ModeClaimsOnly: {"_claims_only", 45}, config.ModeDevicePluginOnly: {"_device_plugin_only", 32},
}

// measureModes compares what a claim and a limit cost where both APIs are served with what they cost where theirs is the only
// one.
func (r *run) measureModes(ctx context.Context) error {
	claims, err := createClaims(ctx, r.client, r.node.name, "modes", small.gpus)
	if err != nil {
		return err
	}
	prepares, allocates := map[config.Mode]*figure.Samples{}, map[config.Mode]*figure.Samples{}
	modes := []config.Mode{config.ModeDual, config.ModeClaimsOnly, config.ModeDevicePluginOnly}
	for _, mode := range modes {
		prepares[mode], allocates[mode] = &figure.Samples{}, &figure.Samples{}
	}
	for round := range rounds {
		for i := range modes {
			mode := modes[(round+i)%len(modes)]
			r.say("mode %s, round %d of %d", mode, round+1, rounds)
			err := r.on(ctx, small, mode, claims, func(ctx context.Context, s *subject) error {
				if idle, ok := idleOf[mode]; ok && round == 0 {
					if err := r.addIdle(ctx, s, idle.suffix, idle.memory); err != nil {
						return err
					}
				}
				if mode.Claims() {
					_, took, _, err := s.prepareOneByOne(ctx, r.Calls/rounds)
					if err != nil {
						return err
					}
					*prepares[mode] = append(*prepares[mode], took...)
				}
				if mode.Limits() {
					_, took, err := s.allocate(ctx, fmt.Sprintf("%s-%d", strings.ToLower(string(mode)), round), 1, r.Calls/rounds)
					if err != nil {
						return err
					}
					*allocates[mode] = append(*allocates[mode], took...)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	return r.add(append(
		besides("prepare", *prepares[config.ModeDual], *prepares[config.ModeClaimsOnly]),
		besides("allocate", *allocates[config.ModeDual], *allocates[config.ModeDevicePluginOnly])...), nil)
}

// besides compares a call where the other API is served as well with the same call where it is not.
func besides(call string, dual, only figure.Samples) []figure.Figure {
	alone := only.Figure(call+"_alone_p50", 50)
	return []figure.Figure{
		alone, dual.Figure(call+"_dual_p50", 50).Over(alone, figure.Goal{Factor: 1.2, Margin: 0.1}),
		{Name: call + "_dual_ratio", Value: dual.Percentile(50) / only.Percentile(50), Unit: "ratio", N: len(dual)},
	}
}

// withdrawal is how much is sent for one GPU that changes hands: to kubelet, the list of all devices; to the API server, the
// slices.
func (s *subject) withdrawal(ctx context.Context) ([]figure.Figure, error) {
	plugin, _ := s.kubelet.DevicePlugin(resourceName)
	devices := plugin.Devices
	slices, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: ofNode(s.node.name)})
	if err != nil {
		return nil, fmt.Errorf("list slices: %w", err)
	}
	largest := 0
	for _, slice := range slices.Items {
		slice.ManagedFields = nil
		largest = max(largest, slice.Size())
	}
	name := func(what string) string { return fmt.Sprintf("withdrawal_%d_%s", len(devices), what) }
	return []figure.Figure{
		{Name: name("list"), Value: float64(proto.Size(&pluginapi.ListAndWatchResponse{Devices: devices})), Unit: "bytes", N: 1},
		{Name: name("slice"), Value: float64(largest), Unit: "bytes", N: 1},
	}, nil
}
