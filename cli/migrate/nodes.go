// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
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
	one.pods = podNames(pods)
	if !n.Back {
		one.refusals, err = n.checkForward(ctx, sets, node, one.pods, claims)
		return one, err
	}
	agent, unseen, err := n.agentBack(ctx, node)
	if err == nil {
		one.agentless = agent == nil
		one.refusals, err = n.checkBack(ctx, sets, node, unseen, claims)
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
	object, err := n.gpuNode(ctx, node.Name)
	if err != nil {
		return nil, err
	}
	if object == nil {
		object = &v1alpha1.GPUNode{}
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
