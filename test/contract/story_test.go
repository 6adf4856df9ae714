// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
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
		{"get", "pods", "-n", install.Namespace, "-o", "wide"},
	} {
		out, err := theCluster.Kubectl(s.ctx, args...)
		s.Logf("kubectl %s (%v):\n%s", strings.Join(args, " "), err, out)
	}
	for _, node := range theCluster.Nodes() {
		s.Logf("holds on %s:\n%s", node.Name(), s.records(node))
		logs, _ := filepath.Glob(filepath.Join(theHosts[node.Name()].logs, "*.log")) // the pattern is valid
		for _, log := range logs {
			s.Logf("%s:\n%s", filepath.Base(log), tail(log, 0))
		}
		s.Logf("kubelet of %s: %v", node.Name(), theKubelets[node.Name()].Failures())
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

// gpus are the minors of the GPUs that a container has; an empty name is that of the first one.
func (s *story) gpus(pod, container string) []int {
	s.Helper()
	p := s.pod(pod)
	if container == "" {
		container = p.Spec.Containers[0].Name
	}
	minors, err := theHosts[p.Spec.NodeName].minors(p.UID, container)
	if err != nil {
		s.Fatalf("GPUs of %s: %v", pod, err)
	}
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
func (s *story) holds(n *cluster.Node) (names []string) {
	s.Helper()
	entries, err := os.ReadDir(filepath.Join(theHosts[n.Name()].root, "run/tandem/holds"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Fatal(err)
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

// records are the contents of the ledger's records on a node, for readers.
func (s *story) records(n *cluster.Node) string {
	return s.on(n, "sh", "-c", `cd /run/tandem/holds; for f in *; do [ ! -e "$f" ] || head -n 1 "$f"; done`)
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

// one is a pod that asks for one GPU by a claim or by limits.
func one(api, name string) string {
	resources, claims := "limits: {nvidia.com/gpu: 1}", ""
	if api == "claim" {
		resources = "claims: [{name: gpu}]"
		claims = "\n  resourceClaims: [{name: gpu, resourceClaimTemplateName: single}]"
	}
	return fmt.Sprintf(`
---
apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: work
    image: docker.io/library/busybox:1.37
    imagePullPolicy: Never
    command: [sleep, infinity]
    resources: {%s}%s
`, name, resources, claims)
}

func (s *story) seen() map[string][]int {
	s.Helper()
	seen := map[string][]int{}
	for _, pod := range s.pods() {
		seen[pod.Name] = s.gpus(pod.Name, "")
	}
	return seen
}

const agentLabel = "app.kubernetes.io/component=kubelet-plugin"

// agentPod is the agent's pod on a node.
func (s *story) agentPod(nodeName string) corev1.Pod {
	s.Helper()
	pods, err := s.agentPods(nodeName)
	if err != nil {
		s.Fatal(err)
	}
	if len(pods) != 1 {
		s.Fatalf("%d pods of the agent on %s", len(pods), nodeName)
	}
	return pods[0]
}

// agentPods are all pods of the agent on a node, also those that end.
func (s *story) agentPods(nodeName string) ([]corev1.Pod, error) {
	list, err := theClient.CoreV1().Pods(install.Namespace).List(s.ctx, metav1.ListOptions{LabelSelector: agentLabel, FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// as is a client with a token of the agent's account; bound is the pod that the token is bound to, or nil.
func (s *story) as(account string, bound *corev1.Pod) kubernetes.Interface {
	s.Helper()
	request := &authenticationv1.TokenRequest{}
	if bound != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: bound.Name, UID: bound.UID}
	}
	answer, err := theClient.CoreV1().ServiceAccounts(install.Namespace).CreateToken(s.ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
	admin, err := theCluster.RESTConfig()
	if err != nil {
		s.Fatal(err)
	}
	config := rest.AnonymousClientConfig(admin)
	config.BearerToken = answer.Status.Token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		s.Fatal(err)
	}
	return client
}

func (s *story) claim(name string) *resourceapi.ResourceClaim {
	s.Helper()
	claim, err := theClient.ResourceV1().ResourceClaims(s.namespace).Get(s.ctx, name, metav1.GetOptions{})
	if err != nil {
		s.Fatal(err)
	}
	return claim
}

func (s *story) nothingShared() error {
	root := theHosts[gpuNode].root
	var left []string
	for _, pattern := range []string{"run/tandem/mps/*", "run/tandem/sharing/*", "run/cdi/*-sharing-*"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return err
		}
		left = append(left, found...)
	}
	for _, pod := range s.daemons() {
		left = append(left, "pod "+pod.Name)
	}
	if len(left) > 0 {
		return fmt.Errorf("left of sharing: %v", left)
	}
	return nil
}

// daemons are the pods of MPS daemons.
func (s *story) daemons() []corev1.Pod {
	s.Helper()
	list, err := theClient.CoreV1().Pods(install.Namespace).List(s.ctx, metav1.ListOptions{LabelSelector: daemonLabel})
	if err != nil {
		s.Fatal(err)
	}
	return list.Items
}

const daemonLabel = "tandem-gpu.dev/mps-daemon"
