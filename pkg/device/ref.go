// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strconv"
	"strings"
)

// Ref identifies hardware that can be held: a whole GPU, or a partition by its placement. It is comparable and has a text form
// that is safe in a file name.
type Ref struct {
	// GPU is the UUID of the GPU, or of the partition's parent.
	GPU string
	// Placement is zero for a whole GPU; otherwise the memory slices of the GPU instance.
	Placement Placement
	// Compute is zero for a partition with its own GPU instance; otherwise its compute slices in a shared one.
	Compute Placement
}

// Placement is a range of slices: memory slices of a GPU (NVML's nvmlGpuInstancePlacement_t), or compute slices of a GPU
// instance (nvmlComputeInstancePlacement_t).
type Placement struct {
	Start, Size int
}

// Overlaps reports whether the two ranges have a slice in common.
func (p Placement) Overlaps(other Placement) bool {
	return p.Start < other.Start+other.Size && other.Start < p.Start+p.Size
}

// Whole reports whether it is a whole GPU.
func (r Ref) Whole() bool { return r.Placement == Placement{} }

// Overlaps reports whether both use the same hardware, at least in part.
func (r Ref) Overlaps(other Ref) bool {
	if r.GPU != other.GPU {
		return false
	}
	if r.Whole() || other.Whole() {
		return true
	}
	if r.Placement == other.Placement && r.Compute.Size > 0 && other.Compute.Size > 0 {
		return r.Compute.Overlaps(other.Compute)
	}
	return r.Placement.Overlaps(other.Placement)
}

// String returns the UUID of a whole GPU, "<uuid>@<start>+<size>" of a partition, and "<uuid>@<start>+<size>.<start>+<size>" of a
// partition with the compute slices after the dot.
func (r Ref) String() string {
	switch {
	case r.Whole():
		return r.GPU
	case r.Compute.Size == 0:
		return r.GPU + "@" + r.Placement.String()
	default:
		return r.GPU + "@" + r.Placement.String() + "." + r.Compute.String()
	}
}

// String returns "<start>+<size>".
func (p Placement) String() string { return fmt.Sprintf("%d+%d", p.Start, p.Size) }

// ParseRef is the inverse of Ref.String.
func ParseRef(s string) (Ref, error) {
	gpu, place, partition := strings.Cut(s, "@")
	if gpu == "" {
		return Ref{}, fmt.Errorf("parse device %q: no GPU UUID", s)
	}
	if !partition {
		return Ref{GPU: gpu}, nil
	}
	gpuInstance, compute, some := strings.Cut(place, ".")
	ref := Ref{GPU: gpu}
	var ok bool
	if ref.Placement, ok = parsePlacement(gpuInstance); !ok {
		return Ref{}, fmt.Errorf("parse device %q: placement %q is not <start>+<size>", s, gpuInstance)
	}
	if !some {
		return ref, nil
	}
	if ref.Compute, ok = parsePlacement(compute); !ok {
		return Ref{}, fmt.Errorf("parse device %q: compute placement %q is not <start>+<size>", s, compute)
	}
	return ref, nil
}

func parsePlacement(s string) (Placement, bool) {
	startText, sizeText, _ := strings.Cut(s, "+")
	start, startErr := strconv.Atoi(startText)
	size, sizeErr := strconv.Atoi(sizeText)
	p := Placement{Start: start, Size: size}
	return p, startErr == nil && sizeErr == nil && start >= 0 && size > 0
}
