// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/internal/owner"
	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// Facts are what the API server says about a pod and the cluster at about one moment. What the viewer may not read is empty, and
// NotRead says so.
type Facts struct {
	// Driver is the name of Tandem's DRA driver.
	Driver string
	Pod    *corev1.Pod
	// Claims and Templates of the pod's namespace, by name. A missing one does not exist.
	Claims    map[string]*resourceapi.ResourceClaim
	Templates map[string]*resourceapi.ResourceClaimTemplate
	Classes   []resourceapi.DeviceClass
	Slices    []resourceapi.ResourceSlice
	Nodes     []corev1.Node
	GPUNodes  []v1alpha1.GPUNode
	Quotas    []corev1.ResourceQuota
	// QuotaPods and QuotaClaims are those of the pod's namespace, at most some hundreds, if a quota refuses a claim.
	QuotaPods   []corev1.Pod
	QuotaClaims []resourceapi.ResourceClaim
	// QuotaPartly is set if there are more of them.
	QuotaPartly bool
	// Events of the pod and of its claims.
	Events []corev1.Event
	// MayName reports whether the viewer may list the pods of a namespace. Holders of other namespaces are not named. Why calls it for the
	// holders of the answer only.
	MayName func(namespace string) bool
	NotRead []NotRead

	// byNode is what published returns, once it is known.
	byNode map[string][]resourceapi.ResourceSlice
}

// Kind is a kind of objects that a viewer could not read.
type Kind string

// The kinds that Why needs besides the pod.
const (
	KindClaims    Kind = "ResourceClaims"
	KindTemplates Kind = "ResourceClaimTemplates"
	KindClasses   Kind = "DeviceClasses"
	KindSlices    Kind = "ResourceSlices"
	KindNodes     Kind = "Nodes"
	KindGPUNodes  Kind = "GPUNodes"
	KindQuotas    Kind = "ResourceQuotas"
	// KindQuotaUsers are all of the namespace, to tell who uses a quota. Why does not need them.
	KindQuotaUsers Kind = "Pods and ResourceClaims of the namespace"
	KindEvents     Kind = "Events"
)

// NotRead says that objects could not be read, and why.
type NotRead struct {
	Kind  Kind   `json:"kind"`
	Error string `json:"error"`
}

// Cause is why a pod is as it is.
type Cause string

// The causes.
const (
	CauseFinished     Cause = "Finished"     // all containers have ended
	CauseFailed       Cause = "Failed"       // the pod failed, or kubelet did not admit it
	CauseRunning      Cause = "Running"      // a container runs
	CauseConflict     Cause = "Conflict"     // another holder has the device that its claim was allocated
	CauseStarting     Cause = "Starting"     // the scheduler has placed the pod
	CauseNoGPU        Cause = "NoGPU"        // the pod requests no GPU
	CauseGated        Cause = "Gated"        // the pod has scheduling gates
	CauseQuota        Cause = "Quota"        // a quota refuses its claim
	CauseNoClaim      Cause = "NoClaim"      // its claim or its template does not exist
	CauseNoClass      Cause = "NoClass"      // a DeviceClass does not exist
	CauseSelector     Cause = "Selector"     // a selector has a mistake: it does not compile, or fails on a device
	CauseGivenUp      Cause = "GivenUp"      // the scheduler fails on a node for another reason, and gives up the pod on all nodes
	CauseRoom         Cause = "Room"         // a node has what it requests: it waits for something else
	CauseFull         Cause = "Full"         // nodes have what it requests, and other holders have that
	CauseUnhealthy    Cause = "Unhealthy"    // the same, and the devices are unhealthy, under maintenance or tainted
	CauseAgent        Cause = "Agent"        // the agents of the nodes that may have what it requests do not serve GPUs
	CauseExcluded     Cause = "Excluded"     // nodes have what it requests, and it may not run there
	CauseNever        Cause = "Never"        // no node has what it requests
	CauseUnreadable   Cause = "Unreadable"   // the viewer may not read enough
	CauseNotEvaluated Cause = "NotEvaluated" // its requests are too many or cost too much, and no node with room was found before
)

// Answer is why a pod is as it is. Texts are single lines without a full stop.
type Answer struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Cause     Cause  `json:"cause"`
	// Summary completes "Pod <namespace>/<name>".
	Summary string `json:"summary"`
	// Requests are what the pod requests of GPUs.
	Requests []string `json:"requests,omitempty"`
	// Has are the devices that it has.
	Has []string `json:"has,omitempty"`
	// Scheduler is what the scheduler said last; empty if it has placed the pod.
	Scheduler string `json:"scheduler,omitempty"`
	// Nodes are those that may run the pod first, then the others, grouped by the reason.
	Nodes []NodeAnswer `json:"nodes,omitempty"`
	// Frees are what would let the pod run.
	Frees []string `json:"frees,omitempty"`
	// Quotas are the quotas of the namespace that count its GPUs.
	Quotas []string `json:"quotas,omitempty"`
	// Events are the last ones that matter, the newest first.
	Events []string `json:"events,omitempty"`
	// NotRead are what the viewer could not read.
	NotRead []NotRead `json:"notRead,omitempty"`
}

// FreesTitle is the title of Frees.
func (a Answer) FreesTitle() string {
	if a.Cause == CauseFailed || a.Cause == CauseConflict {
		return "What happens next"
	}
	return "What would let it run"
}

// Bounds of an answer.
const (
	mostNodes    = 6
	mostHolders  = 16
	mostEvents   = 6
	mostFrees    = 6
	mostRequests = 32
	// mostText bounds a line that consists of what the pod requests.
	mostText = 1000
	// mostMessage bounds what is read of a message of an event or of a condition. Tenants can write events of any size.
	mostMessage = 4096
)

// Why explains a pod. It evaluates selectors for as long as ctx lasts, and no longer than some seconds. It is a pure function apart from that
// and from MayName. It fails only if ctx is done. kubectl gpu why calls it.
func Why(ctx context.Context, f Facts) (Answer, error) {
	a := f.why(ctx, usual)
	if ctx.Err() != nil {
		return Answer{}, fmt.Errorf("explain pod %s/%s: %w", f.Pod.Namespace, f.Pod.Name, context.Cause(ctx))
	}
	return a, nil
}

func (f Facts) why(ctx context.Context, b bounds) Answer {
	ctx, cancel := context.WithTimeoutCause(ctx, b.time, errTime(b.time))
	defer cancel()
	a := Answer{Namespace: f.Pod.Namespace, Name: f.Pod.Name, NotRead: f.NotRead}
	claims := f.claims()
	limits := f.limitNeeds()
	needs := slices.Clone(limits)
	for _, n := range limits {
		a.Requests = append(a.Requests, n.String()+" (limits)")
	}
	for _, of := range claims {
		some := f.needs(of)
		for _, n := range some {
			a.Requests = append(a.Requests, fmt.Sprintf("%s (%s%s)", n, of, allocatedTo(of)))
		}
		switch {
		case f.unread(of):
			a.Requests = append(a.Requests, fmt.Sprintf("%s, which could not be read", of))
		case of.spec == nil:
			a.Requests = append(a.Requests, fmt.Sprintf("%s, which does not exist", of))
		}
		if of.claim == nil || of.claim.Status.Allocation == nil {
			needs = append(needs, some...)
		}
	}
	if more := len(f.Pod.Spec.ResourceClaims) - MostClaims; more > 0 {
		a.Requests = append(a.Requests, fmt.Sprintf("%s more, not evaluated", Number(more, "claim")))
	}
	a.Requests = FirstOf(a.Requests, mostRequests, "and %d more")
	a.Events = f.events()
	switch pod := f.Pod; {
	case podstatus.Ended(pod):
		f.ended(&a)
	case pod.Spec.NodeName != "":
		f.placed(&a, claims)
	case len(a.Requests) == 0:
		a.Cause, a.Summary = CauseNoGPU, "requests no GPU"+f.misspelled()
		a.Scheduler = f.scheduler()
	default:
		a.Scheduler, a.Quotas = f.scheduler(), f.quotas(claims, needs)
		f.waits(ctx, &a, claims, needs, b)
	}
	a.Summary = Bounded(a.Summary, mostMessage)
	if f.Pod.DeletionTimestamp != nil {
		a.Summary += "; it is being deleted"
	}
	return a
}

func allocatedTo(of claimOf) string {
	if of.claim == nil || of.claim.Status.Allocation == nil {
		return ""
	}
	var devices []string
	for _, result := range of.claim.Status.Allocation.Devices.Results {
		devices = append(devices, result.Device+" of "+device.NodeOfPool(result.Pool))
	}
	return ": allocated " + strings.Join(devices, ", ")
}

// ended explains a pod whose containers have ended or that kubelet did not admit.
func (f Facts) ended(a *Answer) {
	status := f.Pod.Status
	if status.Phase == corev1.PodSucceeded {
		a.Cause, a.Summary = CauseFinished, "has finished: its GPUs are free, or become free once its last process has ended"
		return
	}
	a.Cause, a.Summary = CauseFailed, "failed"
	if status.Reason != "" {
		a.Summary += " with " + status.Reason
	}
	if status.Message != "" {
		a.Summary += ": " + OneLine(status.Message)
	}
	if controller := metav1.GetControllerOfNoCopy(f.Pod); owner.Replaces(f.Pod) {
		a.Frees = append(a.Frees, fmt.Sprintf("%s %s creates another pod, as far as its own limits allow", controller.Kind, controller.Name))
	} else {
		a.Frees = append(a.Frees, owner.WhyNot(f.Pod)+": create it again")
	}
}

// placed explains a pod that the scheduler has placed.
func (f Facts) placed(a *Answer, claims []claimOf) {
	a.Has = f.has()
	running := f.Pod.Status.Phase == corev1.PodRunning
	node := f.gpuNode(f.Pod.Spec.NodeName)
	for _, of := range claims {
		if of.claim == nil || node == nil {
			continue
		}
		for _, conflict := range node.Status.Conflicts {
			if conflict.UID == of.claim.UID && !running {
				a.Cause, a.Summary = CauseConflict, fmt.Sprintf("waits on %s: %s", f.Pod.Spec.NodeName, OneLine(conflict.Message))
				if conflict.PendingEviction {
					a.Frees = append(a.Frees, "Tandem's controller evicts the pod; the pod that its owner creates is placed elsewhere")
				} else {
					a.Frees = append(a.Frees, fmt.Sprintf("the claim waits until %s is free: %s",
						strings.Join(conflict.Devices, ", "), cmp.Or(owner.WhyNot(f.Pod), "its pods may not be evicted")))
				}
			}
		}
	}
	switch {
	case a.Cause != "":
	case running && len(a.Has) > 0:
		a.Cause, a.Summary = CauseRunning, "runs on "+f.Pod.Spec.NodeName+" with "+strings.Join(a.Has, ", ")
	case running && len(a.Requests) == 0:
		a.Cause, a.Summary = CauseRunning, "runs on "+f.Pod.Spec.NodeName+" and requests no GPU"
	case running:
		a.Cause, a.Summary = CauseRunning, "runs on "+f.Pod.Spec.NodeName
	case node != nil && node.Status.Waiting != "" && len(a.Requests) > 0:
		a.Cause, a.Summary = CauseAgent, fmt.Sprintf("waits on %s: %s", f.Pod.Spec.NodeName, WhyUnserved(node.Status))
	case len(a.Requests) == 0:
		a.Cause, a.Summary = CauseStarting, "starts on "+f.Pod.Spec.NodeName+" and requests no GPU"
	case node == nil && !f.missing(KindGPUNodes):
		a.Cause, a.Summary = CauseAgent, fmt.Sprintf("waits on %s, which has %s", f.Pod.Spec.NodeName, NoGPUNode)
	default:
		a.Cause, a.Summary = CauseStarting, starts(f.Pod)
	}
}

// starts says what a pod waits for that the scheduler has placed.
func starts(pod *corev1.Pod) string {
	text := "starts on " + pod.Spec.NodeName
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "" {
			text += fmt.Sprintf(": container %s is waiting: %s", s.Name, w.Reason)
			if w.Message != "" {
				text += ": " + OneLine(w.Message)
			}
			break
		}
	}
	return text
}

// has returns the devices of which the pod is a holder.
func (f Facts) has() (devices []string) {
	node := f.gpuNode(f.Pod.Spec.NodeName)
	if node == nil {
		return nil
	}
	for _, d := range node.Status.Devices {
		for _, h := range d.Holders {
			if !slices.ContainsFunc(h.Pods, func(p v1alpha1.PodReference) bool { return owner.Is(f.Pod, p.UID) }) {
				continue
			}
			text := strings.TrimSpace(fmt.Sprintf("%s (%s, %s) %s", d.Name, cmp.Or(d.Model, d.UUID), via(h), Share(h)))
			if d.UnhealthyReason != "" {
				text += ", unhealthy: " + OneLine(d.UnhealthyReason)
			}
			devices = append(devices, text)
		}
	}
	return devices
}

func (f Facts) gpuNode(name string) *v1alpha1.GPUNode {
	if i := slices.IndexFunc(f.GPUNodes, func(n v1alpha1.GPUNode) bool { return n.Name == name }); i >= 0 {
		return &f.GPUNodes[i]
	}
	return nil
}

func (f Facts) missing(kind Kind) bool {
	return slices.ContainsFunc(f.NotRead, func(n NotRead) bool { return n.Kind == kind })
}

// unread reports whether it is not known what a claim requests, because the claim or its template could not be read.
func (f Facts) unread(of claimOf) bool {
	return of.spec == nil && (of.name != "" && f.missing(KindClaims) || of.template != "" && f.missing(KindTemplates))
}

func uniq(texts []string) (found []string) {
	for _, text := range texts {
		if !slices.Contains(found, text) {
			found = append(found, text)
		}
	}
	return found
}

// OneLine returns a text of the cluster on one line, with single spaces. It is pure. Views call it for what they show.
func OneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
