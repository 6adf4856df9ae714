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

// extra is one kind of devices that is asked for: what nvcdi calls it, and its nodes as patterns.
type extra struct {
	what  string
	mode  nvcdi.Mode
	id    string
	nodes []string
}

func (e Extras) asked() (all []extra) {
	if e.GDS {
		all = append(all, extra{"the devices of gds", nvcdi.ModeGds, "all", []string{"/dev/nvidia-fs*"}})
	}
	if e.GDRCopy {
		all = append(all, extra{"the devices of gdrcopy", nvcdi.ModeGdrcopy, "all", []string{"/dev/gdrdrv"}})
	}
	if e.MOFED {
		nodes := []string{"/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"}
		all = append(all, extra{"the devices of mofed", nvcdi.ModeMofed, "all", nodes})
	}
	for _, channel := range e.IMEXChannels {
		what := fmt.Sprintf("IMEX channel %d", channel)
		all = append(all, extra{what, nvcdi.ModeImex, fmt.Sprint(channel), []string{imexChannel(channel)}})
	}
	return all
}

func imexChannel(number int) string {
	return fmt.Sprintf("/dev/nvidia-caps-imex-channels/channel%d", number)
}

// extraRoots are where the extras' nodes may be: other drivers than NVIDIA's are often installed on the host itself.
func extraRoots(devRoot string) []string { return slices.Compact([]string{devRoot, "/"}) }

// traceExtras returns the nodes of the extras that there are, with their numbers.
func (o Options) traceExtras(devRoot string) (trace string) {
	for _, root := range extraRoots(devRoot) {
		for _, extra := range o.Extras.asked() {
			for _, pattern := range extra.nodes {
				paths, _ := filepath.Glob(o.onHost(filepath.Join(root, pattern))) //nolint:errcheck // the patterns are right
				for _, path := range paths {
					var info unix.Stat_t
					if unix.Stat(path, &info) == nil {
						trace += fmt.Sprintf("%s=%x ", path, info.Rdev)
					}
				}
			}
		}
	}
	return trace
}

// addExtras adds the extras that are asked for and exist.
func (n *Node) addExtras(ctx context.Context, at attachment, to *specs.ContainerEdits) error {
	for _, extra := range n.options.Extras.asked() {
		if extra.mode == nvcdi.ModeImex && !n.options.hasExtra(at.layout.devRoot, extra.nodes[0]) {
			continue
		}
		if err := n.addExtra(ctx, at, to, extra); err != nil {
			return fmt.Errorf("find %s: %w", extra.what, err)
		}
	}
	return n.options.missingChannel(at.layout.devRoot)
}

func (o Options) hasExtra(devRoot, node string) bool {
	return slices.ContainsFunc(extraRoots(devRoot), func(root string) bool {
		_, err := os.Stat(o.onHost(filepath.Join(root, node)))
		return err == nil
	})
}

// missingChannel returns an error if an IMEX channel is required and does not exist.
func (o Options) missingChannel(devRoot string) error {
	for _, channel := range o.Extras.IMEXChannels {
		if o.Extras.IMEXRequired && !o.hasExtra(devRoot, imexChannel(channel)) {
			// The words of NVIDIA's device plugin.
			return fmt.Errorf("requested IMEX channel channel%d does not exist", channel)
		}
	}
	return nil
}

// addExtra adds the devices of one of nvcdi's modes, from the first root that has any.
func (n *Node) addExtra(ctx context.Context, at attachment, to *specs.ContainerEdits, e extra) error {
	var last error
	for _, root := range extraRoots(at.layout.devRoot) {
		lib, err := nvcdi.New(
			nvcdi.WithLogger(toolkitLogger{klog.FromContext(ctx).V(6)}), nvcdi.WithMode(e.mode), nvcdi.WithNvmlLib(at.session.library),
			nvcdi.WithDriverRoot(n.options.onHost(at.layout.driverRoot)), nvcdi.WithDevRoot(n.options.onHost(root)),
			nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
		)
		if err != nil {
			return err
		}
		found, err := lib.GetDeviceSpecsByID(e.id)
		last = err
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
	return last
}
