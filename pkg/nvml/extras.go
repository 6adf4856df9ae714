// SPDX-License-Identifier: Apache-2.0

// Devices of other drivers (GDS, GDRCopy, MOFED) that containers with a GPU are given.

package nvml

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Extras are devices of other drivers that every container with a GPU is given too, where the node has them, as by NVIDIA's device plugin
// (gdsEnabled, gdrcopyEnabled, mofedEnabled, imex).
type Extras struct {
	// GDS is GPUDirect Storage: /dev/nvidia-fs*, /run/udev, /etc/cufile.json. GDRCopy is /dev/gdrdrv. MOFED are /dev/infiniband/uverbs* and
	// rdma_cm.
	GDS, GDRCopy, MOFED bool
	// IMEXChannels are the numbers of channels below /dev/nvidia-caps-imex-channels. If they are required, all GPUs are
	// unhealthy while one of them does not exist.
	IMEXChannels []int
	IMEXRequired bool
}

// extraNodes are the nodes of the extras that are asked for, as patterns.
func (e Extras) extraNodes() (patterns []string) {
	for _, extra := range []struct {
		asked    bool
		patterns []string
	}{
		{e.GDS, []string{"/dev/nvidia-fs*"}},
		{e.GDRCopy, []string{"/dev/gdrdrv"}},
		{e.MOFED, []string{"/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"}},
	} {
		if extra.asked {
			patterns = append(patterns, extra.patterns...)
		}
	}
	for _, channel := range e.IMEXChannels {
		patterns = append(patterns, imexChannel(channel))
	}
	return patterns
}

func imexChannel(number int) string {
	return fmt.Sprintf("/dev/nvidia-caps-imex-channels/channel%d", number)
}

// extraRoots are where the extras' nodes may be: other drivers than NVIDIA's are often installed on the host itself.
func extraRoots(devRoot string) []string { return slices.Compact([]string{devRoot, "/"}) }

// traceExtras returns the nodes of the extras that there are, with their numbers.
func (o Options) traceExtras(devRoot string) (trace string) {
	for _, root := range extraRoots(devRoot) {
		for _, pattern := range o.Extras.extraNodes() {
			paths, err := filepath.Glob(o.onHost(filepath.Join(root, pattern)))
			if err != nil {
				continue
			}
			for _, path := range paths {
				var info unix.Stat_t
				if unix.Stat(path, &info) == nil {
					trace += fmt.Sprintf("%s=%x ", path, info.Rdev)
				}
			}
		}
	}
	return trace
}

// addExtras adds the extras that are asked for and exist.
func (n *Node) addExtras(ctx context.Context, at attachment, to *specs.ContainerEdits) error {
	asked := n.options.Extras
	for _, extra := range []struct {
		asked bool
		mode  nvcdi.Mode
	}{{asked.GDS, nvcdi.ModeGds}, {asked.GDRCopy, nvcdi.ModeGdrcopy}, {asked.MOFED, nvcdi.ModeMofed}} {
		if !extra.asked {
			continue
		}
		if err := n.addExtra(ctx, at, to, extra.mode, "all"); err != nil {
			return fmt.Errorf("find the devices of %s: %w", extra.mode, err)
		}
	}
	for _, channel := range asked.IMEXChannels {
		if !n.options.hasChannel(at.layout.devRoot, channel) {
			continue
		}
		if err := n.addExtra(ctx, at, to, nvcdi.ModeImex, fmt.Sprint(channel)); err != nil {
			return fmt.Errorf("find IMEX channel %d: %w", channel, err)
		}
	}
	return n.options.missingChannel(at.layout.devRoot)
}

func (o Options) hasChannel(devRoot string, channel int) bool {
	return slices.ContainsFunc(extraRoots(devRoot), func(root string) bool {
		_, err := os.Stat(o.onHost(filepath.Join(root, imexChannel(channel))))
		return err == nil
	})
}

// missingChannel returns an error if an IMEX channel is required and does not exist.
func (o Options) missingChannel(devRoot string) error {
	for _, channel := range o.Extras.IMEXChannels {
		if o.Extras.IMEXRequired && !o.hasChannel(devRoot, channel) {
			// The words of NVIDIA's device plugin.
			return fmt.Errorf("requested IMEX channel channel%d does not exist", channel)
		}
	}
	return nil
}

// addExtra adds the devices of one of nvcdi's modes, from the first root that has any.
func (n *Node) addExtra(ctx context.Context, at attachment, to *specs.ContainerEdits, mode nvcdi.Mode, id string) error {
	var err error
	for _, root := range extraRoots(at.layout.devRoot) {
		var lib nvcdi.Interface
		lib, err = nvcdi.New(
			nvcdi.WithLogger(toolkitLogger{klog.FromContext(ctx).V(6)}), nvcdi.WithMode(mode), nvcdi.WithNvmlLib(at.session.library),
			nvcdi.WithDriverRoot(n.options.onHost(at.layout.driverRoot)), nvcdi.WithDevRoot(n.options.onHost(root)),
			nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
		)
		if err != nil {
			return err
		}
		var found []specs.Device
		found, err = lib.GetDeviceSpecsByID(id)
		for _, d := range found {
			if len(d.ContainerEdits.DeviceNodes) == 0 {
				continue
			}
			to.DeviceNodes = append(to.DeviceNodes, d.ContainerEdits.DeviceNodes...)
			to.Mounts = append(to.Mounts, d.ContainerEdits.Mounts...)
			to.AdditionalGIDs = append(to.AdditionalGIDs, d.ContainerEdits.AdditionalGIDs...)
			return nil
		}
	}
	return err
}
