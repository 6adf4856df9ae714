// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

const (
	// Label of a Node says who serves its GPUs: Tandem if it is "true". With "back", NVIDIA's software is returning. Without the label it
	// serves the node.
	Label      = "tandem-gpu.dev/migrated"
	withTandem = "true"
	returning  = "back"

	// operatorLabel with the value "false" keeps GPU Operator's device plugin off a node (its documentation, "Preventing installation of
	// operands on some nodes"). The Operator leaves an existing value.
	operatorLabel = "nvidia.com/gpu.deploy.device-plugin"
	// paused is in its value while GPU Operator's driver manager or MIG manager works on the node. Afterwards they set it to true again
	// (k8s-driver-manager; mig-parted, pkg/mig/reconfigure).
	paused = "paused-"

	// strategyAnnotation of a DaemonSet keeps its update strategy while it is patched.
	strategyAnnotation = "tandem-gpu.dev/migrate-update-strategy"
)

// exclusion keeps a DaemonSet off the nodes that Tandem serves.
var exclusion = corev1.NodeSelectorRequirement{Key: Label, Operator: corev1.NodeSelectorOpNotIn, Values: []string{withTandem}}

const exclusionText = "{key: " + Label + ", operator: NotIn, values: [\"" + withTandem + "\"]}"

// role is what a DaemonSet of NVIDIA's does on a node.
type role string

const (
	devicePlugin role = "device plugin"
	draDriver    role = "DRA driver"
	mpsDaemon    role = "MPS daemon"
)

// daemonSet of NVIDIA's.
type daemonSet struct {
	appsv1.DaemonSet
	role role
}

func (d daemonSet) String() string {
	return fmt.Sprintf("DaemonSet %s/%s (%s)", d.Namespace, d.Name, d.role)
}

// doubt says why a DaemonSet that looks like NVIDIA's may not be, and what to do.
func (d daemonSet) doubt() string {
	return fmt.Sprintf("no pod of its namespace mounts kubelet's directories for plugins, so a tenant may have created it. "+
		"If it is NVIDIA's, add --daemonset=%s/%s", d.Namespace, d.Name)
}

// roleOf recognises NVIDIA's DaemonSets by their containers: those of the charts nvidia-device-plugin and dra-driver-nvidia-gpu, of the
// device plugin's static manifest, and of GPU Operator.
func roleOf(set appsv1.DaemonSet) (role, bool) {
	for _, c := range set.Spec.Template.Spec.Containers {
		switch {
		case c.Name == "nvidia-device-plugin-ctr" || c.Name == "nvidia-device-plugin":
			return devicePlugin, true
		case c.Name == "mps-control-daemon-ctr":
			return mpsDaemon, true
		case c.Name == "gpus" && slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(s string) bool { return strings.Contains(s, "gpu-kubelet-plugin") }):
			return draDriver, true
		}
	}
	return "", false
}

// daemonSets returns NVIDIA's, sorted by name, and apart from them those that look like NVIDIA's and may be a tenant's.
func (n *Nodes) daemonSets(ctx context.Context) (sets, doubtful []daemonSet, err error) {
	list, err := n.Client.AppsV1().DaemonSets(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("list DaemonSets: %w", err)
	}
	left, err := setsThatLeft(ctx, n.Client)
	if err != nil {
		return nil, nil, err
	}
	missing, administered := slices.Clone(n.DaemonSets), administeredIn(ctx, n.Client, n.Namespace)
	for _, set := range list.Items {
		does, known := roleOf(set)
		d := daemonSet{set, cmp.Or(does, devicePlugin)}
		named := slices.Contains(left, d.Namespace+"/"+d.Name)
		if at := slices.Index(missing, types.NamespacedName{Namespace: set.Namespace, Name: set.Name}); at >= 0 {
			missing = slices.Delete(missing, at, at+1)
			named = true
		}
		if !named && !known {
			continue
		}
		if !named {
			if known, err = administered(set.Namespace); err != nil {
				return nil, nil, err
			}
		}
		if named || known {
			sets = append(sets, d)
		} else {
			doubtful = append(doubtful, d)
		}
	}
	if len(missing) > 0 {
		return nil, nil, fmt.Errorf("--daemonset: %s does not exist", missing[0])
	}
	slices.SortFunc(sets, func(a, b daemonSet) int { return cmp.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name) })
	return sets, doubtful, nil
}

// setNames is the value of setsAnnotation.
func setNames(sets []daemonSet) string {
	var names []string
	for _, d := range sets {
		names = append(names, d.Namespace+"/"+d.Name)
	}
	return strings.Join(names, ",")
}

// kubernetesTaints is the prefix of the taints that kubelet and the controllers of Kubernetes set. Pods of DaemonSets tolerate most of them.
const kubernetesTaints = "node.kubernetes.io/"

// mayShare reports whether a device plugin may list a GPU without partitions in another way than whole, by its UUID and as nvidia.com/gpu.
// NVIDIA's does so only with a configuration file. Its chart names the file in a variable. GPU Operator runs a config-manager beside the
// plugin if there is one (handleDevicePluginConfig). Whether NVIDIA's plugin lists partitions also depends on MIG_STRATEGY and
// --mig-strategy.
func (d daemonSet) mayShare() bool {
	if _, known := roleOf(d.DaemonSet); !known {
		return true
	}
	return slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(c corev1.Container) bool {
		return len(c.EnvFrom) > 0 || strings.HasPrefix(c.Name, "config-manager") ||
			slices.ContainsFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == "CONFIG_FILE" && (v.Value != "" || v.ValueFrom != nil) }) ||
			slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(s string) bool { return strings.Contains(s, "config-file") })
	})
}

// runsOn reports whether the DaemonSet's template admits the node, by its affinity and its tolerations. It ignores kubernetesTaints.
func (d daemonSet) runsOn(node *corev1.Node) (bool, error) {
	keepsOff := func(t *corev1.Taint) bool {
		return t.Effect != corev1.TaintEffectPreferNoSchedule && !strings.HasPrefix(t.Key, kubernetesTaints)
	}
	_, untolerated := scheduling.FindMatchingUntoleratedTaint(klog.Background(), node.Spec.Taints, d.Spec.Template.Spec.Tolerations, keepsOff, true)
	if untolerated {
		return false, nil
	}
	pod := &corev1.Pod{Spec: d.Spec.Template.Spec}
	admits, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	if err != nil {
		return false, fmt.Errorf("read the node affinity of %s: %w", d, err)
	}
	return admits, nil
}

// byOperator reports whether operatorLabel controls on which nodes the DaemonSet runs.
func (d daemonSet) byOperator() bool {
	return d.Spec.Template.Spec.NodeSelector[operatorLabel] == "true"
}

// isPatched reports whether the DaemonSet has the exclusion in each of its terms.
func (d daemonSet) isPatched() bool {
	terms := requiredTerms(&d.Spec.Template.Spec)
	return len(terms) > 0 && !slices.ContainsFunc(terms, func(term corev1.NodeSelectorTerm) bool {
		return !isNothing(term) && !slices.ContainsFunc(term.MatchExpressions, isExclusion)
	})
}

// owner is who would undo a change of the DaemonSet; empty if none is known. Helm changes it only at the next upgrade.
func (d daemonSet) owner() string {
	if controller := metav1.GetControllerOf(&d.DaemonSet); controller != nil {
		return controller.Kind + " " + controller.Name
	}
	keys := slices.Collect(maps.Keys(d.Labels))
	keys = slices.AppendSeq(keys, maps.Keys(d.Annotations))
	for _, tool := range []struct{ part, name string }{{"argocd.argoproj.io/", "Argo CD"}, {"fluxcd.io/", "Flux"}, {"fleet.cattle.io/", "Fleet"}} {
		if slices.ContainsFunc(keys, func(key string) bool { return strings.Contains(key, tool.part) }) {
			return tool.name
		}
	}
	return ""
}

func isExclusion(r corev1.NodeSelectorRequirement) bool { return reflect.DeepEqual(r, exclusion) }

// isNothing reports whether a term matches no node, as the API says of empty terms.
func isNothing(term corev1.NodeSelectorTerm) bool {
	return len(term.MatchExpressions) == 0 && len(term.MatchFields) == 0
}

func requiredTerms(pod *corev1.PodSpec) []corev1.NodeSelectorTerm {
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil || pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
}

// exclude adds the exclusion. With the strategy OnDelete no pod of the DaemonSet restarts for this change: the DaemonSet controller ends
// pods on nodes that the template no longer admits, whatever the strategy.
func exclude(set *appsv1.DaemonSet) error {
	pod := &set.Spec.Template.Spec
	if pod.Affinity == nil {
		pod.Affinity = &corev1.Affinity{}
	}
	if pod.Affinity.NodeAffinity == nil {
		pod.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	required := &pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if *required == nil {
		*required = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{exclusion}}}}
	} else {
		for i, term := range (*required).NodeSelectorTerms {
			if !isNothing(term) && !slices.ContainsFunc(term.MatchExpressions, isExclusion) {
				(*required).NodeSelectorTerms[i].MatchExpressions = append(term.MatchExpressions, exclusion)
			}
		}
	}
	// A Helm upgrade restores the strategy and keeps the annotation.
	if set.Spec.UpdateStrategy.Type != appsv1.OnDeleteDaemonSetStrategyType || set.Annotations[strategyAnnotation] == "" {
		before, err := json.Marshal(set.Spec.UpdateStrategy)
		if err != nil {
			return fmt.Errorf("save the update strategy: %w", err)
		}
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, strategyAnnotation, string(before))
		set.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.OnDeleteDaemonSetStrategyType}
	}
	return nil
}

// include undoes exclude. A DaemonSet that exclude did not change stays as it is.
func include(set *appsv1.DaemonSet) error {
	saved, ok := set.Annotations[strategyAnnotation]
	if !ok {
		return nil
	}
	var before appsv1.DaemonSetUpdateStrategy
	if err := json.Unmarshal([]byte(saved), &before); err != nil {
		return fmt.Errorf("read annotation %s: %w", strategyAnnotation, err)
	}
	// Another strategy is that of a Helm upgrade since then.
	if set.Spec.UpdateStrategy.Type == appsv1.OnDeleteDaemonSetStrategyType {
		set.Spec.UpdateStrategy = before
	}
	delete(set.Annotations, strategyAnnotation)
	removeExclusion(&set.Spec.Template.Spec)
	return nil
}

func removeExclusion(pod *corev1.PodSpec) {
	terms := requiredTerms(pod)
	for i := range terms {
		terms[i].MatchExpressions = slices.DeleteFunc(terms[i].MatchExpressions, isExclusion)
	}
	if slices.ContainsFunc(terms, func(term corev1.NodeSelectorTerm) bool { return !isNothing(term) }) || len(terms) == 0 {
		return
	}
	pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = nil
	if len(pod.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution) == 0 {
		pod.Affinity.NodeAffinity = nil
	}
	if *pod.Affinity == (corev1.Affinity{}) {
		pod.Affinity = nil
	}
}

// withoutExclusion returns the affinity of values without the exclusion, with which Tandem's agents would leave the nodes that they serve. A
// user who manages NVIDIA's software by GitOps adds it to the values.
func withoutExclusion(affinity any) any {
	text, err := json.Marshal(map[string]any{"affinity": affinity})
	var pod corev1.PodSpec
	if err != nil || json.Unmarshal(text, &pod) != nil || !slices.ContainsFunc(requiredTerms(&pod), func(term corev1.NodeSelectorTerm) bool {
		return slices.ContainsFunc(term.MatchExpressions, isExclusion)
	}) {
		return affinity
	}
	removeExclusion(&pod)
	return plain(pod.Affinity)
}

// change updates a DaemonSet, again if another writer was faster.
func (n *Nodes) change(ctx context.Context, d daemonSet, change func(*appsv1.DaemonSet) error) error {
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		set, err := n.Client.AppsV1().DaemonSets(d.Namespace).Get(ctx, d.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		changed := set.DeepCopy()
		if err := change(changed); err != nil || reflect.DeepEqual(set, changed) {
			return err
		}
		_, err = n.Client.AppsV1().DaemonSets(d.Namespace).Update(ctx, changed, metav1.UpdateOptions{FieldManager: fieldManager})
		return err
	})
	if err != nil {
		return fmt.Errorf("change %s: %w", d, err)
	}
	return nil
}
