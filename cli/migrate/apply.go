// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/internal/config"
)

// Apply carries out a plan. It stops at the first node whose move takes longer than Patience; the error says what to do. Running it again
// continues.
func (n *Nodes) Apply(ctx context.Context, p Plan) error {
	if err := p.Err(); err != nil {
		return err
	}
	for _, set := range p.sets {
		if n.Back || len(p.nodes) == 0 || set.byOperator() || set.isPatched() {
			continue
		}
		n.say("%s: excluding nodes that Tandem serves", set)
		if err := n.change(ctx, set, exclude); err != nil {
			return err
		}
	}
	move, again := n.forward, "--apply"
	if n.Back {
		move, again = n.back, "--back --apply"
	}
	for i, node := range p.nodes {
		n.say("node %s (%d of %d): moving it; %d running pods have GPUs by limits", node.name, i+1, len(p.nodes), len(node.pods))
		bounded, cancel := context.WithTimeout(ctx, n.Patience)
		err := move(bounded, p.sets, node.name)
		cancel()
		if err != nil {
			wayBack := ""
			if !n.Back {
				wayBack = ". To give the node back to NVIDIA's software, run migrate --back --apply --node=" + node.name
			}
			return fmt.Errorf("node %s: %w. The other nodes stay as they are, and running pods keep running. Remove the cause, then run migrate %s "+
				"again; it continues with this node. See `kubectl describe gpunode %s` and the log of the node's agent%s",
				node.name, err, again, node.name, wayBack)
		}
		n.say("node %s: done", node.name)
	}
	if n.Back {
		return n.restore(ctx, p.sets)
	}
	return nil
}

// restore gives NVIDIA's DaemonSets their own affinity back, once no node needs the exclusion.
func (n *Nodes) restore(ctx context.Context, sets []daemonSet) error {
	left, err := n.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: Label})
	if err != nil {
		return fmt.Errorf("list nodes: %w", err)
	}
	if len(left.Items) > 0 {
		return nil
	}
	for _, set := range sets {
		if _, changed := set.Annotations[strategyAnnotation]; !changed {
			continue
		}
		n.say("%s: restoring its affinity and update strategy", set)
		if err := n.change(ctx, set, include); err != nil {
			return err
		}
	}
	return nil
}

func (n *Nodes) forward(ctx context.Context, sets []daemonSet, name string) error {
	node, err := n.node(ctx, name)
	if err != nil {
		return err
	}
	// The plan may be out of date: earlier nodes may have taken long.
	claims, err := n.allocatedClaims(ctx)
	if err != nil {
		return err
	}
	now, err := n.planNode(ctx, sets, node, claims)
	if err != nil {
		return err
	}
	if len(now.refusals) > 0 {
		return errors.New(strings.Join(now.refusals, "; "))
	}
	// An interrupted run with Back may have changed the mode.
	labels, annotations := modeBefore(node)
	labels[Label], annotations[setsAnnotation] = withTandem, setNames(sets)
	if node.Labels[operatorLabel] == "true" && slices.ContainsFunc(sets, daemonSet.byOperator) {
		labels[operatorLabel], annotations[operatorAnnotation] = "false", "true"
	}
	if err := n.patchNode(ctx, name, labels, annotations); err != nil {
		return err
	}
	return n.await(ctx, name, func() (string, error) { return n.missing(ctx, sets, name) })
}

// missing returns what migrate waits for until a node has moved to Tandem; empty if the node has moved.
func (n *Nodes) missing(ctx context.Context, sets []daemonSet, name string) (string, error) {
	pods, err := n.podsOf(ctx, sets, name)
	if err != nil {
		return "", err
	}
	if len(pods) > 0 {
		return "NVIDIA's pods to leave: " + strings.Join(podNames(pods), ", "), nil
	}
	return n.tandemMissing(ctx, name)
}

// findAgent returns Tandem's agent on a node, nil if there is none. missing is what the agent waits for before it can serve GPUs; empty for
// nothing. Beside NVIDIA's software the agent is not ready and gives no GPU to new pods: findAgent does not check that.
func (n *Nodes) findAgent(ctx context.Context, name string) (agent *corev1.Pod, missing string, err error) {
	agent, err = n.agent(ctx, name)
	switch {
	case err != nil:
		return nil, "", err
	case agent == nil:
		return nil, "an agent of Tandem", nil
	case agent.Status.Phase != corev1.PodRunning:
		return agent, fmt.Sprintf("a running agent: pod %s/%s is %s", agent.Namespace, agent.Name, agent.Status.Phase), nil
	}
	object, err := n.gpuNode(ctx, name)
	switch {
	case err != nil:
		return nil, "", err
	case object == nil:
		return agent, "the GPUNode, which the agent creates", nil
	case object.Status.Mode == "":
		return agent, "the agent to serve GPUs: " + cmp.Or(explain.WhyUnserved(object.Status), "its GPUNode has no mode yet"), nil
	}
	return agent, "", nil
}

// tandemMissing returns what Tandem lacks to serve a node with all its running pods; empty for nothing.
func (n *Nodes) tandemMissing(ctx context.Context, name string) (string, error) {
	agent, missing, err := n.findAgent(ctx, name)
	if err != nil || missing != "" {
		return missing, err
	}
	if !isReady(agent) {
		return "Tandem's agent " + agent.Name + " to be ready", nil
	}
	object, err := n.GPUNode(ctx, name)
	if err != nil {
		return "", fmt.Errorf("get GPUNode %s: %w", name, err)
	}
	holders := map[types.UID]bool{}
	for _, d := range object.Status.Devices {
		for _, h := range d.Holders {
			for _, pod := range h.Pods {
				holders[pod.UID] = true
			}
		}
	}
	pods, err := n.limitPods(ctx, name)
	pods = slices.DeleteFunc(pods, func(pod corev1.Pod) bool { return holders[pod.UID] })
	if err != nil || len(pods) > 0 {
		return "the GPUNode to have these pods as holders: " + strings.Join(podNames(pods), ", "), err
	}
	return "", nil
}

func (n *Nodes) back(ctx context.Context, sets []daemonSet, name string) error {
	node, err := n.node(ctx, name)
	if err != nil {
		return err
	}
	if node.Labels[Label] == withTandem {
		if err := n.leave(ctx, sets, node); err != nil {
			return err
		}
	}
	if err := n.await(ctx, name, func() (string, error) { return n.nvidiaMissing(ctx, sets, name) }); err != nil {
		return fmt.Errorf("%w (its mode stays as it is, because NVIDIA's software may return at any time)", err)
	}
	if node, err = n.node(ctx, name); err != nil {
		return err
	}
	labels, annotations := modeBefore(node)
	labels[Label], annotations[setsAnnotation] = nil, nil
	return n.patchNode(ctx, name, labels, annotations)
}

// leave lets NVIDIA's software return to a node, once no claim can get a GPU there and every GPU that is used belongs to a pod that kubelet
// knows.
//
// Tandem gives GPUs to pods until NVIDIA's plugin has registered. That is safe: kubelet keeps one plugin for a resource, the one that
// registered last, and does not give a device of a living pod to another pod, whichever plugin served it. It knows devices by resource and
// ID, which checkHolders compares.
func (n *Nodes) leave(ctx context.Context, sets []daemonSet, node *corev1.Node) error {
	if err := n.prepareToLeave(ctx, sets, node); err != nil {
		return errors.Join(err, n.restoreMode(ctx, node.Name))
	}
	labels, annotations := map[string]any{Label: returning}, map[string]any{}
	if node.Annotations[operatorAnnotation] == "true" {
		labels[operatorLabel], annotations[operatorAnnotation] = "true", nil
	}
	return n.patchNode(ctx, node.Name, labels, annotations)
}

// restoreMode gives a node that stays with Tandem its mode back. ctx may be done.
func (n *Nodes) restoreMode(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restoreTimeout)
	defer cancel()
	node, err := n.node(ctx, name)
	if err != nil {
		return fmt.Errorf("restore the mode: %w", err)
	}
	labels, annotations := modeBefore(node)
	if len(annotations) == 0 {
		return nil
	}
	if err := n.patchNode(ctx, name, labels, annotations); err != nil {
		return fmt.Errorf("restore the mode: %w", err)
	}
	return nil
}

// prepareToLeave sets the mode and returns nil once NVIDIA's software can take over.
func (n *Nodes) prepareToLeave(ctx context.Context, sets []daemonSet, node *corev1.Node) error {
	agent, unseen, err := n.agentBack(ctx, node)
	if err != nil {
		return err
	}
	if unseen != "" {
		return errors.New(unseen)
	}
	noClaims := string(config.ModeDevicePluginOnly)
	if agent != nil {
		if _, saved := node.Annotations[modeAnnotation]; !saved {
			before := map[string]any{modeAnnotation: node.Labels[config.ModeLabel]}
			if err := n.patchNode(ctx, node.Name, map[string]any{config.ModeLabel: noClaims}, before); err != nil {
				return err
			}
		}
		n.say("node %s: Tandem gives no GPU to further claims", node.Name)
		err := n.await(ctx, node.Name, func() (string, error) {
			object, err := n.GPUNode(ctx, node.Name)
			if err != nil {
				return "", fmt.Errorf("get GPUNode: %w", err)
			}
			if object.Status.Mode != noClaims {
				return fmt.Sprintf("the agent to use mode %s; it is %s", noClaims, object.Status.Mode), nil
			}
			return "", nil
		})
		if err != nil {
			return err
		}
	}
	// While the node has ResourceSlices, the scheduler can allocate devices of the node to claims.
	err = n.await(ctx, node.Name, func() (string, error) {
		left, err := n.slices(ctx, node.Name)
		if err != nil || left == 0 {
			return "", err
		}
		return fmt.Sprintf("%d ResourceSlices of the node to be deleted", left), nil
	})
	if err != nil {
		return err
	}
	err = n.await(ctx, node.Name, func() (string, error) {
		ended, err := n.endedHolders(ctx, node.Name)
		if err != nil || len(ended) == 0 {
			return "", err
		}
		return "GPUs that are still used although kubelet no longer knows the pods: " + strings.Join(ended, ", "), nil
	})
	if err != nil {
		return err
	}
	claims, err := n.allocatedClaims(ctx)
	if err != nil {
		return err
	}
	if node, err = n.node(ctx, node.Name); err != nil {
		return err
	}
	if _, unseen, err = n.agentBack(ctx, node); err != nil {
		return err
	}
	refusals, err := n.checkBack(ctx, sets, node, unseen, claims)
	if err != nil {
		return err
	}
	if len(refusals) > 0 {
		return errors.New(strings.Join(refusals, "; "))
	}
	return nil
}

// agentBack returns the agent of a node that is to move back. If it finds none, unseen says what shows that Tandem serves the node
// nevertheless; it is empty if nothing does. Without the agent migrate would neither set the mode nor wait until Tandem serves nothing.
func (n *Nodes) agentBack(ctx context.Context, node *corev1.Node) (agent *corev1.Pod, unseen string, err error) {
	if agent, err = n.agent(ctx, node.Name); err != nil || agent != nil {
		return agent, "", err
	}
	object, err := n.gpuNode(ctx, node.Name)
	if err != nil {
		return nil, "", err
	}
	sign := ""
	if object != nil && object.Status.ExtendedResource != "" {
		sign = "its GPUNode offers " + object.Status.ExtendedResource
	} else if node.Labels[Label] != returning { // later they may be those of NVIDIA's DRA driver
		left, err := n.slices(ctx, node.Name)
		if err != nil {
			return nil, "", err
		}
		if left > 0 {
			sign = fmt.Sprintf("it has %d ResourceSlices of %s", left, n.DriverName)
		}
	}
	if sign == "" {
		return nil, "", nil
	}
	return nil, "no agent of Tandem is found there, although " + sign + ": " + namespaceHint +
		"; if no agent runs there any more, delete the node's ResourceSlices of " + n.DriverName + " and its GPUNode", nil
}

// modeBefore returns the changes that undo leave's change of the mode.
func modeBefore(node *corev1.Node) (labels, annotations map[string]any) {
	labels, annotations = map[string]any{}, map[string]any{}
	before, saved := node.Annotations[modeAnnotation]
	if !saved {
		return labels, annotations
	}
	annotations[modeAnnotation] = nil
	labels[config.ModeLabel] = nil
	if before != "" {
		labels[config.ModeLabel] = before
	}
	return labels, annotations
}

// nvidiaMissing returns what NVIDIA's software lacks to serve a node alone; empty for nothing.
func (n *Nodes) nvidiaMissing(ctx context.Context, sets []daemonSet, name string) (string, error) {
	node, err := n.node(ctx, name)
	if err != nil {
		return "", err
	}
	serving := false
	for _, set := range sets {
		runs, err := set.runsOn(node)
		if err != nil {
			return "", err
		}
		if !runs || set.role == mpsDaemon {
			continue
		}
		serving = true
		pods, err := n.podsOf(ctx, []daemonSet{set}, name)
		if err != nil {
			return "", err
		}
		if !slices.ContainsFunc(pods, func(pod corev1.Pod) bool { return isReady(&pod) }) {
			return "a ready pod of " + set.String(), nil
		}
	}
	if !serving {
		return "a DaemonSet of NVIDIA's whose affinity and tolerations admit the node", nil
	}
	agent, unseen, err := n.agentBack(ctx, node)
	switch {
	case err != nil:
		return "", err
	case unseen != "":
		return "Tandem's agent: " + unseen, nil
	case agent != nil && isReady(agent):
		return "Tandem's agent " + agent.Name + " to find NVIDIA's software and to serve nothing", nil
	}
	return "", nil
}

// await calls missing until nothing is missing, and prints each new reason.
func (n *Nodes) await(ctx context.Context, name string, missing func() (string, error)) error {
	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	said := ""
	for {
		what, err := missing()
		if err == nil && what == "" {
			return nil
		}
		if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			return err
		}
		if err != nil {
			what = "an answer of the API server: " + err.Error()
		}
		if ctx.Err() == nil || said == "" {
			if what != said {
				n.say("node %s: waits for %s", name, what)
			}
			said = what
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("gave up (%w) while waiting for %s", context.Cause(ctx), said)
		case <-ticker.C:
		}
	}
}
