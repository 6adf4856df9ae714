// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
)

// Machine is what nvidia-smi knows of the machine, wherever it is mounted.
type Machine struct {
	DriverVersion string `json:"driverVersion"`
	CUDA          string `json:"cuda"`
	GPUs          []GPU  `json:"gpus"`
}

// GPU is one of them.
type GPU struct {
	Minor int    `json:"minor"`
	UUID  string `json:"uuid"`
	Name  string `json:"name"`
}

// trailer ends a program that has a Machine after it, and its size: readers ignore what follows an ELF file's sections.
const trailer = "simulated machine"

// For gives the program a machine.
func For(program []byte, m Machine) ([]byte, error) {
	text, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("describe the machine to its programs: %w", err)
	}
	whole := append(append([]byte(nil), program...), text...)
	return append(binary.BigEndian.AppendUint64(whole, uint64(len(text))), trailer...), nil
}

// machine is the one that this program was made for.
func machine() (Machine, error) {
	data, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return Machine{}, err
	}
	end := len(data) - len(trailer) - 8
	if end < 0 || string(data[end+8:]) != trailer {
		return Machine{}, errors.New("this program was made for no machine")
	}
	size := binary.BigEndian.Uint64(data[end:])
	if size > uint64(end) {
		return Machine{}, errors.New("what this program knows of its machine is damaged")
	}
	var m Machine
	if err := json.Unmarshal(data[end-int(size):end], &m); err != nil {
		return Machine{}, err
	}
	return m, nil
}
