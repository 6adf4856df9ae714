// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/config"
)

func (w *world) cordon(name string) {
	node := w.node(name).DeepCopy()
	node.Spec.Unschedulable = true
	if err := w.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), node, ""); err != nil {
		w.Fatal(err)
	}
}

// planned returns the refusals of a plan of the way back.
func (w *world) planned(n *Nodes) error {
	w.Helper()
	plan, err := n.Plan(w.Context())
	return must(w, plan, err).Err()
}

// NVIDIA's plugin lists the partitions of a GPU where MIG_STRATEGY says so, without a configuration file.
func TestBackOfAPartitionedGPU(t *testing.T) {
	for _, excluded := range []bool{false, true} {
		w := movedWorld(t, plugin)
		w.interfere = func(node string) {
			status := &w.gpuNodes[node].Status
			status.Devices = append(status.Devices, v1alpha1.DeviceStatus{Name: "gpu-0-mig-1g10gb-19-0", Parent: "gpu-0", Excluded: excluded})
		}
		w.react("a")
		n := w.nodes(true)
		n.Only = "a"
		w.wantError(w.planned(n), "node a: NVIDIA's plugin may give the GPUs of pods to others", "Tandem's: gpu-0. Drain", "add --same-config")
		n.SameConfig = true
		if err := w.migrate(n); err != nil {
			t.Error(err)
		}
		w.wantMoved("a=back", "a=")
	}
}

// Nodes that pods could get GPUs of, before NVIDIA's software has returned, have to be cordoned. The plan says so in every mode.
func TestBackOfIdleNodes(t *testing.T) {
	configured := *plugin.DeepCopy()
	configured.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "CONFIG_FILE", Value: "/config/config.yaml"}}
	const dra, shares = "pods may get GPUs by limits before NVIDIA's DRA driver returns", "pods may get GPUs before NVIDIA's plugin returns"
	for name, c := range map[string]struct {
		set  appsv1.DaemonSet
		mode config.Mode
		want string
	}{
		"DRA driver, Dual":                            {newDRADriver(), config.ModeDual, dra},
		"DRA driver, DevicePluginOnly":                {newDRADriver(), config.ModeDevicePluginOnly, dra},
		"DRA driver, Split":                           {newDRADriver(), config.ModeSplit, dra},
		"DRA driver, ClaimsOnly":                      {newDRADriver(), config.ModeClaimsOnly, dra},
		"plugin, ClaimsOnly":                          {plugin, config.ModeClaimsOnly, ""},
		"plugin with a configuration, Dual":           {configured, config.ModeDual, shares},
		"plugin with a configuration, Split":          {configured, config.ModeSplit, shares},
		"plugin with a configuration, ClaimsOnly":     {configured, config.ModeClaimsOnly, shares},
		"plugin with a configuration, only by limits": {configured, config.ModeDevicePluginOnly, shares},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, c.set)
			w.label("a", config.ModeLabel, string(c.mode))
			if err := w.migrate(w.nodes(false)); err != nil {
				t.Fatal(err)
			}
			w.moved = nil
			w.interfere = func(node string) {
				status := &w.gpuNodes[node].Status
				for i := range status.Devices {
					status.Devices[i].Holders = nil
					if status.Mode == string(config.ModeClaimsOnly) || status.Mode == string(config.ModeSplit) {
						status.Devices[i].ExtendedResource = ""
					}
				}
			}
			w.react("a")
			n := w.nodes(true)
			n.Only = "a"
			if c.want != "" {
				err := w.planned(n)
				w.wantError(err, "node a: "+c.want, "Cordon the node with kubectl cordon")
				if err != nil && (strings.Contains(err.Error(), "drain") || strings.Contains(err.Error(), "GPUs of pods")) {
					t.Errorf("names pods that do not exist: %v", err)
				}
				w.cordon("a")
			}
			if err := w.migrate(n); err != nil {
				t.Error(err)
			}
			w.wantMoved("a=back", "a=")
		})
	}
}
