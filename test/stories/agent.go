// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/podstatus"
)

// AgentPod is the agent's pod on a node.
func (s *Story) AgentPod(nodeName string) corev1.Pod {
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
func (s *Story) agentPods(nodeName string) ([]corev1.Pod, error) {
	list, err := s.Client.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: AgentLabel, FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// allAgentPods are the pods of the agent on all nodes.
func (s *Story) allAgentPods() []corev1.Pod {
	s.Helper()
	list, err := s.Client.CoreV1().Pods(install.Namespace).List(s.Ctx, metav1.ListOptions{LabelSelector: AgentLabel})
	if err != nil {
		s.Fatal(err)
	}
	return list.Items
}

// Agents are the UIDs of all agents' pods.
func (s *Story) Agents() (uids []types.UID) {
	s.Helper()
	for _, pod := range s.allAgentPods() {
		uids = append(uids, pod.UID)
	}
	return uids
}

// AgentProcess is the agent's process on a node.
func (s *Story) AgentProcess(n *cluster.Node) string {
	s.Helper()
	return strings.TrimSpace(s.On(n, "pgrep", "-x", "kubelet-plugin"))
}

// KillAgent ends the agent of the node with SIGKILL, and returns when kubelet has noticed.
func (s *Story) KillAgent() {
	s.Helper()
	restarts := s.AgentRestarts()
	s.On(s.Node(), "pkill", "-KILL", "-x", "kubelet-plugin")
	s.Restarted(restarts)
}

// Restarted waits until kubelet has restarted the agent once more.
func (s *Story) Restarted(before int32) {
	s.Helper()
	s.Await(Patient, "kubelet to restart the agent", func() error {
		if got := s.AgentRestarts(); got <= before {
			return fmt.Errorf("%d restarts", got)
		}
		return nil
	})
}

// AgentRestarts counts how often kubelet has restarted the containers of the agent of the node.
func (s *Story) AgentRestarts() (total int32) {
	s.Helper()
	pods, err := s.agentPods(GPUNode)
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

// ReplaceAgent has the DaemonSet make another agent. Unlike a killed one, it starts without delay.
func (s *Story) ReplaceAgent() {
	s.Helper()
	s.ReplaceAgents([]types.UID{s.AgentPod(GPUNode).UID})
	s.Ready()
}

// ReplaceAgents ends those agents that an upgrade has not replaced: kubelet brings a changed configuration within a minute or two, and a pod
// that begins has it at once.
func (s *Story) ReplaceAgents(old []types.UID) {
	s.Helper()
	for _, pod := range s.allAgentPods() {
		if slices.Contains(old, pod.UID) && pod.DeletionTimestamp == nil {
			if err := s.Client.CoreV1().Pods(pod.Namespace).Delete(s.Ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
				s.Fatal(err)
			}
		}
	}
	s.Await(Patient, "other agents to be ready", func() error {
		ready := 0
		for _, pod := range s.allAgentPods() {
			if slices.Contains(old, pod.UID) {
				return fmt.Errorf("pod %s is there", pod.Name)
			}
			if podstatus.Ready(&pod) {
				ready++
			}
		}
		if want := len(s.Cluster.Nodes()); ready != want {
			return fmt.Errorf("%d of %d are", ready, want)
		}
		return nil
	})
}

// RetryAgent has kubelet bring a changed configuration now, not within a minute or two.
func (s *Story) RetryAgent() {
	s.Helper()
	s.Kubectl("annotate", "pod", "-n", install.Namespace, s.AgentPod(GPUNode).Name, "--overwrite", fmt.Sprintf("look=%d", time.Now().UnixNano()))
}

// Ready waits until the agents are ready again and both APIs are back.
func (s *Story) Ready() {
	s.Helper()
	s.Await(Patient, "both APIs to be back", func() error {
		ctx, cancel := context.WithTimeout(s.Ctx, 5*time.Second)
		defer cancel()
		return install.Ready(ctx, s.Cluster)
	})
}

// Readyz waits for an answer of the agent on the node that has all these words. Kubelet believes a failing probe only after
// several seconds, so the pod's condition does not tell.
func (s *Story) Readyz(status int, words ...string) {
	s.Helper()
	client := http.Client{Transport: &http.Transport{DialContext: s.Node().DialContext, DisableKeepAlives: true}, Timeout: 5 * time.Second}
	address := "http://" + s.AgentPod(GPUNode).Status.PodIP + ":8080/readyz"
	s.Await(Soon, fmt.Sprintf("%s to answer %d", address, status), func() error {
		response, err := client.Get(address)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		said, err := io.ReadAll(response.Body)
		if err != nil {
			return err
		}
		if response.StatusCode != status || !HasAll(string(said), words) {
			return fmt.Errorf("it answers %d %q; wanted are %d and %q", response.StatusCode, said, status, words)
		}
		return nil
	})
}

// RolledOut waits until every agent is the DaemonSet's latest and is ready.
func (s *Story) RolledOut() {
	s.Helper()
	s.Await(Patient, "the agents to be ready", func() error {
		set, err := s.Client.AppsV1().DaemonSets(install.Namespace).Get(s.Ctx, install.Release, metav1.GetOptions{})
		if err != nil {
			return err
		}
		status, all := set.Status, set.Status.DesiredNumberScheduled
		if status.ObservedGeneration < set.Generation || all == 0 || status.UpdatedNumberScheduled < all || status.NumberAvailable < all {
			return fmt.Errorf("%d of %d are, %d are new", status.NumberAvailable, all, status.UpdatedNumberScheduled)
		}
		return nil
	})
}

// Served waits until the node is served in a mode: by its agent's own account, and by what each API offers. Devices that a
// claim has are still in the slices, those that a limit has still allocatable.
func (s *Story) Served(mode string, limits int64, claims int) {
	s.Helper()
	began := time.Now()
	s.Await(Patient, "mode "+mode, func() error {
		object, err := s.GPUNodeObject()
		if err == nil && object.Status.Mode != mode {
			err = fmt.Errorf("GPUNode says %q", object.Status.Mode)
		}
		return errors.Join(err, s.OfferedToPods(limits), s.OfferedToClaims(claims))
	})
	s.Readyz(200)
	s.Logf("served in mode %s after %v", mode, time.Since(began).Round(time.Millisecond))
}

// MetricsText is what the agent of the node serves.
func (s *Story) MetricsText() string {
	s.Helper()
	text, err := s.Client.Discovery().RESTClient().Get().
		AbsPath("/api/v1/namespaces", install.Namespace, "pods", s.AgentPod(GPUNode).Name+":8080", "proxy/metrics").DoRaw(s.Ctx)
	if err != nil {
		s.Fatal(err)
	}
	return string(text)
}

// metric of the agent of the node; zero where it has none.
func (s *Story) metric(name string) float64 {
	s.Helper()
	for line := range strings.Lines(s.MetricsText()) {
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

// RefusedPrepares counts the Prepares that the agent of the node has answered with an error.
func (s *Story) RefusedPrepares() float64 {
	s.Helper()
	return s.metric(`tandem_prepare_duration_seconds_count{result="error"}`)
}

// As returns a client with a token of a service account of Tandem. If bound is not nil, the token is bound to that pod.
func (s *Story) As(account string, bound *corev1.Pod) kubernetes.Interface {
	s.Helper()
	request := &authenticationv1.TokenRequest{}
	if bound != nil {
		request.Spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: bound.Name, UID: bound.UID}
	}
	answer, err := s.Client.CoreV1().ServiceAccounts(install.Namespace).CreateToken(s.Ctx, account, request, metav1.CreateOptions{})
	if err != nil {
		s.Fatal(err)
	}
	admin, err := s.Cluster.RESTConfig()
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
