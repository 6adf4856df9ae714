// SPDX-License-Identifier: Apache-2.0

// Package programs is what a simulated machine's driver has in usr/bin: nvidia-smi, nvidia-cuda-mps-control and nvidia-cuda-mps-server,
// one static program under three names. They run chrooted in the driver root and mounted into containers, where there may be no shell,
// no library and nothing else of the machine. Command lines, answers, files and exit codes are those of the real ones, as far as Tandem
// uses them; between control daemon, server and client they speak a protocol of their own.
package programs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Names under which the program is installed.
const (
	SMI        = "nvidia-smi"
	MPSControl = "nvidia-cuda-mps-control"
	MPSServer  = "nvidia-cuda-mps-server"
)

// Dir is where a driver root has them.
const Dir = "usr/bin"

// Run does what the program of the name args[0] does, and returns what it exits with. Only its main calls it.
func Run(args []string) int {
	switch filepath.Base(args[0]) {
	case SMI:
		return smi(args[1:])
	case MPSControl:
		return mpsControl(args[1:])
	case MPSServer:
		return mpsServer()
	}
	fmt.Fprintf(os.Stderr, "%s: its name says what it does: %s, %s or %s\n", args[0], SMI, MPSControl, MPSServer)
	return 2
}

// FaultFile is where a driver root has the fault of one of the programs: a word, and what to say.
func FaultFile(name string) string { return filepath.Join("var/lib/simulated", name+".fault") }

// Faults of the programs.
const (
	// FaultFail has nvidia-smi fail, and the control daemon end as soon as it is started.
	FaultFail = "fail"
	// FaultUnsupported has nvidia-smi say that the GPU does not have what it is asked for.
	FaultUnsupported = "unsupported"
	// FaultHang makes nvidia-smi hang, and the control daemon start and then ignore every command and signal but SIGKILL.
	FaultHang = "hang"
	// FaultMute has the control daemon leave commands without an answer.
	FaultMute = "mute"
	// FaultStubborn has the control daemon go on when it is told to quit, or gets a signal that it can ignore.
	FaultStubborn = "stubborn"
)

// fault is what is wrong with a program at this moment.
func fault(name string) (word, text string) {
	data, err := os.ReadFile(filepath.Join(driverRoot(), FaultFile(name)))
	if err != nil {
		return "", ""
	}
	word, text, _ = strings.Cut(strings.TrimSpace(string(data)), " ")
	return word, text
}

// driverRoot is the one that this program is in.
func driverRoot() string { return strings.TrimSuffix(filepath.Dir(self()), "/"+Dir) }

// self is the path of this program. In a chroot there is no proc to ask.
func self() string {
	if filepath.IsAbs(os.Args[0]) {
		return os.Args[0]
	}
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return filepath.Join(filepath.Dir(path), filepath.Base(os.Args[0]))
}

// forever is for who hangs: not a select without cases, which the runtime takes for a deadlock and ends.
func forever() {
	for {
		var buffer [1]byte
		r, w, err := os.Pipe()
		if err != nil {
			continue
		}
		_, _ = r.Read(buffer[:])
		_ = w.Close()
	}
}
