// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/simulated/programs"
)

// WriteProgramFault puts a fault of one of the driver's programs into force (programs.FaultFail and so on), in place of the one before;
// an empty one is none. The text is what the program says where it says something.
func WriteProgramFault(dir, program, fault, text string) error {
	path := filepath.Join(dir, DriverDir, programs.FaultFile(program))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("write fault of %s: %w", program, err)
	}
	return writeAtomically(path, []byte(strings.TrimSpace(fault+" "+text)+"\n"), 0o644)
}

// TimeSlice returns the time slice that was set on a GPU of a machine since the node's boot; 0, the default, if none was set. A
// process outside of the machine may call it, with another boot ID.
func TimeSlice(dir, uuid string) (int, error) {
	now := bootID()
	if state, err := readMIGState(filepath.Join(dir, MIGDir, MIGStateFile)); err == nil {
		now = state.Boot
	}
	text, err := os.ReadFile(filepath.Join(dir, programs.StateDir, programs.TimeSliceFile(uuid)))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read time slice: %w", err)
	}
	boot, slice, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	if boot != now {
		return 0, nil
	}
	return strconv.Atoi(slice)
}
