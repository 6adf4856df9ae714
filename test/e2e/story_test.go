// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/test/oracle"
)

const (
	// soon is for what takes seconds; patient for what waits for kubelet's retry of a Prepare (60 to 90 s). Both count from the last
	// change of what a condition says, and a busy machine needs more than a quiet one: no story depends on how fast something is.
	soon      = 2 * time.Minute
	patient   = 4 * time.Minute
	lookAgain = 100 * time.Millisecond
	// mostPatience is how many times as long await waits in all, where a condition says something else each time.
	mostPatience = 4
	gpusANode    = 8
)

// story is one test in a namespace of its own.
type story struct {
	*testing.T
	ctx       context.Context
	namespace string
	// limits and offered are how many devices the node offers to limits and by its slices while all is free. offered is negative where
	// that depends on the version of Kubernetes.
	limits  int64
	offered int
	// daemonsStay says that MPS daemons run meanwhile.
	daemonsStay bool
}

// begin installs what the story's group says, and makes a namespace. At the end it removes the namespace and waits until all GPUs are free
// again and nothing has two owners.
func begin(t *testing.T) *story {
	t.Helper()
	ctx, cancel := context.WithCancel(theContext)
	s := &story{T: t, ctx: ctx, namespace: strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-"))}
	s.has(groupOf(t.Name()))
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
			if t.Failed() {
				theGroup = nil // the story may have left another installation
			}
		}()
		s.end()
	})
	s.unrestartedAgent()
	return s
}

func (s *story) end() {
	s.Helper()
	s.gone()
	s.allFree()
}

// gone removes the story's namespace with all that is in it.
func (s *story) gone() {
	s.Helper()
	now := int64(0)
	err := theClient.CoreV1().Namespaces().Delete(s.ctx, s.namespace, metav1.DeleteOptions{GracePeriodSeconds: &now})
	// A conflict says that it is being deleted already.
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		s.Errorf("delete namespace: %v", err)
	}
	s.await(patient, "the namespace to be gone", func() error {
		_, err := theClient.CoreV1().Namespaces().Get(s.ctx, s.namespace, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("it is there"), err)
	})
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

// never is what a condition returns that can hold no more.
type never struct{ error }

// await looks until the condition holds; what it returns last is in the failure. It gives up after so much time in which the condition has
// always said the same.
func (s *story) await(patience time.Duration, what string, condition func() error) {
	s.Helper()
	began := time.Now()
	changed, said := began, ""
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	for {
		err := condition()
		if err == nil {
			return
		}
		if now := err.Error(); now != said {
			changed, said = time.Now(), now
		}
		var hopeless never
		if errors.As(err, &hopeless) || time.Since(changed) > patience || time.Since(began) > mostPatience*patience {
			s.Fatalf("waited %s for %s: %v", time.Since(began).Round(time.Second), what, err)
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

// manifest applies text, for what no user would copy. It does without a kubectl, whose start takes longer than the request.
func (s *story) manifest(text string) {
	s.Helper()
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
	for {
		object := &unstructured.Unstructured{}
		err := decoder.Decode(&object.Object)
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			s.Fatalf("read manifest: %v\n%s", err, text)
		}
		if len(object.Object) == 0 {
			continue
		}
		kind := object.GroupVersionKind()
		mapping, err := theMapper.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			s.Fatal(err)
		}
		namespace := ""
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			namespace = cmp.Or(object.GetNamespace(), s.namespace)
		}
		_, err = theDynamic.Resource(mapping.Resource).Namespace(namespace).Apply(s.ctx, object.GetName(), object,
			metav1.ApplyOptions{FieldManager: "e2e", Force: true})
		if err != nil {
			s.Fatalf("apply %s %s: %v", kind.Kind, object.GetName(), err)
		}
	}
}

// apply does with kubectl what may be denied.
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

// log is what the only container of a pod has logged.
func (s *story) log(pod string) (string, error) {
	text, err := theClient.CoreV1().Pods(s.namespace).GetLogs(pod, &corev1.PodLogOptions{}).DoRaw(s.ctx)
	return string(text), err
}

// running waits until n pods run and, unless it is negative, others are Pending. It does not wait for pods that no component replaces.
func (s *story) running(patience time.Duration, n, pending int) {
	s.Helper()
	s.await(patience, fmt.Sprintf("%d pods to run, %d to be pending", n, pending), func() error {
		counts := map[corev1.PodPhase]int{}
		var states []string
		replaced, imageless := false, false
		for _, pod := range s.pods() {
			if pod.DeletionTimestamp != nil {
				continue
			}
			counts[pod.Status.Phase]++
			states = append(states, pod.Name+"="+string(pod.Status.Phase)+pod.Status.Reason)
			replaced = replaced || metav1.GetControllerOf(&pod) != nil
			imageless = imageless || slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
				return c.State.Waiting != nil && c.State.Waiting.Reason == "ErrImageNeverPull"
			})
		}
		if counts[corev1.PodRunning] == n && (pending < 0 || counts[corev1.PodPending] == pending) {
			return nil
		}
		err := errors.New(strings.Join(states, " "))
		if imageless || !replaced && counts[corev1.PodFailed] > 0 && counts[corev1.PodRunning]+counts[corev1.PodPending] < n {
			return never{err}
		}
		return err
	})
}

// remove deletes pods of the story, without names all, and waits until they are gone.
func (s *story) remove(names ...string) {
	s.Helper()
	var going []types.UID
	for _, pod := range s.pods() {
		if len(names) > 0 && !slices.Contains(names, pod.Name) {
			continue
		}
		going = append(going, pod.UID)
		if err := theClient.CoreV1().Pods(s.namespace).Delete(s.ctx, pod.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			s.Fatal(err)
		}
	}
	if len(going) < len(names) {
		s.Fatalf("%d of pods %v are there", len(going), names)
	}
	s.await(patient, fmt.Sprintf("pods %v to be gone", names), func() error {
		var left []string
		for _, pod := range s.pods() {
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

// gpus are the minors of the GPUs that a container sees by the device nodes in its file system. Without a name it is the pod's first.
func (s *story) gpus(pod, container string) []int {
	s.Helper()
	container = cmp.Or(container, s.pod(pod).Spec.Containers[0].Name)
	return s.sees(map[string]string{pod: container})[pod]
}

// sees are the minors of the GPUs that containers see, by their pods. A pod's container is the one that runs now.
func (s *story) sees(containers map[string]string) map[string][]int {
	s.Helper()
	var seen map[string][]int
	s.await(soon, fmt.Sprintf("processes of %v", containers), func() error {
		seen = map[string][]int{}
		for _, c := range s.picture().Containers {
			if name, wanted := containers[c.Pod]; c.Namespace != s.namespace || !wanted || c.Name != name {
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
func (s *story) holds(n *cluster.Node) (names []string) {
	s.Helper()
	root, err := n.Root()
	if err != nil {
		s.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(root, "run/tandem/holds"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Fatal(err)
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), ".") {
			names = append(names, entry.Name())
		}
	}
	return names
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
	s.await(patient, "all GPUs to be free", s.free)
}

func (s *story) free() error {
	if err := errors.Join(s.offeredToPods(s.limits), s.offeredToClaims(s.offered), s.empty()); err != nil {
		return err
	}
	return s.nothingLeft()
}

// nothingLeft is nothingShared, unless the values share GPUs whether or not a pod has one.
func (s *story) nothingLeft() error {
	if s.daemonsStay {
		return nil
	}
	return s.nothingShared()
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

// offeredToClaims wants so many claimable devices, or any number if that is negative.
func (s *story) offeredToClaims(want int) error {
	offered, err := s.claimable()
	if err == nil && want >= 0 && offered != want {
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
