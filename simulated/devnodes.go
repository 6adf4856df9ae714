// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// majors are the character device majors that the machine's drivers have besides majorNVIDIA: numbers that the kernel would have
// handed out.
type majors struct{ uvm, caps, imex, other uint32 }

// freeMajorsNeeded is the number of majors that takeMajors takes.
const freeMajorsNeeded = 4

func takeMajors(free []uint32) majors {
	return majors{uvm: free[0], caps: free[1], imex: free[2], other: free[3]}
}

// deviceFiles are the nodes a loaded driver has: 195:<minor> for each GPU and the control devices beside them, those of UVM and, where
// a GPU has MIG, of the capabilities of MIG. Profile.Nodes takes from them and adds to them.
func deviceFiles(p Profile, m majors, plain bool) []file {
	node := func(name string, mode os.FileMode, major, minor uint32) file {
		f := file{path: path.Join(DriverDir, "dev", name), mode: mode}
		if !plain {
			f.device = &deviceNumber{major, minor}
		}
		return f
	}
	var all []file
	for _, g := range p.GPUs {
		all = append(all, node(gpuNode(*g.Minor), 0o666, majorNVIDIA, uint32(*g.Minor)))
	}
	all = append(all,
		node("nvidiactl", 0o666, majorNVIDIA, minorCtl),
		node("nvidia-modeset", 0o666, majorNVIDIA, minorModeset),
		node("nvidia-uvm", 0o666, m.uvm, 0),
		node("nvidia-uvm-tools", 0o666, m.uvm, 1))
	for channel := range p.Nodes.IMEXChannels {
		all = append(all, node(fmt.Sprintf("nvidia-caps-imex-channels/channel%d", channel), 0o666, m.imex, uint32(channel)))
	}
	for i, name := range p.Nodes.Other {
		all = append(all, node(name, 0o666, m.other, uint32(i)))
	}
	all = append(all, capabilityFiles(p, func(name string, mode os.FileMode, minor uint32) file {
		return node(name, mode, m.caps, minor)
	})...)
	return slices.DeleteFunc(all, func(f file) bool { return p.Nodes.lack(f.path) })
}

func gpuNode(minor int) string { return fmt.Sprintf("nvidia%d", minor) }

// lack reports whether a node of the driver root is missing.
func (n Nodes) lack(name string) bool {
	name, ok := strings.CutPrefix(name, DriverDir+"/dev/")
	return ok && slices.ContainsFunc(n.Missing, func(pattern string) bool {
		matched, _ := path.Match(pattern, name) //nolint:errcheck // validated with the profile
		return matched
	})
}

// devicesFile is proc's list of device numbers: the host's, with the machine's drivers.
func devicesFile(host []byte, p Profile, m majors) file {
	characters, rest, _ := strings.Cut(string(host), "\nBlock devices:")
	title, list, _ := strings.Cut(characters, "\n")
	lines := strings.Split(strings.TrimSpace(list), "\n")
	add := func(major uint32, name string) { lines = append(lines, fmt.Sprintf("%3d %s", major, name)) }
	add(majorNVIDIA, "nvidia")
	add(majorNVIDIA, "nvidia-modeset")
	add(majorNVIDIA, "nvidiactl")
	add(m.uvm, "nvidia-uvm")
	add(m.caps, "nvidia-caps")
	add(m.imex, "nvidia-caps-imex-channels")
	if len(p.Nodes.Other) > 0 {
		add(m.other, path.Base(p.Nodes.Other[0]))
	}
	slices.SortStableFunc(lines, func(a, b string) int { return cmp.Compare(majorOf(a), majorOf(b)) })
	content := title + "\n" + strings.Join(lines, "\n") + "\n\nBlock devices:" + rest
	return file{path: path.Join(ProcDir, "devices"), content: []byte(content), mode: 0o444}
}

// majorOf is the number that begins a line of proc's devices; 0 for another line.
func majorOf(line string) int {
	number, _, _ := strings.Cut(strings.TrimSpace(line), " ")
	major, err := strconv.Atoi(number)
	if err != nil {
		return 0
	}
	return major
}

// makeNodes makes what NVML makes of device nodes: the control device and those of GPUs, where they are missing. Without the right to
// make them it makes none.
func makeNodes(dev string, minors []int) error {
	files := []file{{path: "nvidiactl", mode: 0o666, device: &deviceNumber{majorNVIDIA, minorCtl}}}
	for _, minor := range minors {
		files = append(files, file{path: gpuNode(minor), mode: 0o666, device: &deviceNumber{majorNVIDIA, uint32(minor)}})
	}
	for _, f := range files {
		if _, err := os.Lstat(filepath.Join(dev, f.path)); err == nil {
			continue
		}
		if err := f.ensure(dev); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err
		}
	}
	return nil
}
