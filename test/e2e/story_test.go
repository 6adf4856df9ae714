// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
	"github.com/tandem-gpu/tandem/test/stories"
)

// story is one test in a namespace of its own.
type story struct{ stories.Story }

// begin installs what the story's group says, and makes a namespace. At the end it removes the namespace and waits until all GPUs are free
// again.
func begin(t *testing.T) *story {
	t.Helper()
	ctx, cancel := context.WithCancel(theContext)
	t.Cleanup(cancel)
	s := &story{stories.New(t, ctx, &thePlace)}
	s.has(groupOf(t.Name()))
	t.Cleanup(func() {
		if t.Failed() {
			theGroup = nil // the story may have left another installation
		}
	})
	s.Begin()
	s.unrestartedAgent()
	return s
}

// log is what the only container of a pod has logged.
func (s *story) log(pod string) (string, error) {
	text, err := theClient.CoreV1().Pods(s.Namespace).GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(s.Ctx)
	return string(text), err
}

// remove deletes pods of the story, without names all, and waits until they are gone.
func (s *story) remove(names ...string) {
	s.Helper()
	var going []types.UID
	for _, pod := range s.Pods() {
		if len(names) > 0 && !slices.Contains(names, pod.Name) {
			continue
		}
		going = append(going, pod.UID)
		if err := theClient.CoreV1().Pods(s.Namespace).Delete(s.Ctx, pod.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			s.Fatal(err)
		}
	}
	if len(going) < len(names) {
		s.Fatalf("%d of pods %v are there", len(going), names)
	}
	s.Await(patient, fmt.Sprintf("pods %v to be gone", names), func() error {
		var left []string
		for _, pod := range s.Pods() {
			if slices.Contains(going, pod.UID) {
				left = append(left, pod.Name)
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("there are %v", left)
		}
		return nil
	})
}

// logs logs the ends of the logs of Tandem's pods.
func logs(s *stories.Story) {
	args := []string{"logs", "-n", install.Namespace, "-l", "app.kubernetes.io/name=tandem", "--tail=40", "--prefix"}
	out, err := theCluster.Kubectl(s.Ctx, args...)
	s.Logf("kubectl %s (%v):\n%s", strings.Join(args, " "), err, out)
}

// seen is what containers see by the device nodes in their file systems.
type seen struct{}

func (seen) DoublyOwned(ctx context.Context) (doubly []string, err error) {
	picture, err := oracle.Observe(ctx, theCluster)
	if err != nil {
		return nil, err
	}
	for _, double := range picture.DoublyOwned() {
		doubly = append(doubly, fmt.Sprint(double))
	}
	return doubly, nil
}

// Of waits until all the containers run. A pod's container is the one that runs now.
func (seen) Of(s *stories.Story, containers map[string]string) map[string][]int {
	s.Helper()
	var seen map[string][]int
	s.Await(soon, fmt.Sprintf("processes of %v", containers), func() error {
		seen = map[string][]int{}
		for _, c := range (&story{*s}).picture().Containers {
			if name, wanted := containers[c.Pod]; c.Namespace != s.Namespace || !wanted || c.Name != name {
				continue
			}
			minors := []int{}
			for _, d := range c.Devices {
				minors = append(minors, d.Minor())
			}
			slices.Sort(minors)
			seen[c.Pod] = slices.Compact(minors)
		}
		if len(seen) != len(containers) {
			return fmt.Errorf("there are some of %v", slices.Sorted(maps.Keys(seen)))
		}
		return nil
	})
	return seen
}

// node is the node of most stories.
func node() *cluster.Node { return theCluster.Node(gpuNode) }
