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

// TimeSlice reads which time slice the GPU of a machine was given since the node was booted; 0, the default, where it was given none. It
// is also for somebody outside of the machine, in whose own boot that need not be.
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
