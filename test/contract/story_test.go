// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/test/stories"
)

// story is one test in a namespace of its own.
type story struct{ stories.Story }

// begin makes a namespace. At the end it removes the namespace and waits until all GPUs are free again.
func begin(t *testing.T) *story {
	t.Helper()
	ctx, cancel := context.WithCancel(theContext)
	t.Cleanup(cancel)
	s := &story{stories.New(t, ctx, &thePlace)}
	s.Begin()
	return s
}

// logs logs the ends of the logs of all programs.
func logs(s *stories.Story) {
	for name, h := range theHosts {
		files, _ := filepath.Glob(filepath.Join(h.logs, "*.log")) // the pattern is valid
		for _, file := range files {
			s.Logf("%s:\n%s", filepath.Base(file), tail(file, 0))
		}
		s.Logf("kubelet of %s: %v", name, theKubelets[name].Failures())
	}
}

// given is what the hosts have given to containers.
type given struct{}

func (given) Of(s *stories.Story, containers map[string]string) map[string][]int {
	s.Helper()
	found := map[string][]int{}
	for name, container := range containers {
		pod := s.Pod(name)
		minors, err := theHosts[pod.Spec.NodeName].minors(pod.UID, container)
		if err != nil {
			s.Fatalf("GPUs of %s: %v", name, err)
		}
		found[name] = minors
	}
	return found
}

func (given) DoublyOwned(context.Context) ([]string, error) {
	return theHosts[gpuNode].doublyOwned(), nil
}

// node is the node of most stories.
func node() *cluster.Node { return theCluster.Node(gpuNode) }

// hasMetric reports whether the agent of the node has a series that begins so.
func (s *story) hasMetric(prefix string) bool {
	s.Helper()
	return strings.Contains(s.MetricsText(), "\n"+prefix)
}

// unhealthyFor wants exactly these devices of the node's GPUNode unhealthy, each for its reason.
func (s *story) unhealthyFor(reasons map[string]string) error {
	object, err := s.GPUNodeObject()
	if err != nil {
		return err
	}
	found := map[string]string{}
	for _, d := range object.Status.Devices {
		if d.UnhealthyReason != "" {
			found[d.Name], _, _ = strings.Cut(d.UnhealthyReason, ":")
		}
	}
	if !maps.Equal(found, reasons) {
		return fmt.Errorf("unhealthy are %v, not %v", found, reasons)
	}
	return nil
}

// recordOfFaults is the path of the only GPU's record of faults on the node.
func (s *story) recordOfFaults() string {
	s.Helper()
	const dir = "/run/tandem/health"
	var found []string
	for _, name := range strings.Fields(s.On(node(), "ls", dir)) {
		if name != "log" {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		s.Fatalf("%s has records of %v", dir, found)
	}
	return filepath.Join(dir, found[0])
}
