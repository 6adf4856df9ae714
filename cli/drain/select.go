// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/pkg/availability"
	"github.com/tandem-gpu/tandem/pkg/device"
)

// GPU is a GPU of a node.
type GPU struct{ Name, UUID string }

// Select returns the GPU that a user names by its number, name or UUID, or all GPUs of the node for an empty name. It is a pure function.
func Select(node v1alpha1.GPUNode, name string) ([]GPU, error) {
	var gpus []GPU
	var names []string
	for _, d := range node.Status.Devices {
		switch {
		case d.Parent != "" && (d.Name == name || d.UUID == name):
			return nil, fmt.Errorf("%s of %s is a partition: maintenance concerns its GPU %s", d.Name, node.Name, d.Parent)
		case d.Parent != "" || d.UUID == "":
		case name == "" && !d.Excluded, d.Name == name, d.UUID == name, d.Name == "gpu-"+name:
			gpus = append(gpus, GPU{d.Name, d.UUID})
		default:
			names = append(names, d.Name)
		}
	}
	switch {
	case len(gpus) > 0:
		return gpus, nil
	case node.Status.Waiting != "":
		return nil, fmt.Errorf("%s lists no GPU: %s", node.Name, explain.WhyUnserved(node.Status))
	case len(names) == 0 || name == "":
		return nil, fmt.Errorf("%s reports no GPU", node.Name)
	default:
		return nil, fmt.Errorf("%s has no GPU %q: it has %s", node.Name, name, strings.Join(names, ", "))
	}
}

// With returns the entries with those of the GPUs. A GPU that has an entry keeps its time, and its reason unless another one is given. It is
// a pure function.
func With(entries []v1alpha1.GPUMaintenance, gpus []GPU, reason string, now metav1.Time) ([]v1alpha1.GPUMaintenance, error) {
	entries = slices.Clone(entries)
	for _, g := range gpus {
		at := slices.IndexFunc(entries, func(e v1alpha1.GPUMaintenance) bool { return e.UUID == g.UUID })
		switch {
		case at < 0:
			entries = append(entries, v1alpha1.GPUMaintenance{UUID: g.UUID, Reason: reason, Since: &now})
		case reason != "":
			entries[at].Reason = reason
		}
	}
	if len(entries) > v1alpha1.MaxMaintenance {
		return nil, fmt.Errorf("the node would have %d entries in spec.maintenance, and at most %d are stored: kubectl gpu undrain removes "+
			"those of GPUs that it no longer has", len(entries), v1alpha1.MaxMaintenance)
	}
	return entries, nil
}

// Without returns the entries of a node without those of the named GPU, which need not exist any more, or without any for an empty name.
// ended are the names of the GPUs that had one. It is a pure function.
func Without(node v1alpha1.GPUNode, name string) (entries []v1alpha1.GPUMaintenance, ended []string, err error) {
	uuid := ""
	if _, known := node.Spec.MaintenanceOf(name); known {
		uuid = name
	} else if name != "" {
		gpus, err := Select(node, name)
		if err != nil {
			return nil, nil, err
		}
		uuid = gpus[0].UUID
	}
	for _, entry := range node.Spec.Maintenance {
		if name != "" && entry.UUID != uuid {
			entries = append(entries, entry)
			continue
		}
		of := entry.UUID
		for _, d := range node.Status.Devices {
			if d.UUID == entry.UUID {
				of = d.Name
			}
		}
		ended = append(ended, of)
	}
	return entries, ended, nil
}

// Waiting is what a GPU waits for until it is free.
type Waiting struct {
	// Text continues "gpu-0 of node-1"; empty if the GPU is free.
	Text string
	// Unanswered is set until the agent has withdrawn the GPU.
	Unanswered bool
	// Holders are the pods of each holder, as the GPUNode names them. A claim that is not prepared yet has none.
	Holders [][]v1alpha1.PodReference
}

// OnlyFor reports whether the GPU waits for nothing but holders all of whose pods are in the set. It is a pure function.
func (w Waiting) OnlyFor(pods map[types.UID]bool) bool {
	other := func(p v1alpha1.PodReference) bool { return !pods[p.UID] }
	return len(w.Holders) > 0 && !slices.ContainsFunc(w.Holders, func(named []v1alpha1.PodReference) bool {
		return len(named) == 0 || slices.ContainsFunc(named, other)
	})
}

// Waits returns what a GPU waits for by its node's GPUNode: its agent, its holders and those of its partitions, and claims that were
// allocated it, which are in the GPUNode or in allocated. An answer of the agent to an earlier generation of the spec does not count. A GPU
// that the node no longer has waits for nothing. It is a pure function.
func Waits(node v1alpha1.GPUNode, gpu GPU, generation int64, allocated []v1alpha1.AllocatedClaim) (w Waiting) {
	answered := node.Status.ObservedGeneration >= generation
	name, there := availability.Name{}, false
	for _, d := range node.Status.Devices {
		if d.UUID == gpu.UUID {
			name, there = availability.StatusName(d), true
			answered = answered && d.Maintenance != nil
		}
	}
	switch {
	// An agent that waits for the driver lists no GPU, gives none to a holder, and observes no generation.
	case !answered && (there || node.Status.Waiting == ""):
		w := Waiting{Text: "is not withdrawn yet: the agent of the node has not answered", Unanswered: true}
		if why := explain.WhyUnserved(node.Status); why != "" {
			w.Text += "; " + why
		}
		return w
	case !there:
		return Waiting{}
	}
	var holders []string
	add := func(text string, pods []v1alpha1.PodReference) {
		if !slices.Contains(holders, text) {
			holders = append(holders, text)
		}
		w.Holders = append(w.Holders, pods)
	}
	held := map[types.UID]bool{} // by claim
	for _, d := range node.Status.Devices {
		if !availability.StatusName(d).Overlaps(name) {
			continue
		}
		for _, h := range d.Holders {
			text := explain.Holder(h)
			if h.WaitsFor != "" {
				text += ", which has ended and waits for " + explain.OneLine(h.WaitsFor)
			}
			add(text, h.Pods)
			held[h.UID] = true
		}
	}
	for _, claim := range slices.Concat(node.Spec.Claims, allocated) {
		if !held[claim.UID] && overlaps(claim, name) {
			add(fmt.Sprintf("claim %s/%s, not prepared yet", claim.Namespace, claim.Name), nil)
		}
	}
	if len(holders) > 0 {
		w.Text = "is held by " + strings.Join(holders, "; ")
		if why := explain.WhyUnserved(node.Status); why != "" {
			w.Text += " (" + why + ")"
		}
	}
	return w
}

func overlaps(claim v1alpha1.AllocatedClaim, gpu availability.Name) bool {
	return slices.ContainsFunc(claim.Devices, func(published string) bool { return availability.NameOf(published).Overlaps(gpu) })
}

// AllocatedOn returns the devices of a node that a claim is allocated, and none for a claim without any. Devices with admin access do not
// count: the claim does not hold them. It is a pure function.
func AllocatedOn(node, driver string, claim *resourceapi.ResourceClaim) (of v1alpha1.AllocatedClaim) {
	of = v1alpha1.AllocatedClaim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name}
	if claim.Status.Allocation == nil {
		return of
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		if r.Driver == driver && device.NodeOfPool(r.Pool) == node && (r.AdminAccess == nil || !*r.AdminAccess) {
			of.Devices = append(of.Devices, r.Device)
		}
	}
	return of
}
