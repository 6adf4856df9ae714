// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"strconv"
	"strings"
)

// Ref names hardware that can be held: a whole GPU, or a partition of one by its place. It is comparable and survives a
// round trip through its text form, which is safe in a file name.
type Ref struct {
	// GPU is the UUID of the GPU, or of the partition's parent.
	GPU string
	// Placement is zero for a whole GPU.
	Placement Placement
}

// Placement is the range of memory slices that a partition takes on its parent (NVML's nvmlGpuInstancePlacement_t).
type Placement struct {
	Start, Size int
}

// Whole reports whether the Ref names a GPU with everything on it.
func (r Ref) Whole() bool { return r.Placement == Placement{} }

// Overlaps reports whether holding both would use the same hardware twice.
func (r Ref) Overlaps(other Ref) bool {
	if r.GPU != other.GPU {
		return false
	}
	if r.Whole() || other.Whole() {
		return true
	}
	a, b := r.Placement, other.Placement
	return a.Start < b.Start+b.Size && b.Start < a.Start+a.Size
}

// String is the UUID of a whole GPU, and "<uuid>@<start>+<size>" for a partition.
func (r Ref) String() string {
	if r.Whole() {
		return r.GPU
	}
	return fmt.Sprintf("%s@%d+%d", r.GPU, r.Placement.Start, r.Placement.Size)
}

// ParseRef is the inverse of Ref.String.
func ParseRef(s string) (Ref, error) {
	gpu, place, partition := strings.Cut(s, "@")
	if gpu == "" {
		return Ref{}, fmt.Errorf("parse device %q: no GPU UUID", s)
	}
	if !partition {
		return Ref{GPU: gpu}, nil
	}
	startText, sizeText, _ := strings.Cut(place, "+")
	start, startErr := strconv.Atoi(startText)
	size, sizeErr := strconv.Atoi(sizeText)
	if startErr != nil || sizeErr != nil || start < 0 || size <= 0 {
		return Ref{}, fmt.Errorf("parse device %q: placement %q is not <start>+<size>", s, place)
	}
	return Ref{GPU: gpu, Placement: Placement{Start: start, Size: size}}, nil
}
