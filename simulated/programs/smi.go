// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Exit codes of nvidia-smi (nvidia-smi(1), return value).
const (
	smiInvalid      = 2
	smiUnavailable  = 3
	smiNoPermission = 4
	smiNotFound     = 6
	smiError        = 255
)

// StateDir is the directory beside a machine's driver root in which its GPUs keep what they are told.
const StateDir = "mig"

// TimeSliceFile is the file in StateDir that has the time slice of a GPU: the boot's ID and the number.
func TimeSliceFile(uuid string) string { return "timeslice-" + uuid }

// ResetsFile is the file in StateDir with a line for each reset of a GPU: the boot's ID.
func ResetsFile(uuid string) string { return "resets-" + uuid }

// smi is nvidia-smi: it lists the GPUs and MIG devices whose device nodes are there, sets time slices, and resets GPUs.
func smi(args []string) int {
	m, err := machine()
	if err != nil {
		fmt.Fprintln(os.Stderr, "nvidia-smi:", err)
		return smiError
	}
	command := "-L"
	if len(args) > 0 {
		command = args[0]
	}
	switch command {
	case "-L", "--list-gpus":
		return list(m)
	case "--version":
		fmt.Printf("NVIDIA-SMI version  : %s (simulated)\nDRIVER version      : %s\nCUDA Version        : %s\n",
			m.DriverVersion, m.DriverVersion, m.CUDA)
		return 0
	case "compute-policy":
		return computePolicy(m, args[1:])
	case "-r", "--gpu-reset":
		return reset(m, args[1:])
	}
	fmt.Fprintln(os.Stderr, "nvidia-smi: this driver is simulated and knows only -L, --version, compute-policy and --gpu-reset")
	return smiInvalid
}

func list(m Machine) int {
	dev := filepath.Join("/", os.Getenv("SIMULATED_ROOT"), "dev") // a test's
	count := 0
	for _, g := range m.GPUs {
		if !isDevice(filepath.Join(dev, fmt.Sprintf("nvidia%d", g.Minor))) {
			continue
		}
		fmt.Printf("GPU %d: %s (UUID: %s)\n", count, g.Name, g.UUID)
		count++
		for i, line := range migDevices(filepath.Join(dev, "nvidia-caps"), g.Minor) {
			fmt.Printf("  MIG Device %d: %s\n", i, line)
		}
	}
	if count == 0 {
		fmt.Println("No devices were found")
		return smiNotFound
	}
	return 0
}

// Each GPU has 15 GPU instances of 1 + 8 capabilities, from 3 on: the first is the GPU instance's own.
const (
	firstCap    = 3
	capsOfGPU   = 135
	capsOfGPUIn = 9
)

func migDevices(dir string, minor int) []string {
	// Who has the administrator's capability has the nodes of all MIG devices that could be, which says nothing.
	if isDevice(filepath.Join(dir, "nvidia-cap1")) {
		return nil
	}
	nodes, err := filepath.Glob(filepath.Join(dir, "nvidia-cap*"))
	if err != nil {
		return nil
	}
	var caps []int
	for _, node := range nodes {
		number, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(node), "nvidia-cap"))
		if err == nil && isDevice(node) {
			caps = append(caps, number-firstCap-capsOfGPU*minor)
		}
	}
	slices.Sort(caps)
	var devices []string
	for _, c := range caps {
		if c >= 0 && c < capsOfGPU && c%capsOfGPUIn != 0 {
			devices = append(devices, fmt.Sprintf("GPU instance %d, compute instance %d", c/capsOfGPUIn, c%capsOfGPUIn-1))
		}
	}
	return devices
}

func isDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// injected plays the fault that a test has set; ok is false if the program ends with the code.
func injected(what string) (code int, ok bool) {
	switch word, text := fault(SMI); word {
	case FaultFail:
		fmt.Println(text)
		return smiError, false
	case FaultUnsupported:
		fmt.Println(what + " is not supported on this device")
		return smiUnavailable, false
	case FaultHang:
		forever()
	}
	return 0, true
}

// reset is nvidia-smi --gpu-reset -i UUID. It is only counted: nothing of a simulated GPU outlives its settings' files.
func reset(m Machine, args []string) int {
	if code, ok := injected("GPU reset"); !ok {
		return code
	}
	if len(args) != 2 || args[0] != "-i" && args[0] != "--id" {
		fmt.Println("--gpu-reset needs -i UUID")
		return smiInvalid
	}
	uuid := args[1]
	if !slices.ContainsFunc(m.GPUs, func(g GPU) bool { return g.UUID == uuid }) {
		fmt.Printf("No devices were found: %s\n", uuid)
		return smiNotFound
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		fmt.Println("Cannot reset:", err)
		return smiError
	}
	path := filepath.Join(filepath.Dir(driverRoot()), StateDir, ResetsFile(uuid))
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = file.WriteString(strings.TrimSpace(string(boot)) + "\n")
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		fmt.Println("Insufficient permissions:", err)
		return smiNoPermission
	}
	fmt.Printf("GPU %s was successfully reset.\n", uuid)
	return 0
}

// computePolicy is nvidia-smi compute-policy -i UUID --set-timeslice=N, with or without the equals sign.
func computePolicy(m Machine, args []string) int {
	if code, ok := injected("Timeslice"); !ok {
		return code
	}
	var uuid, slice string
	for i := 0; i < len(args); i++ {
		name, value, joined := strings.Cut(args[i], "=")
		if !joined && i+1 < len(args) {
			i++
			value = args[i]
		}
		switch name {
		case "-i", "--id":
			uuid = value
		case "--set-timeslice":
			slice = value
		default:
			fmt.Printf("Option %q is not recognized.\n", name)
			return smiInvalid
		}
	}
	if number, err := strconv.Atoi(slice); err != nil || number < 0 || number > 3 {
		fmt.Printf("Invalid timeslice %q: 0 (default), 1 (short), 2 (medium) or 3 (long)\n", slice)
		return smiInvalid
	}
	if !slices.ContainsFunc(m.GPUs, func(g GPU) bool { return g.UUID == uuid }) {
		fmt.Printf("No devices were found: %s\n", uuid)
		return smiNotFound
	}
	if err := setTimeSlice(uuid, slice); err != nil {
		fmt.Println("Insufficient permissions:", err)
		return smiNoPermission
	}
	fmt.Printf("Set timeslice config for GPU %s to %s\n", uuid, slice)
	return 0
}

func setTimeSlice(uuid, slice string) error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	path := filepath.Join(filepath.Dir(driverRoot()), StateDir, TimeSliceFile(uuid))
	text := strings.TrimSpace(string(boot)) + " " + slice + "\n"
	beside := path + ".new"
	if err := os.WriteFile(beside, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(beside, path)
}
