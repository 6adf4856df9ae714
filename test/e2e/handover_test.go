// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/programs"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestHandOver: a holder leaves a changed compute mode and a process outside its pod. The GPU is withdrawn from both APIs until the process
// has ended, and the next holder gets it as it was.
func TestHandOver(t *testing.T) {
	for _, api := range []string{"claim", "limit"} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			s.manifest(manifests.SingleTemplate)
			gpu, uuid, pid := s.leave(api)
			s.remove("last")
			s.event("Node", gpuNode, "GPUNotClean", uuid, "process "+pid+" (sleep", "withdrawn from claims and limits")
			s.await(soon, "the GPU to be withdrawn from both APIs", func() error {
				return errors.Join(s.withdrawn(gpu), s.offeredToPods(gpusANode-1))
			})
			s.on(node(), "kill", pid)
			s.allFree()
			if mode := s.computeMode(uuid); mode != 0 {
				t.Errorf("the next holder finds compute mode %d, not the default", mode)
			}
		})
	}
}

// TestReset: where the administrator asks for it, a GPU is reset between two holders, of either API.
func TestReset(t *testing.T) {
	s := begin(t)
	s.manifest(manifests.SingleTemplate)
	for i, api := range []string{"claim", "limit", "claim"} {
		name := fmt.Sprintf("%s-%d", api, i)
		s.manifest(manifests.Pod(api, name))
		s.running(patient, 1, 0)
		uuid := s.uuidOf(s.gpus(name, "")[0])
		before := s.resets(uuid)
		s.remove(name)
		s.await(soon, "a reset of the GPU of "+name, func() error {
			if now := s.resets(uuid); now <= before {
				return fmt.Errorf("%d resets, as before", now)
			}
			return nil
		})
		s.allFree()
	}
}

// leave runs a pod that leaves a changed compute mode and a process outside the pod on its GPU.
func (s *story) leave(api string) (gpu int, uuid, pid string) {
	s.Helper()
	s.manifest(manifests.Pod(api, "last"))
	s.running(soon, 1, 0)
	gpu = s.gpus("last", "")[0]
	uuid = s.uuidOf(gpu)
	s.await(soon, "the agent to record the compute mode", func() error {
		_, err := s.file(filepath.Join("/run/tandem/handover", uuid))
		return err
	})
	if _, err := s.smi("-i", uuid, "-c", "3"); err != nil {
		s.Fatal(err)
	}
	pid = strings.TrimSpace(s.on(node(), "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"))
	number, err := strconv.ParseUint(pid, 10, 32)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = simulated.WriteFaults(s.machine(), simulated.Faults{}) })
	faults := simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: uuid, Clients: []simulated.Client{{PID: uint32(number)}}}}}
	if err := simulated.WriteFaults(s.machine(), faults); err != nil {
		s.Fatal(err)
	}
	return gpu, uuid, pid
}

// file reads a file of the node.
func (s *story) file(path string) ([]byte, error) {
	root, err := node().Root()
	if err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(root, path))
}

func (s *story) uuidOf(gpu int) string {
	s.Helper()
	library, err := simulated.Machine(s.machine(), func(error) {})
	if err != nil {
		s.Fatal(err)
	}
	return library.Profile().GPUs[gpu].UUID
}

func (s *story) computeMode(uuid string) int {
	s.Helper()
	data, err := s.file(filepath.Join(simulatedMachine, simulated.MIGDir, simulated.MIGStateFile))
	var state simulated.MIGState
	if err == nil {
		err = yaml.Unmarshal(data, &state)
	}
	if err != nil {
		s.Fatal(err)
	}
	return int(state.ComputeModes[uuid])
}

// resets counts the resets of a GPU.
func (s *story) resets(uuid string) int {
	s.Helper()
	data, err := s.file(filepath.Join(simulatedMachine, simulated.MIGDir, programs.ResetsFile(uuid)))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.Fatal(err)
	}
	return strings.Count(string(data), "\n")
}
