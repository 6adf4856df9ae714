// SPDX-License-Identifier: Apache-2.0

// GPUs that are plugged in while a session is open.

package nvml

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// NVML enumerates GPUs when a session begins. While the agent keeps one open, it would see no GPU that is plugged in, and no handle that works
// again of one that was removed and found again.

// hotplug compares the GPUs of the kernel's driver with those of NVML.
type hotplug struct {
	// bound are the GPUs that the kernel's driver had at the last comparison.
	bound map[string]uint64
	// pause is how many scans the comparison waits for after the last one that ended a session in vain, left how many of them are left.
	pause, left int
	// ended is when the session was last asked to end.
	ended time.Time
}

// longestPause is in scans: four minutes with the default interval. The end of a session costs something, and the driver may have a GPU that it
// cannot start, which NVML never lists.
const longestPause = 64

// replug ends the session if the driver has other GPUs than NVML lists, so that the scan begins another one. Under n.scanning.
func (n *Node) replug() {
	bound, err := n.options.boundGPUs()
	if err != nil {
		return
	}
	h := &n.hotplug
	if time.Since(h.ended) > 2*eventWait && n.session.outdated.Swap(false) {
		n.session.idle.Notify() // a use has not ended: it may hang
	}
	before := h.bound
	h.bound = bound
	switch {
	case before == nil:
		return // no scan has begun a session yet
	case !maps.Equal(before, bound):
		h.pause, h.left = 0, 0
	case n.listed(bound):
		h.pause, h.left = 0, 0
		return
	case h.left > 0:
		h.left--
		return
	}
	h.pause = min(2*h.pause+1, longestPause)
	h.left, h.ended = h.pause, time.Now()
	n.endSessionUse((*session).endSession)
}

// listed reports whether the last scan found these GPUs, by PCI address, and no others. One that NVML lists and does not identify may be any.
func (n *Node) listed(bound map[string]uint64) bool {
	found, unidentified := 0, 0
	for _, uuid := range n.places {
		switch known := n.known[uuid]; {
		case known == nil || known.gpu.PCIBusID == "":
			unidentified++
		case bound[known.gpu.PCIBusID] == 0:
			return false
		default:
			found++
		}
	}
	return found+unidentified >= len(bound)
}

// boundGPUs returns the PCI devices of the kernel's driver. The number changes when the driver lets one go and takes it again: each link in sysfs
// has an inode number of its own (moduleLoad).
func (h Host) boundGPUs() (map[string]uint64, error) {
	entries, err := os.ReadDir(filepath.Join(h.SysfsRoot, "bus/pci/drivers/nvidia"))
	if err != nil {
		return nil, err
	}
	bound := map[string]uint64{}
	for _, entry := range entries {
		if info, err := entry.Info(); err == nil && strings.Contains(entry.Name(), ":") {
			bound[entry.Name()] = info.Sys().(*syscall.Stat_t).Ino
		}
	}
	return bound, nil
}
