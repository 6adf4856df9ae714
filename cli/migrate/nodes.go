// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/cli/workloads"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/internal/terminal"
	"github.com/tandem-gpu/tandem/pkg/device"
)

const (
	fieldManager = "tandem-migrate"
	// lookAgain is the time between two looks at a node.
	lookAgain = time.Second
	// restoreTimeout bounds the change that restores a node's mode after the time for its move has passed.
	restoreTimeout = 10 * time.Second
	// namespaceHint is what to do where an agent may run that is not found.
	namespaceHint = "if Tandem is installed with rbac.create=false, give its namespace with --namespace"
	// operatorAnnotation of a Node says that its operatorLabel was "true" before the node moved to Tandem.
	operatorAnnotation = "tandem-gpu.dev/migrate-operator"
	// computeDomains is the second driver in the pods of NVIDIA's DRA driver, beside the driver for GPUs.
	computeDomains = "compute-domain.nvidia.com"
	// modeAnnotation of a Node keeps what its label for the mode was before --back; empty for no label.
	modeAnnotation = "tandem-gpu.dev/migrate-mode"
	// setsAnnotation of a Node that Tandem serves names the DaemonSets of NVIDIA's that left it. Tenants cannot write annotations of nodes.
	setsAnnotation = "tandem-gpu.dev/migrate-daemonsets"
	// mpsLabel of a Node says that NVIDIA's MPS daemons run there (k8s-device-plugin, cmd/config-manager and GPU Feature Discovery).
	mpsLabel = "nvidia.com/mps.capable"
)

// Nodes moves nodes between NVIDIA's software and Tandem. The state of each node is in its labels, so that a run can be interrupted and
// repeated. Two runs must not overlap.
type Nodes struct {
	Client kubernetes.Interface
	// GPUNode returns the GPUNode of a node. Its errors are those of the API.
	GPUNode func(ctx context.Context, name string) (*v1alpha1.GPUNode, error)
	// DriverName is that of Tandem and of NVIDIA's DRA driver.
	DriverName string
	// Back moves nodes to NVIDIA's software.
	Back bool
	// Only is the node to move; empty for all.
	Only string
	// DaemonSets names DaemonSets of NVIDIA's that are not found, or that only the user can tell from those of tenants.
	DaemonSets []types.NamespacedName
	// Namespace is that of Tandem's release. If it is empty, the releases are found.
	Namespace string
	// SameConfig says that NVIDIA's plugin has the sharing, the MIG strategy and the resource names of Tandem, so that kubelet knows the devices
	// of pods by the same resources and IDs. The user confirms that with Back where migrate cannot know it.
	SameConfig bool
	// Patience is how long the move of one node may take.
	Patience time.Duration
	// Progress gets a line for each step.
	Progress io.Writer
}

// Plan is what Apply would do.
type Plan struct {
	sets []daemonSet
	// doubtful are DaemonSets that look like NVIDIA's and may be those of tenants. They are left alone.
	doubtful []daemonSet
	nodes    []nodePlan
	// refusals are reasons why nothing can start.
	refusals []string
	back     bool
}

type nodePlan struct {
	name string
	// begun is set if an earlier run has labelled the node.
	begun bool
	pods  []string
	// agentless is set if no agent of Tandem is found on the node.
	agentless bool
	// refusals are reasons why this node cannot move now.
	refusals []string
}

// Err returns why Apply would refuse to start; nil if it would start.
func (p Plan) Err() error {
	var errs []error
	for _, refusal := range p.refusals {
		errs = append(errs, errors.New(explain.OneLine(refusal)))
	}
	for _, node := range p.nodes {
		for _, refusal := range node.refusals {
			errs = append(errs, fmt.Errorf("node %s: %s", node.name, explain.OneLine(refusal)))
		}
	}
	return errors.Join(errs...)
}

// String describes the plan for the user.
func (p Plan) String() string {
	var b strings.Builder
	to, steps := "Tandem", "label it "+Label+"="+withTandem+", so that NVIDIA's pods leave; wait until Tandem's agent is ready and has every running pod as a holder"
	if p.back {
		to, steps = "NVIDIA's software", "serve limits only; check that claims and pods that have ended use no GPU; remove "+Label+", so that NVIDIA's pods return; wait until they are ready and Tandem serves nothing"
	}
	fmt.Fprintf(&b, "Plan: move %d nodes to %s, one after the other. Running pods are not touched.\n", len(p.nodes), to)
	for _, set := range p.sets {
		switch {
		case set.byOperator():
			fmt.Fprintf(&b, "  %s: the node label %s keeps it off a node\n", set, operatorLabel)
		case set.isPatched():
			fmt.Fprintf(&b, "  %s: its affinity excludes nodes that Tandem serves\n", set)
		case !p.back:
			fmt.Fprintf(&b, "  %s: add %s to its affinity, and set its update strategy to OnDelete, so that no pod restarts\n", set, exclusionText)
		}
	}
	for _, set := range p.doubtful {
		fmt.Fprintf(&b, "  %s is left alone: %s\n", set, set.doubt())
	}
	if len(p.nodes) > 0 {
		fmt.Fprintf(&b, "  each node: %s\n", steps)
	}
	for _, node := range p.nodes {
		state := ""
		if node.begun {
			state = ", begun by an earlier run"
		}
		if p.back && node.agentless {
			state += ", no agent of Tandem is found, so migrate asks none to end (" + namespaceHint + ")"
		}
		fmt.Fprintf(&b, "  node %s: %d running pods with GPUs by limits%s\n", node.name, len(node.pods), state)
	}
	if err := p.Err(); err != nil {
		b.WriteString("It cannot start:\n")
		for line := range strings.Lines(err.Error()) {
			b.WriteString("  " + strings.TrimSuffix(line, "\n") + "\n")
		}
	}
	return b.String()
}

// Plan reads the cluster and changes nothing.
func (n *Nodes) Plan(ctx context.Context) (Plan, error) {
	p := Plan{back: n.Back}
	var err error
	if p.sets, p.doubtful, err = n.daemonSets(ctx); err != nil {
		return Plan{}, err
	}
	if len(p.sets) == 0 {
		p.refusals = append(p.refusals, "no DaemonSet of NVIDIA's device plugin or DRA driver was found: name it with --daemonset")
	}
	for _, set := range p.sets {
		if owner := set.owner(); !n.Back && !set.byOperator() && !set.isPatched() && owner != "" {
			p.refusals = append(p.refusals, fmt.Sprintf("%s is managed by %s, which would undo a change. Add %s to the matchExpressions of each "+
				"nodeSelectorTerm of its required node affinity there, then run this again", set, owner, exclusionText))
		}
	}
	nodes, err := n.Client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return Plan{}, fmt.Errorf("list nodes: %w", err)
	}
	claims, err := n.allocatedClaims(ctx)
	if err != nil {
		return Plan{}, err
	}
	found := false
	for i := range nodes.Items {
		node := &nodes.Items[i]
		if n.Only != "" && node.Name != n.Only {
			continue
		}
		found = true
		concerned, err := n.concerns(ctx, p.sets, node)
		if err != nil {
			return Plan{}, err
		}
		if !concerned {
			continue
		}
		if _, leaving := node.Annotations[modeAnnotation]; !n.Back && node.Labels[Label] == withTandem && !leaving {
			missing, err := n.missing(ctx, p.sets, node.Name)
			if err != nil {
				return Plan{}, err
			}
			if missing == "" {
				continue // it has moved
			}
		}
		one, err := n.planNode(ctx, p.sets, node, claims)
		if err != nil {
			return Plan{}, err
		}
		p.nodes = append(p.nodes, one)
	}
	if !found && n.Only != "" {
		return Plan{}, fmt.Errorf("node %s does not exist", n.Only)
	}
	return p, nil
}

// concerns reports whether a node has to move, or an interrupted run has not finished its move.
func (n *Nodes) concerns(ctx context.Context, sets []daemonSet, node *corev1.Node) (bool, error) {
	state, labelled := node.Labels[Label]
	if n.Back || labelled {
		return labelled && (n.Back || state == withTandem || state == returning), nil
	}
	pods, err := n.podsOf(ctx, sets, node.Name)
	return len(pods) > 0, err
}

func (n *Nodes) planNode(ctx context.Context, sets []daemonSet, node *corev1.Node, claims []resourceapi.ResourceClaim) (nodePlan, error) {
	one := nodePlan{name: node.Name, begun: node.Labels[Label] == returning || !n.Back && node.Labels[Label] == withTandem}
	pods, err := n.limitPods(ctx, node.Name)
	if err != nil {
		return nodePlan{}, err
	}
	for _, pod := range pods {
		one.pods = append(one.pods, pod.Namespace+"/"+pod.Name)
	}
	if n.Back {
		var agent *corev1.Pod
		var unseen string
		if agent, unseen, err = n.agentBack(ctx, node); err == nil {
			one.agentless = agent == nil
			one.refusals, err = n.checkBack(ctx, sets, node, unseen, claims)
		}
	} else {
		one.refusals, err = n.checkForward(ctx, sets, node, one.pods, claims)
	}
	return one, err
}

// checkForward returns why Tandem cannot take over a node.
func (n *Nodes) checkForward(
	ctx context.Context, sets []daemonSet, node *corev1.Node, pods []string, claims []resourceapi.ResourceClaim,
) (refusals []string, err error) {
	if node.Labels[Label] == withTandem {
		return nil, nil // NVIDIA's software has left, or is leaving
	}
	agent, missing, err := n.findAgent(ctx, node.Name)
	switch {
	case err != nil:
		return nil, err
	case agent == nil:
		refusals = append(refusals, "no agent of Tandem runs on this node: install Tandem's chart, with tolerations and affinity for this node; "+namespaceHint)
	case missing != "":
		refusals = append(refusals, "Tandem cannot take over this node yet: it waits for "+missing)
	}
	if slices.ContainsFunc(sets, func(d daemonSet) bool { return d.role == draDriver }) {
		if names := claimsOn(node.Name, claims, n.DriverName, computeDomains); len(names) > 0 {
			refusals = append(refusals, "NVIDIA's DRA driver serves claims, which only it can unprepare: "+strings.Join(names, ", ")+
				". Drain the node, or wait until their pods have ended")
		}
	}
	if value := node.Labels[operatorLabel]; strings.Contains(value, paused) && slices.ContainsFunc(sets, daemonSet.byOperator) {
		refusals = append(refusals, "GPU Operator has paused its device plugin there and will start it again (node label "+operatorLabel+"="+value+
			"). Wait until the label is true")
	}
	if node.Labels[mpsLabel] == "true" && len(pods) > 0 {
		refusals = append(refusals, "pods use NVIDIA's MPS daemon, which leaves the node with the plugin: "+strings.Join(pods, ", ")+
			". Drain the node, or wait until they have ended")
	}
	return refusals, nil
}

// checkBack returns why NVIDIA's software cannot take over a node: it would give away the GPUs of these holders. unseen is agentBack's.
func (n *Nodes) checkBack(
	ctx context.Context, sets []daemonSet, node *corev1.Node, unseen string, claims []resourceapi.ResourceClaim,
) (refusals []string, err error) {
	if unseen != "" {
		refusals = append(refusals, unseen)
	}
	if node.Labels[Label] == returning {
		return refusals, nil // NVIDIA's software has returned, or is returning: the claims have devices of its DRA driver
	}
	names := claimsOn(node.Name, claims, n.DriverName)
	object, err := n.GPUNode(ctx, node.Name)
	if apierrors.IsNotFound(err) {
		object = &v1alpha1.GPUNode{}
	} else if err != nil {
		return nil, fmt.Errorf("get GPUNode %s: %w", node.Name, err)
	}
	for _, d := range object.Status.Devices {
		for _, h := range d.Holders {
			if h.Kind == v1alpha1.HolderClaim {
				names = append(names, h.Namespace+"/"+h.Name)
			}
		}
	}
	slices.Sort(names)
	if names = slices.Compact(names); len(names) > 0 {
		refusals = append(refusals, "claims have GPUs, which NVIDIA's plugin would give to other pods: "+strings.Join(names, ", ")+
			". Delete their pods, or drain the node")
	}
	if len(object.Status.Daemons)+len(object.Status.UnknownDaemons) > 0 {
		refusals = append(refusals, "pods use Tandem's MPS daemons. Delete these pods, or drain the node")
	}
	more, err := n.checkHolders(sets, node, object.Status)
	return append(refusals, more...), err
}

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
		return "NVIDIA's pods to leave: " + podNames(pods), nil
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
	object, err := n.GPUNode(ctx, name)
	switch {
	case apierrors.IsNotFound(err):
		return agent, "the GPUNode, which the agent creates", nil
	case err != nil:
		return nil, "", fmt.Errorf("get GPUNode %s: %w", name, err)
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
		return "the GPUNode to have these pods as holders: " + podNames(pods), err
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
	object, err := n.GPUNode(ctx, node.Name)
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, "", fmt.Errorf("get GPUNode %s: %w", node.Name, err)
	}
	sign := ""
	if err == nil && object.Status.ExtendedResource != "" {
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

// say prints a line. Agents, and tenants in some places, write parts of it.
func (n *Nodes) say(format string, args ...any) {
	fmt.Fprintln(n.Progress, terminal.Plain(explain.OneLine(fmt.Sprintf(format, args...)), false))
}

func (n *Nodes) node(ctx context.Context, name string) (*corev1.Node, error) {
	node, err := n.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("get node %s: %w", name, err)
	}
	return node, nil
}

// patchNode sets labels and annotations; nil removes one.
func (n *Nodes) patchNode(ctx context.Context, name string, labels, annotations map[string]any) error {
	changes := map[string]any{"labels": labels}
	if annotations != nil { // null would remove all
		changes["annotations"] = annotations
	}
	patch, err := json.Marshal(map[string]any{"metadata": changes})
	if err == nil {
		_, err = n.Client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
	}
	if err != nil {
		return fmt.Errorf("change labels of node %s: %w", name, err)
	}
	return nil
}

func (n *Nodes) pods(ctx context.Context, node string) ([]corev1.Pod, error) {
	list, err := n.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return nil, fmt.Errorf("list pods of node %s: %w", node, err)
	}
	return slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool { return pod.Spec.NodeName != node }), nil
}

// podsOf returns the pods of DaemonSets on a node.
func (n *Nodes) podsOf(ctx context.Context, sets []daemonSet, node string) ([]corev1.Pod, error) {
	pods, err := n.pods(ctx, node)
	return slices.DeleteFunc(pods, func(pod corev1.Pod) bool {
		return !slices.ContainsFunc(sets, func(d daemonSet) bool { return workloads.Controls(&d.DaemonSet, &pod) })
	}), err
}

// agent returns the pod of Tandem's agent on a node; nil if none is found.
func (n *Nodes) agent(ctx context.Context, node string) (*corev1.Pod, error) {
	sets, err := workloads.DaemonSets(ctx, n.Client, n.Namespace)
	if err != nil {
		if errors.Is(err, workloads.ErrNoBinding) {
			return nil, nil
		}
		return nil, fmt.Errorf("find Tandem's agents: %w", err)
	}
	pods, err := workloads.Pods(ctx, n.Client, sets, node)
	if err != nil {
		return nil, fmt.Errorf("find Tandem's agents: %w", err)
	}
	for i := range pods {
		if pods[i].DeletionTimestamp == nil {
			return &pods[i], nil
		}
	}
	return nil, nil
}

// limitPods returns the running pods of a node that a device plugin has given GPUs or partitions by limits.
func (n *Nodes) limitPods(ctx context.Context, node string) ([]corev1.Pod, error) {
	pods, err := n.pods(ctx, node)
	return slices.DeleteFunc(pods, func(pod corev1.Pod) bool {
		return pod.Status.Phase != corev1.PodRunning || pod.DeletionTimestamp != nil || pod.Status.ExtendedResourceClaimStatus != nil ||
			!slices.ContainsFunc(slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers), hasGPULimit)
	}), err
}

func hasGPULimit(c corev1.Container) bool {
	resources := device.Resources{GPU: config.Defaults().ResourceName}
	for name, quantity := range c.Resources.Limits {
		if resources.Has(string(name)) && !quantity.IsZero() {
			return true
		}
	}
	return false
}

// slices counts the driver's ResourceSlices of a node. It is zero if the API server does not serve ResourceSlices.
func (n *Nodes) slices(ctx context.Context, node string) (count int, err error) {
	selector := fields.Set{resourceapi.ResourceSliceSelectorNodeName: node, resourceapi.ResourceSliceSelectorDriver: n.DriverName}.String()
	list, err := n.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("list ResourceSlices of node %s: %w", node, err)
	}
	return len(list.Items), nil
}

// allocatedClaims lists the claims that have devices. There are none if the API server does not serve ResourceClaims.
func (n *Nodes) allocatedClaims(ctx context.Context) ([]resourceapi.ResourceClaim, error) {
	list, err := n.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list ResourceClaims: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(claim resourceapi.ResourceClaim) bool { return claim.Status.Allocation == nil }), nil
}

// claimsOn returns the names of the claims that have devices of these drivers on a node, sorted. NVIDIA's pool has the name of the node.
func claimsOn(node string, claims []resourceapi.ResourceClaim, drivers ...string) []string {
	var names []string
	for _, claim := range claims {
		if slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
			return slices.Contains(drivers, r.Driver) && device.NodeOfPool(r.Pool) == node
		}) {
			names = append(names, claim.Namespace+"/"+claim.Name)
		}
	}
	slices.Sort(names)
	return names
}

func isReady(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && podstatus.Ready(pod)
}

func podNames(pods []corev1.Pod) string {
	var names []string
	for _, pod := range pods {
		names = append(names, pod.Namespace+"/"+pod.Name)
	}
	return strings.Join(names, ", ")
}
