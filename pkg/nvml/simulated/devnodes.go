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
	var all []file
	add := func(name string, mode os.FileMode, major, minor uint32) {
		f := file{path: path.Join(DriverDir, "dev", name), mode: mode}
		if !plain {
			f.device = &deviceNumber{major, minor}
		}
		all = append(all, f)
	}
	mig := false
	for _, g := range p.GPUs {
		add(fmt.Sprintf("nvidia%d", *g.Minor), 0o666, majorNVIDIA, uint32(*g.Minor))
		mig = mig || p.Models[g.Model].MaxMIGDevices > 0
	}
	add("nvidiactl", 0o666, majorNVIDIA, minorCtl)
	add("nvidia-modeset", 0o666, majorNVIDIA, minorModeset)
	uvm, caps := freeMajors[0], freeMajors[1]
	add("nvidia-uvm", 0o666, uvm, 0)
	add("nvidia-uvm-tools", 0o666, uvm, 1)
	if mig {
		add("nvidia-caps/nvidia-cap1", 0o400, caps, 1)
		add("nvidia-caps/nvidia-cap2", 0o444, caps, 2)
	}
	return all
}
