// SPDX-License-Identifier: Apache-2.0

// Package overview is what kubectl gpu shows of a cluster's GPUs. cluster.go, facts.go and scrape.go read the API server. The other files
// decide what to show (overview.go, metrics.go, picture.go) and write it as text (text.go, table.go, draw.go, whytext.go). Those are pure, so
// that other views can use them. Flags are in cli/kubectl-gpu, reasons of waiting pods in cli/explain.
package overview

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

// Version of the JSON form of an Overview. Fields are added within a version; none changes its meaning or goes.
const Version = "v1alpha1"

// Overview are the devices of a cluster, or of some of its nodes. docs/user/kubectl-gpu.md describes its JSON form.
type Overview struct {
	Version string `json:"version"`
	Nodes   []Node `json:"nodes"`
	// GPUs and Partitions count the devices of Nodes by state, without excluded ones.
	GPUs       Counts `json:"gpus"`
	Partitions Counts `json:"partitions"`
}

// Counts are numbers of devices.
type Counts struct {
	Total     int `json:"total"`
	Free      int `json:"free"`
	Claims    int `json:"claims"`
	Pods      int `json:"pods"`
	Allocated int `json:"allocated"`
	Draining  int `json:"draining"`
	Unhealthy int `json:"unhealthy"`
	// Maintenance counts those that an administrator has taken out of service.
	Maintenance int `json:"maintenance"`
	// Tainted counts those with a taint, as of a DeviceTaintRule.
	Tainted int `json:"tainted"`
	// Unserved counts those without a holder on nodes that give no GPU to new pods and claims.
	Unserved int `json:"unserved"`
}

// Node is a node with GPUs.
type Node struct {
	Name string `json:"name"`
	Mode string `json:"mode,omitempty"`
	// Problem is why the node gives no GPU to new pods and claims, and since when, in one line; empty if it does.
	Problem string   `json:"problem,omitempty"`
	Devices []Device `json:"devices,omitempty"`
	// Conflicts are claims that were allocated a device which another holder has.
	Conflicts []Conflict `json:"conflicts,omitempty"`
	// Exporter is the pod that the metrics of the devices come from. NoMetrics is why they have none. ReadMetrics sets one of the two if the
	// node has devices.
	Exporter  *v1alpha1.PodReference `json:"exporter,omitempty"`
	NoMetrics *NoMetrics             `json:"noMetrics,omitempty"`
}

// State is who uses a device, in one word.
type State string

// The states of a device. A device has the first that applies.
const (
	Excluded    State = "Excluded"    // the node's configuration excludes it from both APIs
	Unhealthy   State = "Unhealthy"   // it cannot run work, held or not
	Maintenance State = "Maintenance" // an administrator has taken it out of service, held or not
	Tainted     State = "Tainted"     // it has a taint, as of a DeviceTaintRule, held or not
	Draining    State = "Draining"    // its holders have ended, and containers may still use it
	Claim       State = "Claim"       // a claim holds it, or a partition of it
	Pod         State = "Pod"         // a pod holds it, or a partition of it, by limits
	Allocated   State = "Allocated"   // the scheduler allocated it to a claim that is not prepared yet
	Unserved    State = "Unserved"    // it has no holder, and its node gives no GPU to new pods and claims
	Free        State = "Free"
)

// Device is a GPU or an existing partition. A partition follows its GPU.
type Device struct {
	Name string `json:"name"`
	UUID string `json:"uuid"`
	// Parent is the GPU of a partition, and Profile its profile; empty for a GPU.
	Parent  string   `json:"parent,omitempty"`
	Profile string   `json:"profile,omitempty"`
	Model   string   `json:"model,omitempty"`
	State   State    `json:"state"`
	Holders []Holder `json:"holders,omitempty"`
	// Allocated are claims that the scheduler allocated the device to and that do not hold it yet.
	Allocated []Claimed `json:"allocated,omitempty"`
	// UnhealthyReason is in one line; empty if the device is healthy. Slowdown is why it runs below its clocks.
	UnhealthyReason string `json:"unhealthyReason,omitempty"`
	Slowdown        string `json:"slowdown,omitempty"`
	// Maintenance is absent if the device is in service.
	Maintenance           *v1alpha1.DeviceMaintenance `json:"maintenance,omitempty"`
	Taints                []v1alpha1.DeviceTaint      `json:"taints,omitempty"`
	ExtendedResource      string                      `json:"extendedResource,omitempty"`
	ExtendedResourceState string                      `json:"extendedResourceState,omitempty"`
	Sharing               *Sharing                    `json:"sharing,omitempty"`
	// Metrics are absent if they were not read, or if dcgm-exporter has none of the device.
	Metrics *Metrics `json:"metrics,omitempty"`
}

// WhyOut returns why a device gets no new holder, other than its holders; empty if that is not so.
func (d Device) WhyOut() string {
	switch {
	case d.UnhealthyReason != "":
		return d.UnhealthyReason
	case d.Maintenance != nil:
		return cmp.Or(d.Maintenance.Reason, "no reason given")
	case len(d.Taints) == 1:
		return explain.OneLine(d.Taints[0].String())
	case len(d.Taints) > 1:
		return fmt.Sprintf("%s, and %d more", explain.OneLine(d.Taints[0].String()), len(d.Taints)-1)
	}
	return ""
}

// OutSince returns since when an administrator has taken a device out of service; nil if that is not known or not so.
func (d Device) OutSince() *metav1.Time {
	switch {
	case d.Maintenance != nil:
		return d.Maintenance.Since
	case len(d.Taints) > 0:
		return d.Taints[0].Since
	}
	return nil
}

// Holder is a claim or a pod that has a device, or a share of it.
type Holder struct {
	// Kind is Claim or Pod, State Held, Restored or Draining.
	Kind  string `json:"kind"`
	State string `json:"state"`
	// Claim is absent for a pod.
	Claim *Claimed                `json:"claim,omitempty"`
	Pods  []v1alpha1.PodReference `json:"pods,omitempty"`
	// Shared is set if it has a share: MemoryBytes of the memory, and so many equal Shares.
	Shared      bool   `json:"shared,omitempty"`
	MemoryBytes int64  `json:"memoryBytes,omitempty"`
	Shares      int64  `json:"shares,omitempty"`
	WaitsFor    string `json:"waitsFor,omitempty"`

	// text is the holder, and share its share, for users.
	text, share string
}

// Claimed names a claim.
type Claimed struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// String is the claim for users. A claim without a name is one that the viewer may not know.
func (c Claimed) String() string {
	if c.Name == "" {
		return "a claim of another namespace"
	}
	return "claim " + c.Namespace + "/" + c.Name
}

// Sharing is how several holders share a device.
type Sharing struct {
	Strategy    string `json:"strategy"`
	Claims      string `json:"claims,omitempty"`
	MemoryBytes int64  `json:"memoryBytes"`
	Shares      int64  `json:"shares,omitempty"`
	Replicas    int32  `json:"replicas,omitempty"`
}

// Conflict is a claim that was allocated a device which another holder has.
type Conflict struct {
	Claimed
	Devices []string    `json:"devices"`
	Since   metav1.Time `json:"since"`
	// PendingEviction is set if the controller evicts the claim's pods.
	PendingEviction bool   `json:"pendingEviction"`
	Message         string `json:"message"`
}

// String is the conflict for users.
func (c Conflict) String() string {
	return strings.TrimSuffix(fmt.Sprintf("%s, %s: %s", c.Claimed, strings.Join(c.Devices, ", "), c.Message), ": ")
}

// NodeOf describes a node by its GPUNode, which availability.AsOf has returned.
func NodeOf(from v1alpha1.GPUNode) Node {
	n := Node{Name: from.Name, Mode: from.Status.Mode, Problem: explain.WhyUnserved(from.Status)}
	known := availability.NewNode(from.Status, from.Spec.Claims)
	for _, d := range inOrder(from.Status.Devices) {
		device := deviceOf(d, known, from.Spec.Claims)
		if device.State == Free && n.Problem != "" {
			device.State = Unserved
		}
		n.Devices = append(n.Devices, device)
	}
	for _, c := range from.Status.Conflicts {
		n.Conflicts = append(n.Conflicts, Conflict{
			Claimed: Claimed{string(c.UID), c.Namespace, c.Name}, Devices: c.Devices, Since: metav1.Time{Time: c.Since.Time},
			PendingEviction: c.PendingEviction, Message: explain.OneLine(c.Message),
		})
	}
	return n
}

// WithoutAgent describes a node that has no GPUNode.
func WithoutAgent(node *corev1.Node) Node {
	if !explain.HasGPUs(node) {
		return Node{Name: node.Name, Problem: explain.NoGPUNode}
	}
	return Node{Name: node.Name, Problem: "it has GPUs and " + explain.NoGPUNode}
}

// inOrder returns GPUs by their names, each with its partitions behind it.
func inOrder(devices []v1alpha1.DeviceStatus) []v1alpha1.DeviceStatus {
	sorted := slices.Clone(devices)
	slices.SortStableFunc(sorted, func(a, b v1alpha1.DeviceStatus) int {
		gpu := func(d v1alpha1.DeviceStatus) string { return cmp.Or(d.Parent, d.Name) }
		x, y := gpu(a), gpu(b)
		// gpu-2 before gpu-10
		return cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(x, y), cmp.Compare(explain.Count(a.Parent != ""), explain.Count(b.Parent != "")))
	})
	return sorted
}

func deviceOf(d v1alpha1.DeviceStatus, known availability.Node, claims []v1alpha1.AllocatedClaim) Device {
	device := Device{
		Name: d.Name, UUID: d.UUID, Parent: d.Parent, Profile: d.Profile, Model: d.Model,
		UnhealthyReason: explain.OneLine(d.UnhealthyReason), Slowdown: d.Slowdown,
		ExtendedResource: d.ExtendedResource, ExtendedResourceState: string(d.ExtendedResourceState), Taints: d.Taints,
	}
	if m := d.Maintenance; m != nil {
		device.Maintenance = &v1alpha1.DeviceMaintenance{Reason: explain.OneLine(m.Reason), Since: m.Since}
	}
	if s := d.Sharing; s != nil {
		device.Sharing = &Sharing{Strategy: s.Strategy, Claims: string(s.Claims), MemoryBytes: s.Memory, Shares: s.Shares, Replicas: s.Replicas}
	}
	for _, h := range d.Holders {
		holder := Holder{
			Kind: string(h.Kind), State: string(h.State), Shared: h.Shared || h.Memory > 0, MemoryBytes: h.Memory, Shares: h.Shares,
			Pods: h.Pods, WaitsFor: explain.OneLine(h.WaitsFor), text: explain.Holder(h), share: explain.Share(h),
		}
		if h.Kind == v1alpha1.HolderClaim {
			holder.Claim = &Claimed{string(h.UID), h.Namespace, h.Name}
		}
		device.Holders = append(device.Holders, holder)
	}
	for _, claim := range claims {
		holds := slices.ContainsFunc(d.Holders, func(h v1alpha1.DeviceHolder) bool { return h.UID == claim.UID })
		// A partition that does not exist yet is looked up by its GPU.
		has := func(name string) bool { on, found := known.Status(name); return found && on.Name == d.Name }
		if !holds && slices.ContainsFunc(claim.Devices, has) {
			device.Allocated = append(device.Allocated, Claimed{string(claim.UID), claim.Namespace, claim.Name})
		}
	}
	device.State = stateOf(d, known)
	return device
}

// stateOf asks pkg/availability, as the counts in GPUNode do, and tells Draining and Allocated apart besides.
func stateOf(d v1alpha1.DeviceStatus, known availability.Node) State {
	name := availability.StatusName(d)
	if d.Excluded {
		return Excluded
	}
	switch reason := known.Reason(d); reason {
	case availability.Unhealthy, availability.Maintenance, availability.Tainted, availability.Draining:
		return State(reason) // they have the same names
	case availability.HeldByClaim:
		return Claim
	case availability.HeldByPod:
		for _, of := range known.Devices {
			holds := func(h v1alpha1.DeviceHolder) bool { return h.State != v1alpha1.HoldDraining }
			if availability.StatusName(of).Overlaps(name) && slices.ContainsFunc(of.Holders, holds) {
				return Pod
			}
		}
		return Draining
	}
	for _, use := range known.Allocated {
		if use.Device.Overlaps(name) {
			return Allocated
		}
	}
	return Free
}

// New returns the overview of nodes, sorted by name.
func New(nodes []Node) Overview {
	o := Overview{Version: Version, Nodes: append([]Node{}, nodes...)} // an empty list in JSON, not null
	slices.SortStableFunc(o.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	for _, n := range o.Nodes {
		for _, d := range n.Devices {
			if d.Parent == "" {
				o.GPUs.add(d.State)
			} else {
				o.Partitions.add(d.State)
			}
		}
	}
	return o
}

func (c *Counts) add(s State) {
	of := map[State]*int{
		Free: &c.Free, Claim: &c.Claims, Pod: &c.Pods, Allocated: &c.Allocated, Draining: &c.Draining, Unhealthy: &c.Unhealthy,
		Maintenance: &c.Maintenance, Tainted: &c.Tainted, Unserved: &c.Unserved,
	}[s]
	if of != nil {
		c.Total++
		*of++
	}
}

// Of returns text such as "8 GPUs: 2 by claims, 1 by pods, 5 free"; empty if there are none.
func (c Counts) Of(what string) string {
	if c.Total == 0 {
		return ""
	}
	return explain.Number(c.Total, what) + ": " + c.String()
}

// String returns text such as "2 by claims, 1 by pods, 5 free".
func (c Counts) String() string {
	var parts []string
	for _, part := range []struct {
		n    int
		what string
	}{
		{c.Claims, "by claims"}, {c.Pods, "by pods"}, {c.Allocated, "allocated"}, {c.Draining, "draining"}, {c.Unhealthy, "unhealthy"},
		{c.Maintenance, "under maintenance"}, {c.Tainted, "tainted"}, {c.Unserved, "unserved"}, {c.Free, "free"},
	} {
		if part.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", part.n, part.what))
		}
	}
	return strings.Join(parts, ", ")
}

// In returns the node with only the devices that a namespace uses: as a holder, or by a claim that is allocated one. A node whose devices
// it does not use has none, and then in is false.
func (n Node) In(namespace string) (_ Node, in bool) {
	of := n
	of.Devices, of.Conflicts = nil, nil
	for _, d := range n.Devices {
		if d.in(namespace) {
			of.Devices = append(of.Devices, d)
		}
	}
	for _, c := range n.Conflicts {
		if c.Namespace == namespace {
			of.Conflicts = append(of.Conflicts, c)
		}
	}
	return of, len(of.Devices) > 0
}

func (d Device) in(namespace string) bool {
	return slices.ContainsFunc(d.Allocated, func(c Claimed) bool { return c.Namespace == namespace }) ||
		slices.ContainsFunc(d.Holders, func(h Holder) bool {
			return h.Claim != nil && h.Claim.Namespace == namespace ||
				slices.ContainsFunc(h.Pods, func(p v1alpha1.PodReference) bool { return p.Namespace == namespace })
		})
}
