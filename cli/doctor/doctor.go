// SPDX-License-Identifier: Apache-2.0

// Package doctor checks an installation of Tandem by its API objects, as kubectl gpu doctor does. Examine is pure; read.go reads what it needs.
package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/internal/runtimes"
	buildversion "github.com/tandem-gpu/tandem/internal/version"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Facts are what the API server says of an installation at about one moment. What could not be read is empty, and NotRead says so.
type Facts struct {
	Now time.Time
	// Client is the version of the plugin, and Kubernetes that of the API server.
	Client, Kubernetes string
	// ServesClaims is whether the API server serves resource.k8s.io/v1.
	ServesClaims bool
	// Definition is the CustomResourceDefinition of GPUNodes; nil if there is none.
	Definition *Definition
	// DaemonSets and Agents are those of the agents, Deployments and Leases those of the controller, by namespace/name.
	DaemonSets  []appsv1.DaemonSet
	Agents      []corev1.Pod
	Deployments []appsv1.Deployment
	Leases      map[string]coordinationv1.Lease
	// NoBinding are KindDaemonSets and KindDeployments if no ClusterRoleBinding says where they are.
	NoBinding []explain.Kind
	// Nodes are those that have GPUs by their labels.
	Nodes    []corev1.Node
	GPUNodes []v1alpha1.GPUNode
	// Withheld are the nodes whose slices say that no new holder gets a device.
	Withheld map[string]bool
	// Events are those on nodes that name an agent as their source. Tenants may have written some of them.
	Events []corev1.Event
	// Webhooks are Tandem's. Endpoints are the ready endpoints of their Services, by namespace/name.
	Webhooks  []admissionv1.ValidatingWebhookConfiguration
	Endpoints map[string]int
	Policies  []admissionv1.ValidatingAdmissionPolicy
	Bindings  []admissionv1.ValidatingAdmissionPolicyBinding
	NotRead   []explain.NotRead
}

// Definition is what matters of the CustomResourceDefinition of GPUNodes.
type Definition struct {
	// Version is that of the chart that wrote it; empty if it does not say so.
	Version string
	// Maintenance is whether it has spec.maintenance.
	Maintenance bool
}

// The kinds that Read reads, besides those that cli/explain knows. What could not be read is not checked.
const (
	KindDaemonSets  explain.Kind = "DaemonSets"
	KindPods        explain.Kind = "Pods"
	KindOtherPods   explain.Kind = "Pods of other namespaces"
	KindDeployments explain.Kind = "Deployments"
	KindLeases      explain.Kind = "Leases"
	KindWebhooks    explain.Kind = "ValidatingWebhookConfigurations"
	KindEndpoints   explain.Kind = "EndpointSlices"
	KindPolicies    explain.Kind = "ValidatingAdmissionPolicies"
	KindBindings    explain.Kind = "ValidatingAdmissionPolicyBindings"
	KindDefinitions explain.Kind = "CustomResourceDefinitions"
)

// Unread returns what could not be read although the viewer asked for it. With some of it, the absence of findings means nothing. It is pure.
func (f Facts) Unread() []explain.NotRead {
	return slices.DeleteFunc(slices.Clone(f.NotRead), func(n explain.NotRead) bool { return n.Kind == KindOtherPods })
}

// Severity of a Finding.
type Severity string

// Error is something that does not work. Warning is something that may not, or that does less than it could. Note is no problem, but
// an administrator's decision that is easily forgotten.
const (
	Error   Severity = "error"
	Warning Severity = "warning"
	Note    Severity = "note"
)

// Finding is one problem.
type Finding struct {
	Severity Severity `json:"severity"`
	// Object is the kind and name of what has the problem.
	Object string `json:"object"`
	// Problem and Action are what is wrong and what to do, in one line without a full stop.
	Problem string `json:"problem"`
	Action  string `json:"action"`
	// Page is the address of the place in the documentation, for the version of the plugin.
	Page string `json:"page"`
}

// Pages of the documentation.
const (
	pageInstallation = "docs/user/troubleshooting.md#nodes-and-installation"
	pagePods         = "docs/user/troubleshooting.md#pods-and-claims"
	pageInstall      = "docs/user/install.md"
	pageVersions     = "docs/user/compatibility.md"
	pageHealth       = "docs/user/health.md#reasons"
	pageTaints       = "docs/user/health.md#devicetaintrule"
	pageDrain        = "docs/user/kubectl-gpu.md#take-a-gpu-out-of-service-drain"
)

// oldest is the oldest Kubernetes that Tandem serves claims on.
var oldest = version.MustParseGeneric("1.34")

// Bounds of what may last a while.
const (
	// rollout is how long a pod may take to become ready.
	rollout = 2 * time.Minute
	// leaseLasts is twice as long as the controller's Lease.
	leaseLasts = time.Minute
	// healing is how long the controller may take for a claim in conflict.
	healing = 5 * time.Minute
)

// Examine returns the problems of an installation, the errors first. It is a pure function.
func Examine(f Facts) []Finding {
	e := &examination{Facts: f, starting: map[string]bool{}}
	if e.installed() {
		for _, check := range []func(){
			e.versions, e.bindings, e.agents, e.nodes, e.runtimes, e.devices, e.controller, e.webhook, e.policies,
		} {
			check()
		}
	}
	slices.SortStableFunc(e.found, func(a, b Finding) int {
		rank := func(s Severity) int { return slices.Index([]Severity{Error, Warning, Note}, s) }
		return cmp.Compare(rank(a.Severity), rank(b.Severity))
	})
	return e.found
}

type examination struct {
	Facts
	found []Finding
	// starting are the nodes whose agents are not ready or end, of which agents reports what is to be reported.
	starting map[string]bool
}

func (e *examination) add(severity Severity, object, page, action, problem string, args ...any) {
	e.found = append(e.found, Finding{severity, object, explain.OneLine(fmt.Sprintf(problem, args...)), action, buildversion.Page(e.Client, page)})
}

func (e *examination) read(kinds ...explain.Kind) bool {
	return !slices.ContainsFunc(e.NotRead, func(n explain.NotRead) bool { return slices.Contains(kinds, n.Kind) })
}

// installed reports whether there is anything to check.
func (e *examination) installed() bool {
	if !e.read(KindDaemonSets, KindDefinitions) || len(e.DaemonSets) > 0 || e.Definition != nil {
		return true
	}
	e.add(Error, "cluster", pageInstall, "install the chart"+orNamed, "Tandem is not installed: there is no DaemonSet of its agents, and the API server serves no GPUNodes")
	return false
}

// orNamed ends what to do where no ClusterRoleBinding says where Tandem is.
const orNamed = "; if it is installed with rbac.create=false, add -n and its namespace"

const versionLabel = "app.kubernetes.io/version"

func (e *examination) versions() {
	if parsed, err := version.ParseGeneric(e.Kubernetes); err == nil && parsed.LessThan(oldest) {
		e.add(Error, "cluster", pageVersions, "upgrade Kubernetes to 1.34 or newer", "Kubernetes %s is too old: Tandem needs 1.34", e.Kubernetes)
	} else if !e.ServesClaims {
		e.add(Error, "cluster", pageInstallation, "enable it by kube-apiserver's --runtime-config, or set mode: DevicePluginOnly",
			"the API server does not serve resource.k8s.io/v1, so no ResourceClaim gets a GPU")
	}
	versions := map[string]bool{}
	for _, d := range e.DaemonSets {
		versions[d.Labels[versionLabel]] = true
	}
	for _, d := range e.DaemonSets {
		of := d.Labels[versionLabel]
		if e.Client != "dev" && of != "" && of != e.Client {
			e.add(Warning, name("daemonset", d.Namespace, d.Name), pageInstall, "use the plugin of the release "+of, "it has version %s, and this plugin has %s", of, e.Client)
		}
	}
	for _, d := range e.Deployments {
		if of := d.Labels[versionLabel]; len(versions) > 0 && !versions[of] {
			e.add(Warning, name("deployment", d.Namespace, d.Name), pageInstall, "run helm upgrade with one chart for all",
				"the controller has version %s, which no agent has", cmp.Or(of, "unknown"))
		}
	}
	switch d := e.Definition; {
	case !e.read(KindDefinitions):
	case d == nil:
		e.add(Error, "customresourcedefinition gpunodes.tandem-gpu.dev", pageInstallation, "run helm upgrade with crds.create=true",
			"it does not exist: pods with limits are sent to GPUs that claims have, and kubectl gpu shows nothing")
	case !d.Maintenance:
		e.add(Warning, "customresourcedefinition gpunodes.tandem-gpu.dev", pageInstallation, "run helm upgrade with crds.create=true",
			"it is of an older version (%s) and drops spec.maintenance, so that kubectl gpu drain has no effect", cmp.Or(d.Version, "unknown"))
	}
}

// bindings reports that agents or the controller are not found by their rights.
func (e *examination) bindings() {
	var of []string
	for _, kind := range e.NoBinding {
		of = append(of, map[explain.Kind]string{KindDaemonSets: "agents", KindDeployments: "controller"}[kind])
	}
	if len(of) > 0 {
		e.add(Error, "cluster", pageInstall, "run helm upgrade --install"+orNamed,
			"no ClusterRoleBinding has the labels of Tandem's %s: without one they have no rights, and are not found here", strings.Join(of, " and "))
	}
}

// nodes checks nodes that have GPUs and no agent, or agents that serve less than they should.
func (e *examination) nodes() {
	missing := func(node string) bool {
		return len(e.DaemonSets) > 0 && e.read(KindPods, KindOtherPods) &&
			!slices.ContainsFunc(e.Agents, func(p corev1.Pod) bool { return p.Spec.NodeName == node })
	}
	has := map[string]bool{}
	for _, n := range e.GPUNodes {
		has[n.Name] = true
		switch {
		case missing(n.Name):
			remove := "kubectl delete gpunode " + n.Name
			if len(n.Spec.Maintenance) > 0 {
				remove = "kubectl gpu undrain " + n.Name + " && " + remove
			}
			e.add(Error, "node "+n.Name, pageInstallation, "let the DaemonSet select the node, or delete its GPUNode: "+remove,
				"it has a GPUNode and no agent, so that what the GPUNode says is outdated")
		case n.Status.Waiting != "" && !e.starting[n.Name]:
			e.add(Error, "node "+n.Name, pageInstallation, "see the events of the node: kubectl describe node "+n.Name, "%s", explain.WhyUnserved(n.Status))
		}
	}
	for _, n := range e.Nodes {
		switch {
		case has[n.Name] || !explain.HasGPUs(&n):
		case missing(n.Name):
			e.add(Error, "node "+n.Name, pageInstall, "compare the DaemonSet's nodeSelector, affinity and tolerations with the node's labels and taints",
				"it has GPUs and no agent")
		case e.read(explain.KindGPUNodes) && e.readyFor(n.Name) >= rollout:
			e.add(Warning, "node "+n.Name, pageInstallation, "look for GPUNode in the log of the node's agent",
				"its agent is ready and has no GPUNode: kubectl gpu shows nothing of the node")
		}
	}
	for _, node := range slices.Sorted(maps.Keys(e.Withheld)) {
		if e.reported("node " + node) {
			continue
		}
		why := "its agent gives no device to new pods and claims"
		if event, found := e.lastEvent(node, time.Time{}, anyType...); found {
			why += ": " + said(event)
		}
		e.add(Error, "node "+node, pageInstallation, "uninstall the other device plugin or DRA driver that the log of the node's agent names", "%s", why)
	}
	for i := range e.Agents {
		node := e.Agents[i].Spec.NodeName
		ready, since := readiness(&e.Agents[i])
		if event, found := e.lastEvent(node, since, corev1.EventTypeWarning); ready && found && !e.Withheld[node] {
			e.add(Warning, "node "+node, pageInstallation, "compare it with the log of the node's agent, and look it up in the table: "+event.Reason,
				"%s", said(event))
		}
	}
}

// reported reports whether an error of an object is known already.
func (e *examination) reported(object string) bool {
	return slices.ContainsFunc(e.found, func(f Finding) bool { return f.Object == object && f.Severity == Error })
}

// runtimes reports container runtimes that give containers what their images ask for, once for each version.
func (e *examination) runtimes() {
	nodes := map[string][]string{}
	for _, n := range e.Nodes {
		of := n.Status.NodeInfo.ContainerRuntimeVersion
		nodes[of] = append(nodes[of], n.Name)
	}
	for _, of := range slices.Sorted(maps.Keys(nodes)) {
		if why := runtimes.TrustsImages(of); why != "" {
			slices.Sort(nodes[of])
			others := ""
			if len(nodes[of]) > 1 {
				others = fmt.Sprintf(" (also of %s)", explain.Number(len(nodes[of])-1, "other node"))
			}
			e.add(Warning, "node "+nodes[of][0], pageVersions, "upgrade the container runtime, or remove CRIU from the node",
				"its container runtime%s lets images choose GPUs: %s", others, why)
		}
	}
}

// devices checks what the agents report of devices and claims.
func (e *examination) devices() {
	for _, n := range e.GPUNodes {
		unhealthy := map[string]bool{}
		for _, d := range n.Status.Devices {
			// A partition has the faults of its GPU.
			if d.UnhealthyReason != "" && n.Status.Waiting == "" && !unhealthy[d.Parent] {
				unhealthy[d.Name] = true
				e.add(Warning, fmt.Sprintf("%s of node %s", d.Name, n.Name), pageHealth, remedy(n.Name, d), "it is unhealthy: %s%s",
					d.UnhealthyReason, podsOn(n.Status.Devices, d.Name))
			}
		}
		e.maintenance(n)
		for _, c := range n.Status.Conflicts {
			if e.Now.Sub(c.Since.Time) > healing {
				e.add(Warning, fmt.Sprintf("claim %s/%s", c.Namespace, c.Name), pagePods, "see the events of the claim: kubectl describe resourceclaim -n "+c.Namespace+" "+c.Name,
					"it has waited on node %s since %s: %s", n.Name, c.Since.UTC().Format(time.RFC3339), c.Message)
			}
		}
	}
}

// remedy says what to do about an unhealthy device.
func remedy(node string, d v1alpha1.DeviceStatus) string {
	health := device.ParseHealth(d.UnhealthyReason)
	if health.Class() == device.FaultNone {
		return "see the reason and the events of the node"
	}
	gpu := cmp.Or(d.Parent, d.Name)
	text := strings.NewReplacer("rain the GPU", "rain the GPU (kubectl gpu drain "+node+"/"+gpu+")", "rain the node", "rain the node (kubectl drain "+node+")").
		Replace(health.Remedy(""))
	return strings.ToLower(text[:1]) + text[1:]
}

// mostNamed bounds the names in one finding.
const mostNamed = 5

// podsOn names the pods that have a device or one of its partitions, after a semicolon; empty if there are none.
func podsOn(devices []v1alpha1.DeviceStatus, name string) string {
	var pods []string
	for _, d := range devices {
		if d.Name != name && d.Parent != name {
			continue
		}
		for _, h := range d.Holders {
			for _, p := range h.Pods {
				if p.Name != "" && !slices.Contains(pods, p.Namespace+"/"+p.Name) {
					pods = append(pods, p.Namespace+"/"+p.Name)
				}
			}
		}
	}
	return listed("; it is used by ", pods)
}

// listed returns some names after a text, and how many others there are; empty if there are none.
func listed(before string, names []string) string {
	if len(names) == 0 {
		return ""
	}
	text := before + strings.Join(names[:min(len(names), mostNamed)], ", ")
	if more := len(names) - mostNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// maintenance notes the devices of a node that an administrator has taken out of service: those with the same reason together.
func (e *examination) maintenance(n v1alpha1.GPUNode) {
	gpus, since, tainted := map[string][]string{}, map[string]time.Time{}, map[string][]string{}
	for _, d := range n.Status.Devices {
		for _, t := range d.RuleTaints() {
			tainted[t.String()] = append(tainted[t.String()], d.Name)
		}
		if d.Maintenance == nil || d.Parent != "" {
			continue
		}
		why := d.Maintenance.Reason
		gpus[why] = append(gpus[why], d.Name)
		if at := d.Maintenance.Since; at != nil && (since[why].IsZero() || at.Time.Before(since[why])) {
			since[why] = at.Time
		}
	}
	for _, why := range slices.Sorted(maps.Keys(gpus)) {
		text := "under maintenance"
		if !since[why].IsZero() {
			text += " since " + since[why].UTC().Format(time.RFC3339)
		}
		if why != "" {
			text += ": " + why
		}
		e.add(Note, "node "+n.Name, pageDrain, "when the maintenance is done: kubectl gpu undrain "+n.Name+", or "+n.Name+"/GPU for one of them",
			"%s", listed("", gpus[why])+": "+text)
	}
	for _, taint := range slices.Sorted(maps.Keys(tainted)) {
		e.add(Note, "node "+n.Name, pageTaints, "when it is not needed any more: delete the rule", "%s: tainted by %s", listed("", tainted[taint]), taint)
	}
}

func (e *examination) controller() {
	if e.read(KindDeployments) && len(e.Deployments) == 0 && len(e.DaemonSets) > 0 && !slices.Contains(e.NoBinding, KindDeployments) {
		e.add(Error, "cluster", pageInstallation, "run helm upgrade", "there is no Deployment of the controller: pods fail when claims take GPUs")
	}
	for _, d := range e.Deployments {
		object := name("deployment", d.Namespace, d.Name)
		lease, found := e.Leases[d.Namespace+"/"+d.Name]
		switch {
		case d.Status.AvailableReplicas == 0:
			e.add(Error, object, pageInstallation, "read its events and the log of its pods: kubectl describe deployment -n "+d.Namespace+" "+d.Name,
				"no controller is available")
		case !e.read(KindLeases):
		case !found || lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity == "":
			e.add(Error, object, pageInstallation, "read the log of its pods: kubectl logs -n "+d.Namespace+" deployment/"+d.Name, "no controller leads: its Lease has no holder")
		case lease.Spec.RenewTime != nil && e.Now.Sub(lease.Spec.RenewTime.Time) > leaseLasts:
			e.add(Error, object, pageInstallation, "read the log of its pods: kubectl logs -n "+d.Namespace+" deployment/"+d.Name,
				"no controller leads: %s has not renewed its Lease since %s", *lease.Spec.HolderIdentity, lease.Spec.RenewTime.UTC().Format(time.RFC3339))
		}
	}
}

func (e *examination) webhook() {
	for _, c := range e.Webhooks {
		for _, w := range c.Webhooks {
			object, service := "validatingwebhookconfiguration "+c.Name, w.ClientConfig.Service
			const without = "claims with mistakes are refused on the node, when their pods start, and not when they are created"
			switch {
			case len(w.ClientConfig.CABundle) == 0:
				e.add(Warning, object, pageInstallation, "read the controller's log", "webhook %s has no caBundle, which the controller writes: %s", w.Name, without)
			case service != nil && e.read(KindEndpoints) && e.Endpoints[service.Namespace+"/"+service.Name] == 0:
				e.add(Warning, object, pageInstallation, "check the controller's pods, and network policies for the port of the webhook",
					"Service %s/%s of webhook %s has no ready endpoint: %s", service.Namespace, service.Name, w.Name, without)
			}
		}
	}
}

// guards are the policies without which a stolen token of an agent or of the controller can do more than its job, by the end of their names.
var guards = []string{"-resourceslices", "-gpunode-status", "-gpunode-maintenance", "-resourceclaims", "-agent-events", "-node-labels", "-controller-gpunodes",
	"-controller-gpunode-taints", "-controller-pods", "-controller-evictions", "-controller-nodes", "-controller-leases", "-controller-protected", "-controller-events"}

func (e *examination) policies() {
	if !e.read(KindPolicies, KindBindings) {
		return
	}
	const action = "run helm upgrade with admissionPolicy.create=true"
	var missing []string
	for _, suffix := range guards {
		if !slices.ContainsFunc(e.Policies, func(p admissionv1.ValidatingAdmissionPolicy) bool { return strings.HasSuffix(p.Name, suffix) }) {
			missing = append(missing, "…"+suffix)
		}
	}
	if len(missing) > 0 && len(e.DaemonSets) > 0 {
		e.add(Warning, "cluster", pageInstallation, action, "admission policies are missing, so that agents and the controller may write more than they need: %s", strings.Join(missing, ", "))
	}
	for _, p := range e.Policies {
		denies := func(b admissionv1.ValidatingAdmissionPolicyBinding) bool { return b.Spec.PolicyName == p.Name }
		if !slices.ContainsFunc(e.Bindings, denies) {
			e.add(Warning, "validatingadmissionpolicy "+p.Name, pageInstallation, action, "it has no binding, so that it has no effect")
		}
	}
}

// telling are the events of agents on nodes that say what is wrong with an installation. GPUNodes say what is wrong with devices.
var telling = []string{"ConfigPostponed", "ConfigRejected", "ConflictingDriver", "DeviceOfUnknownGPU", "DriverPaused", "HoldersUnknown", "LedgerLocked", "NoClaimsAPI", "NoDriver",
	"NoGPU", "NoPartitionsOnDemand", "NoPodCgroups", "NodeLabelsNotWritten", "OtherDevicePlugin", "RestartPostponed", "RuntimeWithoutCDI"}

var anyType = []string{corev1.EventTypeNormal, corev1.EventTypeWarning}

// said quotes an event. Events of nodes are in namespace default, where tenants may have the right to create some in the agents' name.
func said(event corev1.Event) string {
	return fmt.Sprintf("an event says %s: %s (not only agents can write events in namespace default)", event.Reason, event.Message)
}

// lastEvent returns the newest telling event of a node since a time, of one of the types. What an agent reported before it became ready is over.
func (e *examination) lastEvent(node string, since time.Time, types ...string) (last corev1.Event, found bool) {
	for _, event := range e.Events {
		if event.InvolvedObject.Name == node && slices.Contains(telling, event.Reason) && slices.Contains(types, event.Type) && event.LastTimestamp.After(since) &&
			(!found || event.LastTimestamp.After(last.LastTimestamp.Time)) {
			last, found = event, true
		}
	}
	return last, found
}

func name(kind, namespace, name string) string { return kind + " " + namespace + "/" + name }

// Text returns the findings for users, with a last line that counts them.
func Text(f Facts, found []Finding) string {
	var b strings.Builder
	counts := map[Severity]int{}
	for _, finding := range found {
		counts[finding.Severity]++
		fmt.Fprintf(&b, "%s: %s: %s\n  %s\n  %s\n", strings.ToUpper(string(finding.Severity)), finding.Object, finding.Problem, finding.Action, finding.Page)
	}
	ready := 0
	for i := range f.Agents {
		if ok, _ := readiness(&f.Agents[i]); ok {
			ready++
		}
	}
	of := fmt.Sprintf("Kubernetes %s, %d of %d agents ready, %s", f.Kubernetes, ready, len(f.Agents), explain.Number(len(f.GPUNodes), "GPUNode"))
	problems := counts[Error] + counts[Warning]
	switch unread := f.Unread(); {
	case problems == 0 && len(unread) > 0:
		fmt.Fprintf(&b, "not everything was checked: %s of objects could not be read; no problem found in the rest: %s\n", explain.Number(len(unread), "kind"), of)
	case problems == 0:
		fmt.Fprintf(&b, "no problem found: %s\n", of)
	default:
		fmt.Fprintf(&b, "%s, %s: %s\n", explain.Number(counts[Error], "error"), explain.Number(counts[Warning], "warning"), of)
	}
	return b.String()
}
