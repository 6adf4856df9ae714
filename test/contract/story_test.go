// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	gpunode "github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/pkg/driver"
	"github.com/tandem-gpu/tandem/simulated"
	"github.com/tandem-gpu/tandem/simulated/programs"
	"github.com/tandem-gpu/tandem/simulated/smi"
	"github.com/tandem-gpu/tandem/test/manifests"
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

// noDoubleOwners looks at what the runtime has given to containers, and never at the ledger.
func (s *story) noDoubleOwners() {
	s.Helper()
	if doubly := theHosts[gpuNode].doublyOwned(); len(doubly) > 0 {
		s.Fatalf("doubly owned: %v", doubly)
	}
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

// ready waits until the agents are ready again and both APIs are back.
func (s *story) ready() {
	s.Helper()
	s.await(patient, "both APIs to be back", func() error {
		ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
		defer cancel()
		return install.Ready(ctx, theCluster)
	})
}

// undo returns a function that runs once, at the latest when the story ends.
func (s *story) undo(action func() error) func() {
	var once sync.Once
	undo := func() {
		once.Do(func() {
			if err := action(); err != nil {
				s.Error(err)
			}
		})
	}
	s.Cleanup(undo)
	return undo
}

// took runs a part of a story and says how long it took.
func (s *story) took(what string, part func()) time.Duration {
	s.Helper()
	began := time.Now()
	part()
	took := time.Since(began)
	s.Logf("%s: %.1f s", what, took.Seconds())
	return took
}

// event waits for an event of the story's namespace, of the node where the kind is Node, or of our Secret, whose message has all the
// words.
func (s *story) event(kind, name, reason string, words ...string) {
	s.Helper()
	namespace := s.namespace
	switch kind {
	case "Node":
		namespace = metav1.NamespaceDefault
	case "Secret":
		namespace = install.Namespace
	}
	s.await(soon, fmt.Sprintf("event %s on %s %s", reason, kind, name), func() error {
		list, err := theClient.CoreV1().Events(namespace).List(s.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		seen := errors.New("there is none")
		for _, event := range list.Items {
			if event.InvolvedObject.Kind != kind || event.InvolvedObject.Name != name || event.Reason != reason {
				continue
			}
			if hasAll(event.Message, words) {
				return nil
			}
			seen = fmt.Errorf("it says %q, which lacks some of %q", event.Message, words)
		}
		return seen
	})
}

func hasAll(text string, words []string) bool {
	for _, word := range words {
		if !strings.Contains(text, word) {
			return false
		}
	}
	return true
}

// holdsByKind counts the records of claims and of limits in the ledger of the node.
func (s *story) holdsByKind() (claims, limits int) {
	s.Helper()
	for _, hold := range s.holds(node()) {
		if strings.HasPrefix(hold, "claim") {
			claims++
		} else {
			limits++
		}
	}
	return claims, limits
}

// wantHolds waits for so many holds in the ledger of the node.
func (s *story) wantHolds(claims, limits int) {
	s.Helper()
	s.await(soon, fmt.Sprintf("%d holds of claims and %d of limits", claims, limits), func() error {
		if gotClaims, gotLimits := s.holdsByKind(); gotClaims != claims || gotLimits != limits {
			return fmt.Errorf("%d and %d: %v", gotClaims, gotLimits, s.holds(node()))
		}
		return nil
	})
}

// noPods waits until the story has none.
func (s *story) noPods() {
	s.Helper()
	s.await(soon, "all pods to be gone", func() error {
		if pods := s.pods(); len(pods) > 0 {
			return fmt.Errorf("%d pods", len(pods))
		}
		return nil
	})
}

// occupy starts two pods of each kind and answers which GPUs each sees.
func (s *story) occupy() map[string][]int {
	s.Helper()
	s.manifest(manifests.SingleTemplate)
	for i := range 2 {
		s.manifest(manifests.Pod("claim", fmt.Sprintf("claim-%d", i)))
		s.manifest(manifests.Pod("limit", fmt.Sprintf("limit-%d", i)))
		s.running(soon, 2*i+2, 0)
	}
	return s.seen()
}

func (s *story) seen() map[string][]int {
	s.Helper()
	seen := map[string][]int{}
	for _, pod := range s.pods() {
		seen[pod.Name] = s.gpus(pod.Name, "")
	}
	return seen
}

// containers are the IDs and start times of all containers of the story's pods.
func (s *story) containers() map[string]string {
	s.Helper()
	found := map[string]string{}
	for _, pod := range s.pods() {
		for _, status := range pod.Status.ContainerStatuses {
			if status.State.Running != nil {
				found[pod.Name] = status.ContainerID + " since " + status.State.Running.StartedAt.String()
			}
		}
	}
	return found
}

// unchanged checks that these containers run as they did, on the GPUs they had.
func (s *story) unchanged(containers map[string]string, gpus map[string][]int) {
	s.Helper()
	if now := s.containers(); !maps.Equal(containers, now) {
		s.Errorf("containers were %v, are %v", containers, now)
	}
	if now := s.seen(); !maps.EqualFunc(gpus, now, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", gpus, now)
	}
	s.noDoubleOwners()
}

func (s *story) deleteAll() {
	s.Helper()
	s.kubectl("delete", "deployment,pod,resourceclaim", "--all", "-n", s.namespace, "--now")
}

func gpuName[N ~int | ~uint32 | ~int64 | ~uint64](minor N) string {
	return fmt.Sprintf("gpu-%d", minor)
}

// machine is the directory of the node's simulated machine, from outside.
func (s *story) machine() string {
	s.Helper()
	root, err := node().Root()
	if err != nil {
		s.Fatal(err)
	}
	return filepath.Join(root, simulatedMachine)
}

// file reads a file of the node.
func (s *story) file(path string) ([]byte, error) {
	root, err := node().Root()
	if err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(root, path))
}

// gpuNodeObject is the node's current GPUNode.
func (s *story) gpuNodeObject() (gpunode.GPUNode, error) {
	var object gpunode.GPUNode
	text, err := theClient.Discovery().RESTClient().Get().
		AbsPath("/apis", gpunode.GroupVersion.Group, gpunode.GroupVersion.Version, gpunode.Resource.Resource, gpuNode).DoRaw(s.ctx)
	if err == nil {
		err = json.Unmarshal(text, &object)
	}
	return object, err
}

// installed upgrades to values of examples/ and others above them; the story's end takes that back.
func (s *story) installed(file string, values ...string) {
	s.Helper()
	s.installedFrom(filepath.Join("..", "..", "examples", file), values...)
}

// installedFrom is installed with a file from anywhere.
func (s *story) installedFrom(file string, values ...string) {
	s.Helper()
	s.undo(func() error {
		return install.Tandem(context.WithoutCancel(s.ctx), theCluster, install.Options{Image: noImage, Values: installValues})
	})
	// Not every mode offers what the installation waits for.
	err := install.Tandem(s.ctx, theCluster, install.Options{Image: noImage,
		Detached: true, ValuesFiles: []string{file}, Values: append(values, installValues...),
	})
	if err != nil {
		s.Fatal(err)
	}
	s.rolledOut()
}

// rolledOut waits until every agent is the DaemonSet's latest and is ready.
func (s *story) rolledOut() {
	s.Helper()
	s.kubectl("rollout", "status", "daemonset/"+install.Release, "-n", install.Namespace, "--timeout=2m")
}

// values installs with others than usual until the story ends.
func (s *story) values(values ...string) {
	s.Helper()
	if err := install.Tandem(s.ctx, theCluster, install.Options{Image: noImage, Values: append(slices.Clone(installValues), values...)}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if err := install.Tandem(s.ctx, theCluster, install.Options{Image: noImage, Values: installValues}); err != nil {
			s.Error(err)
		}
	})
}

// label sets a label of the node until the story ends.
func (s *story) label(key, value string) {
	s.Helper()
	s.undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.ctx), "label", "node", gpuNode, key+"-")
		return err
	})
	s.kubectl("label", "node", gpuNode, "--overwrite", key+"="+value)
}

// labelled gives the node a mode by its label, until the story ends.
func (s *story) labelled(mode string) {
	s.Helper()
	s.kubectl("label", "node", gpuNode, "--overwrite", modeLabel+"="+mode)
}

const modeLabel = "tandem-gpu.dev/mode"

// unlabelAtEnd comes after installed: what ends last waits for both APIs.
func (s *story) unlabelAtEnd() {
	s.undo(func() error {
		_, err := theCluster.Kubectl(context.WithoutCancel(s.ctx), "label", "node", gpuNode, modeLabel+"-")
		return err
	})
}

// served waits until the node is served in a mode: by its agent's own account, and by what each API offers. Devices that a
// claim has are still in the slices, those that a limit has still allocatable.
func (s *story) served(mode string, limits int64, claims int) {
	s.Helper()
	began := time.Now()
	s.await(patient, "mode "+mode, func() error {
		object, err := s.gpuNodeObject()
		if err == nil && object.Status.Mode != mode {
			err = fmt.Errorf("GPUNode says %q", object.Status.Mode)
		}
		return errors.Join(err, s.offeredToPods(limits), s.offeredToClaims(claims))
	})
	s.readyz(200)
	s.Logf("served in mode %s after %v", mode, time.Since(began).Round(time.Millisecond))
}

// readyz waits for an answer of the agent on the node that has all these words. Kubelet believes a failing probe only after
// several seconds, so the pod's condition does not tell.
func (s *story) readyz(status int, words ...string) {
	s.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: node().DialContext, DisableKeepAlives: true}, Timeout: 5 * time.Second}
	address := "http://" + s.agentPod(gpuNode).Status.PodIP + ":8080/readyz"
	s.await(soon, fmt.Sprintf("%s to answer %d", address, status), func() error {
		response, err := client.Get(address)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		said, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		if response.StatusCode != status || !hasAll(string(said), words) {
			return fmt.Errorf("it answers %d %q; wanted are %d and %q", response.StatusCode, said, status, words)
		}
		return nil
	})
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

// agentProcess is the agent's process on a node.
func (s *story) agentProcess(n *cluster.Node) string {
	s.Helper()
	return strings.TrimSpace(s.on(n, "pgrep", "-x", "kubelet-plugin"))
}

// killAgent ends the agent of the node with SIGKILL, and returns when kubelet has noticed.
func (s *story) killAgent() {
	s.Helper()
	restarts := s.agentRestarts()
	s.on(node(), "pkill", "-KILL", "-x", "kubelet-plugin")
	s.restarted(restarts)
}

// restarted waits until kubelet has restarted the agent once more.
func (s *story) restarted(before int32) {
	s.Helper()
	s.await(patient, "kubelet to restart the agent", func() error {
		if got := s.agentRestarts(); got <= before {
			return fmt.Errorf("%d restarts", got)
		}
		return nil
	})
}

func (s *story) agentRestarts() (total int32) {
	s.Helper()
	pods, err := s.agentPods(gpuNode)
	if err != nil {
		s.Fatal(err)
	}
	for _, pod := range pods {
		for _, status := range pod.Status.ContainerStatuses {
			total += status.RestartCount
		}
	}
	return total
}

// replaceAgent has the DaemonSet make another agent. Unlike a killed one, it starts without delay.
func (s *story) replaceAgent() {
	s.Helper()
	s.kubectl("delete", "pod", "-n", install.Namespace, s.agentPod(gpuNode).Name)
	s.rolledOut()
	s.ready()
}

// retryAgent has kubelet bring a changed configuration now, not within a minute or two.
func (s *story) retryAgent() {
	s.Helper()
	s.kubectl("annotate", "pod", "-n", install.Namespace, s.agentPod(gpuNode).Name, "--overwrite", fmt.Sprintf("look=%d", time.Now().UnixNano()))
}

// metricsText is what the agent of the node serves.
func (s *story) metricsText() string {
	s.Helper()
	text, err := theClient.Discovery().RESTClient().Get().
		AbsPath("/api/v1/namespaces", install.Namespace, "pods", s.agentPod(gpuNode).Name+":8080", "proxy/metrics").DoRaw(s.ctx)
	if err != nil {
		s.Fatal(err)
	}
	return string(text)
}

// metric of the agent of the node; zero where it has none.
func (s *story) metric(name string) float64 {
	s.Helper()
	for line := range strings.Lines(s.metricsText()) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			number, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				s.Fatalf("metric %s: %v", name, err)
			}
			return number
		}
	}
	return 0
}

// hasMetric reports whether the agent of the node has a series that begins so.
func (s *story) hasMetric(prefix string) bool {
	s.Helper()
	return strings.Contains(s.metricsText(), "\n"+prefix)
}

// countersKept reports whether the API server keeps the counters of partitionable devices, as it does by default from 1.36 on.
func (s *story) countersKept() bool {
	s.Helper()
	return s.extendedResources()
}

// extendedResources asks the API server whether it keeps a class's extended resource.
func (s *story) extendedResources() bool {
	s.Helper()
	version, err := theClient.Discovery().ServerVersion()
	if err != nil {
		s.Fatal(err)
	}
	return version.Minor >= "36"
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

// breaks puts faults of calls and clients into force on every GPU, in place of those before.
func (s *story) breaks(faults ...simulated.GPUFaults) {
	s.Helper()
	if err := simulated.WriteFaults(s.machine(), simulated.Faults{GPUs: faults}); err != nil {
		s.Error(err)
	}
}

func (s *story) administer(args ...string) {
	s.Helper()
	if _, err := s.smi(args...); err != nil {
		s.Fatal(err)
	}
}

// smi does what an administrator does with nvidia-smi.
func (s *story) smi(args ...string) (string, error) {
	s.Helper()
	var out bytes.Buffer
	if err := smi.At(s.machine(), args, &out); err != nil {
		return "", fmt.Errorf("smi %s: %w", strings.Join(args, " "), err)
	}
	return out.String(), nil
}

// uncut takes the partitions of some GPUs away, in the order in which that can be done, and MIG mode off.
func (s *story) uncut(gpus ...int) {
	for _, gpu := range gpus {
		for _, args := range [][]string{{"mig", "-dci"}, {"mig", "-dgi"}, {"-mig", "0"}} {
			if _, err := s.smi(append(args, "-i", fmt.Sprint(gpu))...); err != nil {
				s.Log(err)
			}
		}
	}
}

// published waits until the slices offer seven GPUs and partitions of these profiles.
func (s *story) published(profiles ...string) {
	s.Helper()
	began := time.Now()
	s.await(soon, fmt.Sprintf("partitions %v to be published", profiles), func() error {
		list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
		if err != nil {
			return err
		}
		var found []string
		for _, slice := range list.Items {
			for _, d := range slice.Spec.Devices {
				if profile := d.Attributes["profile"].StringValue; profile != nil && len(d.Taints) == 0 {
					found = append(found, *profile)
				}
			}
		}
		slices.Sort(found)
		if !slices.Equal(found, profiles) {
			return fmt.Errorf("%v are", found)
		}
		return s.offeredToClaims(gpusANode - 1 + len(profiles))
	})
	s.Logf("%v published %.1f s after the administrator was done", profiles, time.Since(began).Seconds())
}

// allocatable wants so much of a resource on the node.
func (s *story) allocatable(resource string, want int64) error {
	n, err := theClient.CoreV1().Nodes().Get(s.ctx, gpuNode, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if got := n.Status.Allocatable[corev1.ResourceName(resource)]; got.Value() != want {
		return fmt.Errorf("allocatable %s is %s, not %d", resource, got.String(), want)
	}
	return nil
}

// instanceIDs are the GPU instances of a profile. A line of the list is "7 MIG 3g.40gb 9 2 4:4", with the ID last but one.
func (s *story) instanceIDs(gpu, profile string) (ids []string) {
	s.Helper()
	listed, err := s.smi("mig", "-i", gpu, "-lgi")
	if err != nil {
		s.Fatal(err)
	}
	for line := range strings.Lines(listed) {
		if slices.Contains(strings.Fields(line), profile) {
			ids = append(ids, strings.Fields(line)[4])
		}
	}
	return ids
}

// withdrawn reports whether exactly these GPUs of the node are not offered to claims.
func (s *story) withdrawn(gpus ...int) error {
	want := map[string]bool{}
	for gpu := range gpusANode {
		if !slices.Contains(gpus, gpu) {
			want[fmt.Sprintf("gpu-%d", gpu)] = true
		}
	}
	list, err := theClient.ResourceV1().ResourceSlices().List(s.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + gpuNode})
	if err != nil {
		return err
	}
	offered := map[string]bool{}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			if len(d.Taints) == 0 {
				offered[d.Name] = true
			}
		}
	}
	if !maps.Equal(offered, want) {
		return fmt.Errorf("claims are offered %v, not %v", slices.Sorted(maps.Keys(offered)), slices.Sorted(maps.Keys(want)))
	}
	return nil
}

// unhealthyFor wants exactly these devices of the node's GPUNode unhealthy, each for its reason.
func (s *story) unhealthyFor(reasons map[string]string) error {
	object, err := s.gpuNodeObject()
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
	for _, name := range strings.Fields(s.on(node(), "ls", dir)) {
		if name != "log" {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		s.Fatalf("%s has records of %v", dir, found)
	}
	return filepath.Join(dir, found[0])
}

func (s *story) uuidOf(gpu int) string {
	s.Helper()
	library, err := simulated.Machine(s.machine(), func(error) {})
	if err != nil {
		s.Fatal(err)
	}
	return library.Profile().GPUs[gpu].UUID
}

// resets counts the resets of a GPU.
func (s *story) resets(uuid string) int {
	s.Helper()
	data, err := s.file(filepath.Join(simulatedMachine, simulated.MIGDir, programs.ResetsFile(uuid)))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.Fatal(err)
	}
	return strings.Count(string(data), "\n")
}

// simulatedMachine is where the chart makes the simulated machine of a node.
const simulatedMachine = "/run/nvidia/simulated"

// unschedulable waits until so many pods, and no others, wait for the scheduler, and answers what they are told.
func (s *story) unschedulable(n int) (told []string) {
	s.Helper()
	s.await(soon, "the scheduler to say why", func() error {
		told = nil
		for _, pod := range s.pods() {
			for _, c := range pod.Status.Conditions {
				if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
					told = append(told, c.Message)
				}
			}
		}
		if len(told) != n {
			return fmt.Errorf("%d pods are unschedulable", len(told))
		}
		return nil
	})
	return told
}

// same checks that these pods see the GPUs they saw.
func (s *story) same(before map[string][]int) {
	s.Helper()
	for pod, gpus := range before {
		if now := s.gpus(pod, ""); !slices.Equal(now, gpus) {
			s.Errorf("%s saw GPUs %v, now %v", pod, gpus, now)
		}
	}
}

// says waits until the claim's status tells how each of its devices is shared, by request: "MPS, limit Daemon".
func (s *story) says(claim string, want map[string]string) {
	s.Helper()
	s.await(soon, fmt.Sprintf("claim %s to say %v", claim, want), func() error {
		c := s.claim(claim)
		got := map[string]string{}
		for _, result := range c.Status.Allocation.Devices.Results {
			for _, d := range c.Status.Devices {
				if d.Device != result.Device || d.Pool != result.Pool {
					continue
				}
				reasons := map[string]string{}
				for _, condition := range d.Conditions {
					reasons[condition.Type] = condition.Reason
				}
				got[result.Request] = reasons[driver.ConditionSharing] + ", limit " + reasons[driver.ConditionMemoryLimit]
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("it says %v", got)
		}
		return nil
	})
}

// shows waits until the node's GPUNode satisfies the condition, and returns it.
func (s *story) shows(what string, condition func(gpunode.GPUNode) bool) (shown gpunode.GPUNode) {
	s.Helper()
	s.await(soon, "GPUNode to show "+what, func() (err error) {
		if shown, err = s.gpuNodeObject(); err == nil && !condition(shown) {
			err = fmt.Errorf("it has %+v", shown.Status)
		}
		return err
	})
	return shown
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

// undisturbed checks that the pods of occupy never restarted, see the same GPUs, and that both APIs still give out others.
func (s *story) undisturbed(before map[string][]int) {
	s.Helper()
	if after := s.seen(); !maps.EqualFunc(before, after, slices.Equal) {
		s.Errorf("the pods saw GPUs %v, now %v", before, after)
	}
	for _, pod := range s.pods() {
		if pod.Status.Phase != corev1.PodRunning || pod.Status.ContainerStatuses[0].RestartCount > 0 {
			s.Errorf("pod %s is %s after %d restarts", pod.Name, pod.Status.Phase, pod.Status.ContainerStatuses[0].RestartCount)
		}
	}
	s.noDoubleOwners()
	s.manifest(manifests.Pod("claim", "claim-after"))
	s.took("the next claim's pod to run", func() { s.running(patient, 5, 0) })
	s.manifest(manifests.Pod("limit", "limit-after"))
	s.running(soon, 6, 0)
	s.noDoubleOwners()
	if holds := s.holds(node()); len(holds) != 6 {
		s.Errorf("%d holds for 6 pods: %v", len(holds), holds)
	}
}
