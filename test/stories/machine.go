// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/programs"
	"github.com/tandem-gpu/tandem/simulated/smi"
)

// Machine is the directory of the node's simulated machine, from outside.
func (s *Story) Machine() string {
	s.Helper()
	return s.NodePath(SimulatedMachine)
}

// SMI does what an administrator does with nvidia-smi.
func (s *Story) SMI(args ...string) (string, error) {
	s.Helper()
	var out bytes.Buffer
	if err := smi.At(s.Machine(), args, &out); err != nil {
		return "", fmt.Errorf("smi %s: %w", strings.Join(args, " "), err)
	}
	return out.String(), nil
}

// Administer is SMI for what succeeds.
func (s *Story) Administer(args ...string) {
	s.Helper()
	if _, err := s.SMI(args...); err != nil {
		s.Fatal(err)
	}
}

// Uncut takes the partitions of some GPUs away, in the order in which that can be done, and MIG mode off.
func (s *Story) Uncut(gpus ...int) {
	for _, gpu := range gpus {
		for _, args := range [][]string{{"mig", "-dci"}, {"mig", "-dgi"}, {"-mig", "0"}} {
			if _, err := s.SMI(append(args, "-i", fmt.Sprint(gpu))...); err != nil {
				s.Log(err)
			}
		}
	}
}

// InstanceIDs are the GPU instances of a profile. A line of the list is "7 MIG 3g.40gb 9 2 4:4", with the ID last but one.
func (s *Story) InstanceIDs(gpu, profile string) (ids []string) {
	s.Helper()
	listed, err := s.SMI("mig", "-i", gpu, "-lgi")
	if err != nil {
		s.Fatal(err)
	}
	for line := range strings.Lines(listed) {
		if slices.Contains(strings.Fields(line), profile) {
			ids = append(ids, strings.Fields(line)[4])
		}
	}
	return ids
}

// UUIDOf is the UUID of a GPU of the node, by its minor.
func (s *Story) UUIDOf(gpu int) string {
	s.Helper()
	library, err := simulated.Machine(s.Machine(), func(error) {})
	if err != nil {
		s.Fatal(err)
	}
	return library.Profile().GPUs[gpu].UUID
}

// Resets counts the resets of a GPU.
func (s *Story) Resets(uuid string) int {
	s.Helper()
	data, err := s.File(filepath.Join(SimulatedMachine, simulated.MIGDir, programs.ResetsFile(uuid)))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.Fatal(err)
	}
	return strings.Count(string(data), "\n")
}

// Breaks replaces the machine's faults with these. Without arguments it removes all.
func (s *Story) Breaks(faults ...simulated.GPUFaults) {
	s.Helper()
	if err := simulated.WriteFaults(s.Machine(), simulated.Faults{GPUs: faults}); err != nil {
		s.Error(err)
	}
}
