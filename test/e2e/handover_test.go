// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/test/manifests"
	"github.com/tandem-gpu/tandem/test/stories"
)

// TestHandOver: a holder leaves a changed compute mode and a process outside its pod. The GPU is withdrawn from both APIs until the process
// has ended, and the next holder gets it as it was.
func TestHandOver(t *testing.T) {
	for _, api := range []string{"claim", "limit"} {
		t.Run(api, func(t *testing.T) {
			s := begin(t)
			s.Manifest(manifests.SingleTemplate)
			gpu, uuid, pid := s.leave(api)
			s.remove("last")
			s.Event("Node", gpuNode, "GPUNotClean", uuid, "process "+pid+" (sleep", "withdrawn from claims and limits")
			s.Await(soon, "the GPU to be withdrawn from both APIs", func() error {
				return errors.Join(s.Withdrawn(gpu), s.OfferedToPods(gpusANode-1))
			})
			s.On(node(), "kill", pid)
			s.AllFree()
			if mode := s.computeMode(uuid); mode != 0 {
				t.Errorf("the next holder finds compute mode %d, not the default", mode)
			}
		})
	}
}

// TestReset: where the administrator asks for it, a GPU is reset between two holders, of either API.
func TestReset(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate)
	for i, api := range []string{"claim", "limit", "claim"} {
		name := fmt.Sprintf("%s-%d", api, i)
		s.Manifest(manifests.Pod(api, name))
		s.Running(patient, 1, 0)
		uuid := s.UUIDOf(s.GPUs(name, "")[0])
		before := s.Resets(uuid)
		s.remove(name)
		s.Await(soon, "a reset of the GPU of "+name, func() error {
			if now := s.Resets(uuid); now <= before {
				return fmt.Errorf("%d resets, as before", now)
			}
			return nil
		})
		s.AllFree()
	}
}

// leave runs a pod that leaves a changed compute mode and a process outside the pod on its GPU.
func (s *story) leave(api string) (gpu int, uuid, pid string) {
	s.Helper()
	s.Manifest(manifests.Pod(api, "last"))
	s.Running(soon, 1, 0)
	gpu = s.GPUs("last", "")[0]
	uuid = s.UUIDOf(gpu)
	s.Await(soon, "the agent to record the compute mode", func() error {
		_, err := s.File(filepath.Join("/run/tandem/handover", uuid))
		return err
	})
	if _, err := s.SMI("-i", uuid, "-c", "3"); err != nil {
		s.Fatal(err)
	}
	pid = strings.TrimSpace(s.On(node(), "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"))
	number, err := strconv.ParseUint(pid, 10, 32)
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = simulated.WriteFaults(s.Machine(), simulated.Faults{}) })
	faults := simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: uuid, Clients: []simulated.Client{{PID: uint32(number)}}}}}
	if err := simulated.WriteFaults(s.Machine(), faults); err != nil {
		s.Fatal(err)
	}
	return gpu, uuid, pid
}

func (s *story) computeMode(uuid string) int {
	s.Helper()
	data, err := s.File(filepath.Join(stories.SimulatedMachine, simulated.MIGDir, simulated.MIGStateFile))
	var state simulated.MIGState
	if err == nil {
		err = yaml.Unmarshal(data, &state)
	}
	if err != nil {
		s.Fatal(err)
	}
	return int(state.ComputeModes[uuid])
}
