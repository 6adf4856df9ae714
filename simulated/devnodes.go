// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"fmt"
	"os"
	"path"
)

// deviceFiles are the nodes a loaded driver has: 195:<minor> for each GPU and the control devices beside them, and majors
// that the kernel would have handed out for UVM and, where a GPU has MIG, for the capabilities of MIG.
func deviceFiles(p Profile, freeMajors []uint32, plain bool) []file {
	node := func(name string, mode os.FileMode, major, minor uint32) file {
		f := file{path: path.Join(DriverDir, "dev", name), mode: mode}
		if !plain {
			f.device = &deviceNumber{major, minor}
		}
		return f
	}
	var all []file
	for _, g := range p.GPUs {
		all = append(all, node(fmt.Sprintf("nvidia%d", *g.Minor), 0o666, majorNVIDIA, uint32(*g.Minor)))
	}
	uvm, caps := freeMajors[0], freeMajors[1]
	all = append(all,
		node("nvidiactl", 0o666, majorNVIDIA, minorCtl),
		node("nvidia-modeset", 0o666, majorNVIDIA, minorModeset),
		node("nvidia-uvm", 0o666, uvm, 0),
		node("nvidia-uvm-tools", 0o666, uvm, 1))
	return append(all, capabilityFiles(p, func(name string, mode os.FileMode, minor uint32) file {
		return node(name, mode, caps, minor)
	})...)
}
