// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nodelabels"
	"github.com/tandem-gpu/tandem/pkg/nvml"
)

// labelConfig is that of the writer of the node's labels. They describe devices, the inventory with the sharing policy.
func (a *Agent) labelConfig(ctx context.Context, c components, devices device.Source, registerer prometheus.Registerer) nodelabels.Config {
	options := nodelabels.Options{Resources: a.config.Resources(), Machine: a.readMachine(ctx)}
	if !a.config.NoTimestamp {
		options.Timestamp = time.Now()
	}
	return nodelabels.Config{
		Nodes: a.client.CoreV1().Nodes(), NodeName: a.config.NodeName,
		UseNodeFeature: a.config.UseNodeFeatureAPI, Features: a.dynamic.Resource(nodelabels.NodeFeatures).Namespace(a.config.Namespace), Owner: a.owner,
		Want: func() (map[string]string, bool) {
			if !a.config.NodeLabels {
				return nil, true
			}
			inv := devices.Inventory()
			if len(inv.GPUs) == 0 && driverAway(c.driver.Missing()) || a.config.Unchosen {
				return nil, false
			}
			return nodelabels.Of(inv, options), true
		},
		Changed: devices.Changed, Seen: c.Node.Labels, Interval: a.config.LabelInterval,
		Recorder: a.recorder, Registerer: registerer,
	}
}

// owner finds the owner of the objects that the agent creates in its namespace. The owner is the agent's DaemonSet, which exists as long as
// Tandem is installed. GPU Feature Discovery also makes its pod an owner, but each restart creates a new pod. Each write looks it up:
// another DaemonSet can adopt the pod, and the garbage collector deletes objects whose owner is gone.
func (a *Agent) owner(ctx context.Context) ([]metav1.OwnerReference, error) {
	if a.config.PodName == "" {
		return nil, nil
	}
	pod, err := a.client.CoreV1().Pods(a.config.Namespace).Get(ctx, a.config.PodName, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get pod %s/%s: %w", a.config.Namespace, a.config.PodName, err)
	}
	for _, owner := range pod.OwnerReferences {
		if owner.Kind == "DaemonSet" {
			return []metav1.OwnerReference{{APIVersion: owner.APIVersion, Kind: owner.Kind, Name: owner.Name, UID: owner.UID}}, nil
		}
	}
	return nil, nil
}

// driverAway reports whether the node may have GPUs although no driver reports them now. Its labels stay then: pods may select them.
func driverAway(missing error) bool {
	noDriver, ok := errors.AsType[*nvml.NoDriverError](missing)
	return errors.Is(missing, nvml.ErrNoDriver) && !(ok && noDriver.NoHardware)
}

// labelWithoutGPU removes the labels of a node that has lost its last GPU, until stop is called. stop waits for its end.
func (a *Agent) labelWithoutGPU(ctx context.Context, c components) (stop func()) {
	return meanwhile(ctx, func(ctx context.Context) {
		// The metrics are those of the writer that runs while the node has GPUs.
		config := a.labelConfig(ctx, c, c.driver, prometheus.NewRegistry())
		want := config.Want
		config.Want = func() (map[string]string, bool) {
			labels, known := want()
			return labels, known && len(labels) == 0
		}
		_ = nodelabels.NewWriter(config).Run(ctx) // it returns nil
	})
}

// longestMachine bounds the file with the machine's model. A label has at most 63 characters of it.
const longestMachine = 4096

// readMachine returns the machine's model; empty if it is not known.
func (a *Agent) readMachine(ctx context.Context) string {
	path := a.config.MachineTypeFile
	if path == "" {
		path = filepath.Join(a.config.SysfsRoot, "class/dmi/id/product_name")
	}
	file, err := os.Open(path)
	var text []byte
	if err == nil {
		defer file.Close()
		text, err = io.ReadAll(io.LimitReader(file, longestMachine))
	}
	if err != nil {
		klog.FromContext(ctx).Info("The machine's model is unknown", "file", path, "reason", err.Error())
	}
	return string(text)
}
