// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// namedDevices is how many devices an event names.
const namedDevices = 4

// reportExcluded reports devices that no extended resource offers, whenever they change, until ctx is done.
func (p *Plugin) reportExcluded(ctx context.Context) {
	var reported []string
	for {
		changed := p.lists.changed.Changed()
		excluded := p.lists.excludedDevices()
		if !slices.Equal(reported, excluded) {
			reported = excluded
			for _, sentence := range excluded {
				klog.FromContext(ctx).Info("No extended resource offers some devices",
					"migStrategy", p.config.Resources.Strategy, "devices", sentence)
				p.config.Recorder.Eventf(p.node, corev1.EventTypeWarning, "DevicesExcluded", "No extended resource offers %s", sentence)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// excludedByReason returns a sentence for each reason: "gpu-1 and 2 more: <reason>".
func excludedByReason(excluded []device.LeftOut) []string {
	var reasons []string
	names := map[string][]string{}
	for _, l := range excluded {
		if names[l.Reason] == nil {
			reasons = append(reasons, l.Reason)
		}
		names[l.Reason] = append(names[l.Reason], fmt.Sprintf("%s (%s)", l.Device.Name(), l.Device.UUID()))
	}
	var sentences []string
	for _, reason := range reasons {
		all := names[reason]
		text := strings.Join(all[:min(len(all), namedDevices)], ", ")
		if more := len(all) - namedDevices; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		sentences = append(sentences, text+": "+reason)
	}
	slices.Sort(sentences)
	return sentences
}
