// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/programs"
	"github.com/tandem-gpu/tandem/test/stories"
)

// mpsClaim is a claim for the GPU of this index, whose containers are clients of MPS.
func mpsClaim(name string, gpu int) string {
	return fmt.Sprintf(`
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: gpu.nvidia.com
        selectors: [{cel: {expression: "device.attributes['gpu.nvidia.com'].index == %d"}}]
    config:
    - opaque:
        driver: gpu.nvidia.com
        parameters:
          apiVersion: resource.nvidia.com/v1beta1
          kind: GpuConfig
          sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 40}}
`, name, gpu)
}

// mpsPod has one container, which is a client as long as its daemon lives, and ends with it.
func mpsPod(name, claim string) string {
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  resourceClaims: [{name: gpu, resourceClaimName: %s}]
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [%s, client, hold]
    resources: {claims: [{name: gpu}]}
`, name, claim, program)
}

// GPUs of the claims of a row, by index.
const (
	usedGPU = iota
	leavingGPU
	comingGPU
)

// interrupted is something that ends or stops while one claim's daemon starts, another's is used, and a third's is torn down.
type interrupted struct {
	name string
	// before runs before the first claim's pod is made; nil for nothing.
	before func(s *story)
	strike func(s *story)
	// ends is set where the daemon dies, and its clients with it.
	ends bool
}

var interruptions = []interrupted{
	{name: "controller", before: (*story).stopControllers, strike: (*story).killControllers},
	{name: "agent", strike: (*story).KillAgent},
	{name: "daemon", ends: true, strike: func(s *story) {
		s.On(node(), "sh", "-c", "kill -KILL $(cat /run/tandem/mps/*/pipe/nvidia-cuda-mps-control.pid)")
	}},
	{name: "supervisor", ends: true, strike: func(s *story) { s.On(node(), "pkill", "-KILL", "-x", "mps-daemon") }},
	{name: "pods of daemons", ends: true, strike: func(s *story) {
		s.Kubectl("delete", "pod", "-n", install.Namespace, "-l", stories.DaemonLabel, "--wait=false")
	}},
	{name: "API server", strike: (*story).withoutAPIServer},
}

// TestInterruptedSharing at each step of claims under MPS: after the death of any component, pods keep running, or restart if
// their daemon died. Nothing is left, and the next claim gets the GPU.
func TestInterruptedSharing(t *testing.T) {
	s := begin(t)
	for _, row := range interruptions {
		s.Took(row.name, func() { s.interrupted(row) })
	}
	s.nextHave(usedGPU, leavingGPU, comingGPU)
}

func (s *story) interrupted(row interrupted) {
	s.Helper()
	exclusive := setting{mode: modeExclusive}
	s.Manifest(mpsClaim("used", usedGPU) + mpsClaim("leaving", leavingGPU) + mpsClaim("coming", comingGPU))
	s.Manifest(mpsPod("used-a", "used") + mpsPod("used-b", "used") + mpsPod("leaving", "leaving"))
	s.Running(patient, 3, 0)
	s.clientsOf("used-a", "used-b")
	before := s.Containers()
	delete(before, "leaving")

	// Daemons that leave commands without an answer take their time to be ready, and to end.
	if row.before != nil {
		row.before(s)
	}
	answer := s.mute()
	s.Kubectl("delete", "pod", "-n", s.Namespace, "leaving", "--wait=false")
	s.Await(soon, "the daemon of the claim that goes to be told", func() error {
		if err := s.inDaemons("leaving", "wanted")(); err == nil {
			return errors.New("it is wanted")
		}
		return nil
	})
	s.Manifest(mpsPod("coming", "coming"))
	begun := "pipe/nvidia-cuda-mps-control.pid"
	if row.before != nil {
		begun = "wanted" // no pod runs the daemon
	}
	s.Await(soon, "the daemon of the claim that comes to be begun", s.inDaemons("coming", begun))
	row.strike(s)
	answer()

	s.Readyz(200)
	s.retry("coming")
	s.Running(patient, 3, 0)
	used := func() map[string]string {
		now := s.Containers()
		delete(now, "coming")
		return now
	}
	if row.ends {
		// Pods take their time to end.
		s.Await(patient, "the clients of daemons that died to run again", func() error {
			if now := used(); len(now) < len(before) || maps.Equal(before, now) {
				return fmt.Errorf("containers were %v, are %v", before, now)
			}
			return nil
		})
	}
	s.clientsOf("used-a", "used-b")
	s.clientsOf("coming")
	s.gpusAre(setting{}, map[int]setting{usedGPU: exclusive, comingGPU: exclusive})
	s.Await(soon, "the daemon of the claim that went to be gone", func() error {
		if err := s.inDaemons("leaving", "")(); err == nil {
			return errors.New("its directory is there")
		}
		return nil
	})
	s.NoDoubleOwners()
	if now := used(); !row.ends && !maps.Equal(before, now) {
		s.Errorf("%s: containers were %v, are %v", row.name, before, now)
	}
	s.Kubectl("delete", "pod,resourceclaim", "--all", "-n", s.Namespace)
	// An agent that has lost the API server for a while takes its time to see who is gone.
	s.Await(patient, "nothing to be left", func() error { return errors.Join(s.NothingShared(), s.Empty()) })
	s.gpusAre(setting{}, nil)
}

// clientsOf waits until the containers of pods are clients of one server. What runs may have to start again before.
func (s *story) clientsOf(pods ...string) {
	s.Helper()
	s.Await(patient, fmt.Sprintf("%v to be clients of MPS", pods), func() error {
		servers := map[string]bool{}
		for _, pod := range pods {
			out, err := s.tryClient(pod, "")
			if err != nil {
				return err
			}
			server, _, _ := strings.Cut(out, "\n")
			servers[server] = true
			if p := s.Pod(pod); !podstatus.Ready(p) {
				return fmt.Errorf("%s is not ready: %+v", pod, p.Status.ContainerStatuses)
			}
		}
		if len(servers) != 1 {
			return fmt.Errorf("servers: %v", slices.Sorted(maps.Keys(servers)))
		}
		return nil
	})
}

// mute keeps the daemons from answering commands, until answer is called or the story ends.
func (s *story) mute() (answer func()) {
	s.Helper()
	fault := func(word string) error {
		return simulated.WriteProgramFault(s.Machine(), programs.MPSControl, word, "")
	}
	if err := fault(programs.FaultMute); err != nil {
		s.Fatal(err)
	}
	return s.Undo(func() error { return fault("") })
}

// inDaemons is a condition: the directory of a claim's daemon on the node has this path.
func (s *story) inDaemons(claim, path string) func() error {
	s.Helper()
	return s.inDaemonsOf(string(s.Claim(claim).UID), path)
}

// inDaemonsOf is inDaemons for the daemons whose names have that prefix.
func (s *story) inDaemonsOf(holder, path string) func() error {
	return func() error {
		pattern := fmt.Sprintf("/run/tandem/mps/%s-*/%s", holder, path)
		if found := s.On(node(), "sh", "-c", "ls -d "+pattern+" || true"); found == "" {
			return fmt.Errorf("no %s", pattern)
		}
		return nil
	}
}

// nextHave has claims without parameters take these GPUs.
func (s *story) nextHave(gpus ...int) {
	s.Helper()
	for _, gpu := range gpus {
		name := fmt.Sprintf("next-%d", gpu)
		claim, _, _ := strings.Cut(mpsClaim(name, gpu), "    config:")
		s.Manifest(claim + strings.Replace(mpsPod(name, name), program+", client, hold", "sleep, infinity", 1))
	}
	s.Running(patient, len(gpus), 0)
	s.gpusAre(setting{}, nil)
}

// controllerProcesses are the controllers that run, by node.
func (s *story) controllerProcesses() map[*cluster.Node][]string {
	s.Helper()
	found := map[*cluster.Node][]string{}
	for _, n := range theCluster.Nodes() {
		if pids := strings.Fields(s.On(n, "sh", "-c", "pgrep -x controller || true")); len(pids) > 0 {
			found[n] = pids
		}
	}
	if len(found) == 0 {
		s.Fatal("no controller runs")
	}
	return found
}

// stopControllers has them do nothing until they are killed.
func (s *story) stopControllers() {
	s.Helper()
	for n, pids := range s.controllerProcesses() {
		s.On(n, "kill", append([]string{"-STOP"}, pids...)...)
	}
}

// killControllers ends them with SIGKILL, and returns when others have begun.
func (s *story) killControllers() {
	s.Helper()
	restarts := func() (total int32) {
		list, err := theClient.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: controllerLabel})
		if err != nil {
			s.Fatal(err)
		}
		for _, pod := range list.Items {
			for _, status := range pod.Status.ContainerStatuses {
				total += status.RestartCount
			}
		}
		return total
	}
	before := restarts()
	for n, pids := range s.controllerProcesses() {
		s.On(n, "kill", append([]string{"-KILL"}, pids...)...)
	}
	s.Await(soon, "kubelet to restart the controller", func() error {
		if now := restarts(); now <= before {
			return fmt.Errorf("%d restarts", now)
		}
		return nil
	})
}

// withoutAPIServer stops the API server until one claim's daemon is gone and another's is ready, neither of which needs it.
func (s *story) withoutAPIServer() {
	s.Helper()
	gone, ready := s.inDaemons("leaving", ""), s.inDaemons("coming", "ready")
	server := theCluster.Component(cluster.APIServer)
	if err := server.Stop(s.Ctx); err != nil {
		s.Fatal(err)
	}
	start := s.Undo(func() error { return server.Start(s.Ctx) })
	if err := simulated.WriteProgramFault(s.Machine(), programs.MPSControl, "", ""); err != nil {
		s.Fatal(err)
	}
	s.Await(soon, "the daemons to go and to come", func() error {
		if gone() == nil {
			return errors.New("one has not gone")
		}
		return ready()
	})
	start()
}
