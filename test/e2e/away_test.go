// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/manifests"
)

// TestRestartsWithoutAPIServer: while the API server is away the agent is killed and comes back, and containers with GPUs end. kubelet
// starts both again, each container with its GPU. Afterwards everything goes on.
func TestRestartsWithoutAPIServer(t *testing.T) {
	s := begin(t)
	s.Manifest(manifests.SingleTemplate + manifests.Pod("claim", "claim") + manifests.Pod("limit", "limit"))
	s.Running(soon, 2, 0)
	uids := map[string]string{}
	before := map[string]string{}
	for _, pod := range s.Pods() {
		uids[pod.Name] = string(pod.UID)
		s.Await(soon, "the process of "+pod.Name, func() error {
			before[pod.Name] = s.work(uids[pod.Name])
			if _, gpu, _ := strings.Cut(before[pod.Name], " "); gpu == "" {
				return fmt.Errorf("it is %q", before[pod.Name])
			}
			return nil
		})
	}
	sockets := func() string {
		return strings.TrimSpace(s.On(node(), "sh", "-c", "ls "+devicePluginDir+" | grep tandem || true"))
	}
	socket := sockets()

	server := theCluster.Component(cluster.APIServer)
	if err := server.Stop(s.Ctx); err != nil {
		t.Fatal(err)
	}
	start := s.Undo(func() error { return server.Start(s.Ctx) })
	s.On(node(), "pkill", "-KILL", "-x", "kubelet-plugin")
	s.Took("the agent to register without the API server", func() {
		s.Await(patient, "another socket of the agent", func() error {
			if now := sockets(); now == "" || now == socket || strings.Contains(now, "\n") {
				return fmt.Errorf("sockets are %q, were %q", now, socket)
			}
			return nil
		})
	})
	for name, uid := range uids {
		pid, gpu, _ := strings.Cut(before[name], " ")
		s.On(node(), "kill", "-KILL", pid)
		s.Took("the container of "+name+" to run again", func() {
			s.Await(patient, "kubelet to start it", func() error {
				now := s.work(uid)
				nowPID, nowGPU, _ := strings.Cut(now, " ")
				if now == "" || nowPID == pid {
					return errors.New("it does not run")
				}
				if nowGPU != gpu {
					s.Fatalf("%s had GPU %q, now %q", name, gpu, nowGPU)
				}
				return nil
			})
		})
	}
	start()

	// Until kubelet reaches the API server again, the agent pod's condition and the node's allocatable are those from before the outage.
	s.Readyz(http.StatusOK)
	s.Ready()
	s.Running(patient, 2, 0)
	s.Manifest(manifests.Pod("claim", "next-claim") + manifests.Pod("limit", "next-limit"))
	s.Running(patient, 4, 0)
	s.WantHolds(2, 2)
	s.NoDoubleOwners()
	if failed := s.failed(); len(failed) > 0 {
		t.Errorf("failed: %v", failed)
	}
}

// work returns the process of a pod's container on the node, and the GPUs that it sees: "4711 nvidia3". It does not ask the API server.
// A node may have several paths to one cgroup.
func (s *story) work(uid string) string {
	s.Helper()
	return strings.TrimSpace(s.On(node(), "sh", "-c", `for f in $(find /sys/fs/cgroup -path "*$0*" -name cgroup.procs 2> /dev/null); do
		for p in $(cat $f 2> /dev/null); do
			[ "$(cat /proc/$p/comm 2> /dev/null)" = sleep ] && echo $p $(ls /proc/$p/root/dev 2> /dev/null | grep -E '^nvidia[0-9]')
		done
	done | sort -u | head -n 1`, uid))
}
