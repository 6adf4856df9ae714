// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/test/stories"
)

// The stories in this file share GPUs by the node's MPS policy.

// What examples/mps-sharing.values.yaml makes of the GPUs, by index, and what the others in examples/ ask for.
const (
	mixedGPU    = 0 // memory shares and replicas: each client limits itself
	replicasGPU = 1 // replicas: the daemon limits
	wholeGPUs   = gpusANode - 2

	gpuMiB   = 81559
	replicas = 4
	shareMiB = 16384
)

// tenants have parts of the same GPUs, in two namespaces: claims of examples/mps-shares.yaml, and limits of examples/mps-limits.yaml.
type tenants struct {
	*story
	limits *story
	uuids  []string
}

// TestMPSByPolicy: GPUs that the node shares by MPS, for claims and limits at once, whatever happens to whom, until the node shares
// them no more.
func TestMPSByPolicy(t *testing.T) {
	s := begin(t)
	w := tenants{story: s, limits: s.beside("limits"), uuids: s.uuidsInOrder()}
	w.daemonsOn(mixedGPU, replicasGPU)
	// Pods get replicas: other holders have the whole GPUs.
	w.limits.Manifest(wholeClaim("rest", wholeGPUs, fmt.Sprintf("device.attributes['gpu.nvidia.com'].index > %d", replicasGPU)))
	w.limits.Running(soon, 1, 0)
	if !s.sharesKept() {
		w.limits.Example("mps-limits.yaml")
		w.served(0, 5, w.asInstalled())
		t.Skip("this API server drops consumable capacity (Kubernetes 1.36): limits are clients, and claims have no shares")
	}
	s.Took("clients of both APIs", w.clientsOfBoth)
	s.Took("what a client can escape", w.escapes)
	s.Took("an exclusive claim", w.exclusiveClaim)
	s.Took("kills", w.kills)
	s.Took("changes of policy", w.policyChanges)
}

// clientsOfBoth: all who have a part of a GPU are clients of one daemon, and no more than fits.
func (w tenants) clientsOfBoth() {
	w.Example("mps-shares.yaml")
	w.Running(soon, 3, 0)
	w.limits.Example("mps-limits.yaml")
	if servers := w.served(3, 5, w.asInstalled()); len(servers) != 2 {
		w.Errorf("servers: %v", servers)
	}
	w.Says(w.claimOf("mps-share-of-a-user").Name, map[string]string{"gpu": "MPS, limit Client"})
	w.withinBudget(wholeGPUs + 3 + 5)

	w.scale(w.story, "mps-shares", 3)
	w.scale(w.limits, "mps-limits", 6)
	w.Running(soon, 3, 1)
	w.limits.Running(soon, 1+5, 1)
	for s, why := range map[*story]string{
		w.story:  fmt.Sprintf("no node has %d MiB left on 1 GPU: %s has %d MiB at most", shareMiB, gpuNode, gpuMiB-3*shareMiB-gpuMiB/replicas),
		w.limits: fmt.Sprintf("all %d nvidia.com/gpu of %s are held: 5 by pods, %d by claims", wholeGPUs+2*replicas, gpuNode, wholeGPUs+replicas-1),
	} {
		for _, pod := range s.Pods() {
			if pod.Status.Phase == corev1.PodPending {
				s.explains(pod, why)
			}
		}
	}
	w.scale(w.story, "mps-shares", 2)
	w.scale(w.limits, "mps-limits", 5)
	w.served(3, 5, w.asInstalled())
}

// escapes: what a process in a container can do about its limit.
func (w tenants) escapes() {
	const (
		use     = "exec " + program + " client"
		limit   = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
		refused = "Cannot find MPS control daemon process"
	)
	self, daemon := w.uuids[mixedGPU], w.uuids[replicasGPU]
	share, replica := w.find(w.story, "mps-share-of-a-user", mixedGPU), w.find(w.limits, "mps-limits", replicasGPU)
	root := w.find(w.story, "mps-shares", mixedGPU)
	for _, c := range []struct {
		of           *story
		pod          string
		script, want string
		fails        bool
	}{
		{w.limits, replica, limit + "=0=1G " + use, daemon + ": limited to 1024 MiB by the client", false},
		{w.limits, replica, limit + "=0=70G " + use, limited(daemon, gpuMiB/replicas), false},
		{w.limits, replica, "unset " + limit + "; " + use, limited(daemon, gpuMiB/replicas), false},
		{w.limits, replica, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 " + use, "Active threads: 25.0 %", false},
		{w.limits, replica, "echo set_default_device_pinned_mem_limit 0 70G | " + program, refused, true},
		{w.limits, replica, "echo quit | " + program, refused, true},
		{w.story, share, limit + "=0=70G " + use, fmt.Sprintf("%s: limited to %d MiB by the client", self, 70<<10), false},
		{w.story, share, "unset " + limit + "; " + use, self + ": no limit", false},
		{w.story, root, "(echo set_default_device_pinned_mem_limit 0 70G; echo get_default_device_pinned_mem_limit 0) | " + program, "71680M", false},
	} {
		if out, err := c.of.sh(c.pod, c.script); !strings.Contains(out, c.want) || (err != nil) != c.fails {
			w.Errorf("%s in %s: %q, %v, want %q", c.script, c.pod, out, err, c.want)
		}
	}
}

// exclusiveClaim: who has the GPU as a whole has it without a daemon, which comes back afterwards.
func (w tenants) exclusiveClaim() {
	before := w.alive()
	w.scale(w.limits, "mps-limits", 0)
	w.limits.Manifest(wholeClaim("whole", 1, fmt.Sprintf("device.attributes['gpu.nvidia.com'].index == %d", replicasGPU)))
	w.limits.Running(patient, 1+1, 0)
	w.daemonsOn(mixedGPU)
	for _, path := range []string{"wanted", "ready", "pipe/nvidia-cuda-mps-control.pid"} {
		if w.daemonOfGPU(replicasGPU, path)() == nil {
			w.Errorf("the GPU of an exclusive claim has a daemon: %s", path)
		}
	}
	if got := w.limits.GPUs("whole", ""); !slices.Equal(got, []int{replicasGPU}) {
		w.Errorf("the exclusive claim has GPUs %v", got)
	}
	if out, err := w.limits.sh("whole", "env | grep MPS || ls /tmp/nvidia-mps"); err == nil {
		w.Errorf("the exclusive claim's container is told of MPS: %s", out)
	}
	// The pod of the daemon that has ended may still be there: it is not that of the one which comes back.
	w.Kubectl("delete", "pod,resourceclaim", "-n", w.limits.Namespace, "whole")
	w.daemonsOn(mixedGPU, replicasGPU)
	w.scale(w.limits, "mps-limits", 5)
	w.served(3, 5, w.asInstalled())
	now := w.alive()
	for _, pod := range w.clientPods() {
		if title := w.Namespace + "/" + pod.Name; now[title] != before[title] {
			w.Errorf("the container of %s on another GPU was %s, is %s", pod.Name, before[title], now[title])
		}
	}
}

// kills: after the death of any component, clients keep running, or restart if their daemon died.
func (w tenants) kills() {
	servers := w.served(3, 5, w.asInstalled())
	before := w.alive()
	w.KillAgent()
	w.killControllers()
	w.Readyz(200)
	if now := w.served(3, 5, w.asInstalled()); !maps.Equal(servers, now) || !maps.Equal(before, w.alive()) {
		w.Errorf("containers were %v, clients of %v, and are %v, of %v", before, servers, w.alive(), now)
	}
	anew := func(gpus ...int) {
		w.Helper()
		w.Await(patient, fmt.Sprintf("clients of GPUs %v, and of no other, to have another server", gpus), func() error {
			now := w.served(3, 5, w.asInstalled())
			for gpu, server := range servers {
				if slices.Contains(gpus, gpu) == (now[gpu] == server) {
					return fmt.Errorf("clients of GPU %d were of %q, are of %q", gpu, server, now[gpu])
				}
			}
			servers = now
			return nil
		})
	}
	w.Took("a client that is root quits the daemon", func() {
		// Without -t, quit waits for the clients. The container of who says so ends with the daemon, and what runs in it may be killed before
		// it has ended.
		out, err := w.sh(w.find(w.story, "mps-shares", mixedGPU), "echo quit -t 1 | "+program)
		if err != nil && !strings.Contains(err.Error(), "exit code 137") {
			w.Errorf("%v: %s", err, out)
		}
		anew(mixedGPU)
	})
	w.Took("the daemon's pod is deleted", func() {
		for _, pod := range w.Daemons() {
			if strings.HasPrefix(pod.Labels[stories.DaemonLabel], strings.ToLower(w.uuids[mixedGPU])) {
				w.Kubectl("delete", "pod", "-n", install.Namespace, pod.Name, "--wait=false")
			}
		}
		anew(mixedGPU)
	})
	w.Took("a daemon dies without the API server", func() {
		server := theCluster.Component(cluster.APIServer)
		if err := server.Stop(w.Ctx); err != nil {
			w.Fatal(err)
		}
		start := w.Undo(func() error { return server.Start(w.Ctx) })
		w.On(node(), "sh", "-c", `cd /run/tandem/mps/$0-*/ && rm ready && kill -KILL $(cat pipe/nvidia-cuda-mps-control.pid)`, strings.ToLower(w.uuids[replicasGPU]))
		w.Await(soon, "the daemon to be ready again", w.daemonOfGPU(replicasGPU, "ready"))
		start()
		anew(replicasGPU)
	})
	w.daemonsOn(mixedGPU, replicasGPU)
}

// policyChanges: a policy ends with the last who has the GPU by it.
func (w tenants) policyChanges() {
	const more = 2 * replicas
	servers := w.served(3, 5, w.asInstalled())
	before := w.alive()
	w.configured(fmt.Sprintf(`{version: v1, sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: %d, devices: [%d]}]}},
		tandem: {devices: [{match: {index: %d}, sharing: {strategy: MPS, memoryShares: true, replicas: %d}}]}}`, more, replicasGPU, mixedGPU, replicas),
		map[int]int{mixedGPU: replicas, replicasGPU: more})
	if now := w.served(3, 5, w.asInstalled()); !maps.Equal(servers, now) || !maps.Equal(before, w.alive()) {
		w.Errorf("under a policy that is to change, containers were %v, are %v", before, w.alive())
	}
	w.scale(w.limits, "mps-limits", 0)
	// One is what claims leave of the other GPU.
	w.Await(soon, "replicas by the new policy", func() error { return w.OfferedToPods(more + 1) })
	w.scale(w.limits, "mps-limits", 1)
	less := map[int]string{replicasGPU: gets("daemon", w.uuids[replicasGPU], 100/more, gpuMiB/more)}
	if now := w.served(3, 1, less); now[mixedGPU] != servers[mixedGPU] {
		w.Errorf("clients of the other GPU were of %s, are of %s", servers[mixedGPU], now[mixedGPU])
	}

	before = w.alive()
	w.configured("{version: v1}", map[int]int{replicasGPU: 1}) // the replica that a pod has
	w.daemonsOn(mixedGPU, replicasGPU)
	if w.served(3, 1, less); !maps.Equal(before, w.alive()) {
		w.Errorf("under a policy that is gone, containers were %v, are %v", before, w.alive())
	}
	for _, s := range []*story{w.story, w.limits} {
		w.Kubectl("delete", "deployment,pod", "--all", "-n", s.Namespace, "--wait=false")
	}
	w.Await(patient, "nothing to be left", func() error { return errors.Join(w.NothingShared(), w.Empty()) })
	w.daemonsOn()
}

// beside is a namespace of other users, which ends before the story does.
func (s *story) beside(name string) *story {
	s.Helper()
	other := *s
	other.Namespace += "-" + name
	other.MakeNamespace()
	s.Cleanup(other.Gone)
	return &other
}

// wholeClaim is a claim for so many whole GPUs, and a pod that has them.
func wholeClaim(name string, count int, expression string) string {
	return fmt.Sprintf(`
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: %s}
spec:
  devices:
    requests:
    - name: gpu
      exactly: {deviceClassName: gpu.nvidia.com, count: %d, selectors: [{cel: {expression: "%s"}}]}
%s`, name, count, expression, strings.Replace(mpsPod(name, name), program+", client, hold", "sleep, infinity", 1))
}

// sh runs a script in a pod's container.
func (s *story) sh(pod, script string) (string, error) {
	return theCluster.Kubectl(s.Ctx, "exec", "-n", s.Namespace, pod, "--", "sh", "-c", script)
}

// configured edits the nodes' configuration, and waits until the agents say that so many replicas of GPUs are the policy, and of others
// none. A kubelet that has lost its API server for a while takes its time to look.
func (w tenants) configured(text string, want map[int]int) {
	w.Helper()
	w.configure(text)
	var looked time.Time
	w.Await(patient, fmt.Sprintf("replicas of GPUs %v", want), func() error {
		if time.Since(looked) > 5*time.Second {
			looked = time.Now()
			for _, n := range theCluster.Nodes() {
				w.Kubectl("annotate", "pod", "-n", install.Namespace, w.AgentPod(n.Name()).Name, "--overwrite", fmt.Sprintf("look=%d", looked.UnixNano()))
			}
		}
		object, err := w.GPUNodeObject()
		if err != nil {
			return err
		}
		got := map[int]int{}
		for _, d := range object.Status.Devices {
			if d.Sharing != nil && d.Sharing.Replicas > 0 {
				got[slices.Index(w.uuids, d.UUID)] = int(d.Sharing.Replicas)
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("replicas of GPUs %v", got)
		}
		return nil
	})
}

// scale leaves so many pods of a Deployment.
func (w tenants) scale(s *story, deployment string, n int) {
	w.Helper()
	w.Kubectl("scale", "-n", s.Namespace, "deployment/"+deployment, fmt.Sprint("--replicas=", n))
}

// daemonsOn waits until these GPUs have the settings of a daemon, and all others have none.
func (w tenants) daemonsOn(gpus ...int) {
	w.Helper()
	modes := map[int]setting{}
	for _, gpu := range gpus {
		modes[gpu] = setting{mode: modeExclusive}
	}
	w.gpusAre(setting{}, modes)
}

// daemonOfGPU is a condition: the directory of the daemon that a GPU has by policy has this path.
func (w tenants) daemonOfGPU(gpu int, path string) func() error {
	return w.inDaemonsOf(strings.ToLower(w.uuids[gpu]), path)
}

// clientPods are those whose containers are clients.
func (s *story) clientPods() []corev1.Pod {
	s.Helper()
	return slices.DeleteFunc(s.Pods(), func(pod corev1.Pod) bool {
		return pod.DeletionTimestamp != nil || pod.Spec.Containers[0].Command[0] != program
	})
}

// find is a client whose name begins so and that has a GPU.
func (w tenants) find(s *story, name string, gpu int) string {
	w.Helper()
	for _, pod := range s.clientPods() {
		if strings.HasPrefix(pod.Name, name) && slices.Equal(s.GPUs(pod.Name, ""), []int{gpu}) {
			return pod.Name
		}
	}
	w.Fatalf("no pod %s has GPU %d", name, gpu)
	return ""
}

// alive are the containers with GPUs that have processes, by pod: kubelet tells the API server later.
func (w tenants) alive() map[string]string {
	w.Helper()
	found := map[string]string{}
	for _, c := range w.picture().Containers {
		if len(c.Devices) > 0 {
			found[c.Title()] = c.ID
		}
	}
	return found
}

// gets is what a client reports about its part of a GPU and about its daemon.
func gets(who, uuid string, threads, mebibytes int) string {
	return fmt.Sprintf("Active threads: %d.0 %%\n%s: limited to %d MiB by the %s", threads, uuid, mebibytes, who)
}

// asInstalled is what limits get by the example, by GPU.
func (w tenants) asInstalled() map[int]string {
	return map[int]string{
		mixedGPU:    gets("client", w.uuids[mixedGPU], 100/replicas, gpuMiB/replicas),
		replicasGPU: gets("daemon", w.uuids[replicasGPU], 100/replicas, gpuMiB/replicas),
	}
}

// served waits until so many pods are clients and their logs say what they get: claims what they asked for, limits of each GPU this. All
// of a GPU are of one server, returned by GPU, and get no more than there is.
func (w tenants) served(claims, limits int, want map[int]string) (servers map[int]string) {
	w.Helper()
	w.Await(patient, fmt.Sprintf("%d claims and %d limits to be served", claims, limits), func() error {
		servers = map[int]string{}
		given := map[int]int{}
		serve := func(s *story, n int, want map[int]string) error {
			pods := s.clientPods()
			if len(pods) != n {
				return fmt.Errorf("%d pods in %s", len(pods), s.Namespace)
			}
			for _, pod := range pods {
				if !podstatus.Ready(&pod) {
					return fmt.Errorf("%s is not ready: %s %+v", pod.Name, pod.Status.Phase, pod.Status.ContainerStatuses)
				}
				log, err := s.log(pod.Name)
				if err != nil {
					return err
				}
				server, got, _ := strings.Cut(strings.TrimSpace(log), "\n")
				gpu := slices.IndexFunc(w.uuids, func(uuid string) bool { return strings.Contains(got, uuid) })
				if want[gpu] != got || gpu < 0 {
					return fmt.Errorf("%s says %q, want one of %v", pod.Name, log, want)
				}
				if other, known := servers[gpu]; known && other != server {
					return fmt.Errorf("GPU %d has clients of %s and %s", gpu, other, server)
				}
				servers[gpu] = server
				_, amount, _ := strings.Cut(got, "limited to ")
				var mebibytes int
				if _, err := fmt.Sscan(amount, &mebibytes); err != nil {
					return err
				}
				given[gpu] += mebibytes
			}
			return nil
		}
		if err := errors.Join(
			serve(w.story, claims, map[int]string{mixedGPU: gets("client", w.uuids[mixedGPU], 100, shareMiB)}),
			serve(w.limits, limits, want)); err != nil {
			return err
		}
		for gpu, sum := range given {
			if sum > gpuMiB {
				w.Fatalf("clients of GPU %d may have %d MiB of %d", gpu, sum, gpuMiB)
			}
		}
		return nil
	})
	return servers
}
