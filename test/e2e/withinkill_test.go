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
	{name: "agent", strike: (*story).killAgent},
	{name: "daemon", ends: true, strike: func(s *story) {
		s.on(node(), "sh", "-c", "kill -KILL $(cat /run/tandem/mps/*/pipe/nvidia-cuda-mps-control.pid)")
	}},
	{name: "supervisor", ends: true, strike: func(s *story) { s.on(node(), "pkill", "-KILL", "-x", "mps-daemon") }},
	{name: "pods of daemons", ends: true, strike: func(s *story) {
		s.kubectl("delete", "pod", "-n", install.Namespace, "-l", daemonLabel, "--wait=false")
	}},
	{name: "API server", strike: (*story).withoutAPIServer},
}

// TestInterruptedSharing at each step of claims under MPS: after the death of any component, pods keep running, or restart if
// their daemon died. Nothing is left, and the next claim gets the GPU.
func TestInterruptedSharing(t *testing.T) {
	s := begin(t)
	for _, row := range interruptions {
		s.took(row.name, func() { s.interrupted(row) })
	}
	s.nextHave(usedGPU, leavingGPU, comingGPU)
}

func (s *story) interrupted(row interrupted) {
	s.Helper()
	exclusive := setting{mode: modeExclusive}
	s.manifest(mpsClaim("used", usedGPU) + mpsClaim("leaving", leavingGPU) + mpsClaim("coming", comingGPU))
	s.manifest(mpsPod("used-a", "used") + mpsPod("used-b", "used") + mpsPod("leaving", "leaving"))
	s.running(patient, 3, 0)
	s.clientsOf("used-a", "used-b")
	before := s.containers()
	delete(before, "leaving")

	// Daemons that leave commands without an answer take their time to be ready, and to end.
	if row.before != nil {
		row.before(s)
	}
	answer := s.mute()
	s.kubectl("delete", "pod", "-n", s.namespace, "leaving", "--wait=false")
	s.await(soon, "the daemon of the claim that goes to be told", func() error {
		if err := s.inDaemons("leaving", "wanted")(); err == nil {
			return errors.New("it is wanted")
		}
		return nil
	})
	s.manifest(mpsPod("coming", "coming"))
	begun := "pipe/nvidia-cuda-mps-control.pid"
	if row.before != nil {
		begun = "wanted" // no pod runs the daemon
	}
	s.await(soon, "the daemon of the claim that comes to be begun", s.inDaemons("coming", begun))
	row.strike(s)
	answer()

	s.readyz(200)
	s.retry("coming")
	s.running(patient, 3, 0)
	used := func() map[string]string {
		now := s.containers()
		delete(now, "coming")
		return now
	}
	if row.ends {
		// Pods take their time to end.
		s.await(patient, "the clients of daemons that died to run again", func() error {
			if now := used(); len(now) < len(before) || maps.Equal(before, now) {
				return fmt.Errorf("containers were %v, are %v", before, now)
			}
			return nil
		})
	}
	s.clientsOf("used-a", "used-b")
	s.clientsOf("coming")
	s.gpusAre(setting{}, map[int]setting{usedGPU: exclusive, comingGPU: exclusive})
	s.await(soon, "the daemon of the claim that went to be gone", func() error {
		if err := s.inDaemons("leaving", "")(); err == nil {
			return errors.New("its directory is there")
		}
		return nil
	})
	s.noDoubleOwners()
	if now := used(); !row.ends && !maps.Equal(before, now) {
		s.Errorf("%s: containers were %v, are %v", row.name, before, now)
	}
	s.kubectl("delete", "pod,resourceclaim", "--all", "-n", s.namespace)
	// An agent that has lost the API server for a while takes its time to see who is gone.
	s.await(patient, "nothing to be left", func() error { return errors.Join(s.nothingShared(), s.empty()) })
	s.gpusAre(setting{}, nil)
}

// clientsOf waits until the containers of pods are clients of one server. What runs may have to start again before.
func (s *story) clientsOf(pods ...string) {
	s.Helper()
	s.await(patient, fmt.Sprintf("%v to be clients of MPS", pods), func() error {
		servers := map[string]bool{}
		for _, pod := range pods {
			out, err := s.tryClient(pod, "")
			if err != nil {
				return err
			}
			server, _, _ := strings.Cut(out, "\n")
			servers[server] = true
			if p := s.pod(pod); !podstatus.Ready(p) {
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
		return simulated.WriteProgramFault(s.machine(), programs.MPSControl, word, "")
	}
	if err := fault(programs.FaultMute); err != nil {
		s.Fatal(err)
	}
	return s.undo(func() error { return fault("") })
}

// inDaemons is a condition: the directory of a claim's daemon on the node has this path.
func (s *story) inDaemons(claim, path string) func() error {
	s.Helper()
	return s.inDaemonsOf(string(s.claim(claim).UID), path)
}

// inDaemonsOf is inDaemons for the daemons whose names have that prefix.
func (s *story) inDaemonsOf(holder, path string) func() error {
	return func() error {
		pattern := fmt.Sprintf("/run/tandem/mps/%s-*/%s", holder, path)
		if found := s.on(node(), "sh", "-c", "ls -d "+pattern+" || true"); found == "" {
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
		s.manifest(claim + strings.Replace(mpsPod(name, name), program+", client, hold", "sleep, infinity", 1))
	}
	s.running(patient, len(gpus), 0)
	s.gpusAre(setting{}, nil)
}

// controllerProcesses are the controllers that run, by node.
func (s *story) controllerProcesses() map[*cluster.Node][]string {
	s.Helper()
	found := map[*cluster.Node][]string{}
	for _, n := range theCluster.Nodes() {
		if pids := strings.Fields(s.on(n, "sh", "-c", "pgrep -x controller || true")); len(pids) > 0 {
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
		s.on(n, "kill", append([]string{"-STOP"}, pids...)...)
	}
}

// killControllers ends them with SIGKILL, and returns when others have begun.
func (s *story) killControllers() {
	s.Helper()
	restarts := func() (total int32) {
		list, err := theClient.CoreV1().Pods(install.Namespace).List(s.ctx, metav1.ListOptions{LabelSelector: controllerLabel})
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
		s.on(n, "kill", append([]string{"-KILL"}, pids...)...)
	}
	s.await(soon, "kubelet to restart the controller", func() error {
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
	if err := server.Stop(s.ctx); err != nil {
		s.Fatal(err)
	}
	start := s.undo(func() error { return server.Start(s.ctx) })
	if err := simulated.WriteProgramFault(s.machine(), programs.MPSControl, "", ""); err != nil {
		s.Fatal(err)
	}
	s.await(soon, "the daemons to go and to come", func() error {
		if gone() == nil {
			return errors.New("one has not gone")
		}
		return ready()
	})
	start()
}
