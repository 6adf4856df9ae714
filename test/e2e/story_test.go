// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const (
	// soon is for what takes seconds; patient for what waits for kubelet's retry of a Prepare (60 to 90 s).
	soon      = time.Minute
	patient   = 150 * time.Second
	lookAgain = 100 * time.Millisecond
	gpusANode = 8
)

// story is one test in a namespace of its own.
type story struct {
	*testing.T
	ctx       context.Context
	namespace string
	// offered is how many devices the node's slices offer while all is free.
	offered int
}

// begin makes a namespace, and at the end removes it and waits until all GPUs are free again and nothing has two owners.
func begin(t *testing.T) *story {
	t.Helper()
	ctx, cancel := context.WithCancel(theContext)
	s := &story{T: t, ctx: ctx, offered: gpusANode, namespace: strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-"))}
	_, err := theClient.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("create namespace: %v", err)
	}
	t.Cleanup(func() {
		defer cancel()
		failed := t.Failed()
		if failed {
			s.explain()
		}
		defer func() {
			if t.Failed() && !failed {
				s.explain()
			}
		}()
		s.end()
	})
	s.unrestartedAgent()
	return s
}

func (s *story) end() {
	s.Helper()
	now := int64(0)
	err := theClient.CoreV1().Namespaces().Delete(s.ctx, s.namespace, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if err != nil && !apierrors.IsNotFound(err) {
		s.Errorf("delete namespace: %v", err)
	}
	s.await(patient, "the namespace to be gone", func() error {
		_, err := theClient.CoreV1().Namespaces().Get(s.ctx, s.namespace, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("it is there"), err)
	})
	s.allFree()
}

// explain logs what a reader of a failure asks first.
func (s *story) explain() {
	for _, args := range [][]string{
		{"get", "pods,resourceclaims", "-n", s.namespace, "-o", "wide"},
		{"get", "events", "-n", s.namespace, "--sort-by=.lastTimestamp"},
		{"get", "events", "-n", "default", "--field-selector=involvedObject.kind=Node"},
		{"get", "gpunodes", "-o", "yaml"},
		{"logs", "-n", install.Namespace, "-l", "app.kubernetes.io/name=tandem", "--tail=40", "--prefix"},
	} {
		out, err := theCluster.Kubectl(s.ctx, args...)
		s.Logf("kubectl %s (%v):\n%s", strings.Join(args, " "), err, out)
	}
	for _, node := range theCluster.Nodes() {
		s.Logf("holds on %s:\n%s", node.Name(), s.records(node))
	}
}

// await looks until the condition holds; what it returns last is in the failure.
func (s *story) await(patience time.Duration, what string, condition func() error) {
	s.Helper()
	deadline := time.Now().Add(patience)
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	for {
		err := condition()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("waited %s for %s: %v", patience, what, err)
		}
		select {
		case <-s.ctx.Done():
			s.Fatalf("waiting for %s: %v", what, context.Cause(s.ctx))
		case <-ticker.C:
		}
	}
}

func (s *story) kubectl(args ...string) string {
	s.Helper()
	out, err := theCluster.Kubectl(s.ctx, args...)
	if err != nil {
		s.Fatal(err)
	}
	return out
}

// example applies a file of examples/ as a user would.
func (s *story) example(name string) {
	s.Helper()
	s.kubectl("apply", "-n", s.namespace, "-f", filepath.Join("..", "..", "examples", name))
}

// manifest applies text, for what no user would copy.
func (s *story) manifest(text string) {
	s.Helper()
	if err := s.apply(text); err != nil {
		s.Fatal(err)
	}
}

// apply is manifest for what may be denied.
func (s *story) apply(text string, flags ...string) error {
	s.Helper()
	cmd, err := theCluster.Command(s.ctx, "kubectl", append([]string{"apply", "-n", s.namespace, "-f", "-"}, flags...)...)
	if err != nil {
		return err
	}
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w: %s", err, out)
	}
	return nil
}

// pods of the story, sorted by name.
func (s *story) pods() []corev1.Pod {
	s.Helper()
	list, err := theClient.CoreV1().Pods(s.namespace).List(s.ctx, metav1.ListOptions{})
	if err != nil {
		s.Fatal(err)
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return list.Items
}

func (s *story) pod(name string) *corev1.Pod {
	s.Helper()
	pod, err := theClient.CoreV1().Pods(s.namespace).Get(s.ctx, name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return pod
}

// running waits until n pods run and, unless it is negative, others are Pending.
func (s *story) running(patience time.Duration, n, pending int) {
	s.Helper()
	s.await(patience, fmt.Sprintf("%d pods to run, %d to be pending", n, pending), func() error {
		counts := map[corev1.PodPhase]int{}
		var states []string
		for _, pod := range s.pods() {
			if pod.DeletionTimestamp != nil {
				continue
			}
			counts[pod.Status.Phase]++
			states = append(states, pod.Name+"="+string(pod.Status.Phase)+pod.Status.Reason)
		}
		if counts[corev1.PodRunning] == n && (pending < 0 || counts[corev1.PodPending] == pending) {
			return nil
		}
		return errors.New(strings.Join(states, " "))
	})
}

// gpus are the minors of the GPUs that a container sees, read from inside it.
func (s *story) gpus(pod, container string) []int {
	s.Helper()
	args := []string{"exec", "-n", s.namespace, pod}
	if container != "" {
		args = append(args, "-c", container)
	}
	args = append(args, "--", "sh", "-c", "for d in /dev/nvidia[0-9]*; do [ -c $d ] && stat -c '%t %T' $d; done; true")
	var out string
	// A kubelet that has just started does not know its pods yet.
	s.await(soon, "kubelet to run a command in "+pod, func() (err error) {
		out, err = theCluster.Kubectl(s.ctx, args...)
		return err
	})
	var minors []int
	for line := range strings.Lines(out) {
		majorText, minorText, _ := strings.Cut(strings.TrimSpace(line), " ")
		major, majorErr := strconv.ParseInt(majorText, 16, 32)
		minor, minorErr := strconv.ParseInt(minorText, 16, 32)
		if majorErr != nil || minorErr != nil || major != 195 {
			s.Fatalf("device node of %s: %q", pod, line)
		}
		minors = append(minors, int(minor))
	}
	slices.Sort(minors)
	return minors
}

// node is the node of most stories.
func node() *cluster.Node { return theCluster.Node(gpuNode) }

// on runs a command on a node and answers its output.
func (s *story) on(n *cluster.Node, command string, args ...string) string {
	s.Helper()
	cmd, err := n.Command(s.ctx, command, args...)
	if err != nil {
		s.Fatal(err)
	}
	out, err := cmd.Output()
	if err != nil {
		s.Fatalf("%s %v on %s: %v", command, args, n.Name(), err)
	}
	return string(out)
}

// holds are the names of the ledger's records on a node.
func (s *story) holds(n *cluster.Node) []string {
	return strings.Fields(s.on(n, "ls", "/run/tandem/holds"))
}

// records are the contents of the ledger's records on a node, for readers.
func (s *story) records(n *cluster.Node) string {
	return s.on(n, "sh", "-c", `cd /run/tandem/holds; for f in *; do [ ! -e "$f" ] || head -n 1 "$f"; done`)
}

// noDoubleOwners asks the oracle, which looks at the containers and never at the ledger.
func (s *story) noDoubleOwners() {
	s.Helper()
	picture, err := oracle.Observe(s.ctx, theCluster)
	if err != nil {
		s.Fatalf("observe: %v", err)
	}
	if doubly := picture.DoublyOwned(); len(doubly) > 0 {
		s.Fatalf("doubly owned: %v", doubly)
	}
}

// allFree waits until kubelet offers every GPU to limits again, the slices offer every GPU to claims, the ledger is empty, and nothing
// is left of what claims' containers shared.
func (s *story) allFree() {
	s.Helper()
	s.await(patient, "all GPUs to be free", func() error {
		return errors.Join(s.offeredToPods(gpusANode), s.offeredToClaims(s.offered), s.empty(), s.nothingShared())
	})
}

func (s *story) empty() error {
	if holds := s.holds(node()); len(holds) > 0 {
		return fmt.Errorf("holds: %v", holds)
	}
	return nil
}

func (s *story) offeredToPods(want int64) error {
	n, err := theClient.CoreV1().Nodes().Get(s.ctx, gpuNode, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if got := n.Status.Allocatable[install.ResourceName]; got.Value() != want {
		return fmt.Errorf("allocatable %s is %s, not %d", install.ResourceName, got.String(), want)
	}
	return nil
}

// offeredToClaims wants so many claimable devices.
func (s *story) offeredToClaims(want int) error {
	offered, err := s.claimable()
	if err == nil && offered != want {
		err = fmt.Errorf("slices offer %d devices, not %d", offered, want)
	}
	return err
}

// claimable counts the devices of the node's slices without a taint.
func (s *story) claimable() (offered int, err error) {
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
	if err != nil {
		return 0, err
	}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) == 0 {
				offered++
			}
		}
	}
	return offered, nil
}

// ready waits until the agents are ready again and both APIs are back.
func (s *story) ready() {
	s.Helper()
	s.await(patient, "both APIs to be back", func() error {
		ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
		defer cancel()
		return install.Ready(ctx, theCluster)
	})
}
