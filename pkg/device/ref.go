// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
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
	gpu, places, _ := strings.Cut(s, "@")
	ref := Ref{GPU: gpu}
	// Errors are ignored: if Sscanf does not read all of places, ref.String differs from s.
	_, _ = fmt.Sscanf(places, "%d+%d.%d+%d", &ref.Placement.Start, &ref.Placement.Size, &ref.Compute.Start, &ref.Compute.Size)
	valid := func(p Placement) bool { return p == Placement{} || p.Start >= 0 && p.Size > 0 }
	if gpu == "" || ref.String() != s || !valid(ref.Placement) || !valid(ref.Compute) {
		return Ref{}, fmt.Errorf("parse device %q: not <uuid>, <uuid>@<start>+<size> or <uuid>@<start>+<size>.<start>+<size>", s)
	}
	return ref, nil
}

// partitionInfix separates the GPU's name from the rest of a partition's name.
const partitionInfix = "-mig-"

// GPUName returns the published name of a device's GPU.
func GPUName(name string) string {
	gpu, _, _ := strings.Cut(name, partitionInfix)
	return gpu
}

// OwnPool returns the GPU pool of a dynamic GPU: "<node>/gpu-<minor>". The scheduler tries pools in the order of their names. All
// other devices of a node are in the node pool, which is named like the node.
func OwnPool(node string, g GPU) string { return fmt.Sprintf("%s/gpu-%02d", node, g.Minor) }

// NodeOfPool returns the node of a node pool or GPU pool.
func NodeOfPool(pool string) string {
	node, _, _ := strings.Cut(pool, "/")
	return node
}

// HardwareUUID returns the UUID in a device ID of NVIDIA's device plugin: "<uuid>::<n>" is a replica, and "MIG-<uuid of the
// GPU>/<gi>/<ci>" is a partition's name in older drivers, for which it returns the GPU. It returns any other ID unchanged
// (k8s-device-plugin, internal/rm/devices.go, AnnotatedID).
func HardwareUUID(id string) string {
	uuid, _, _ := strings.Cut(id, "::")
	if old, found := strings.CutPrefix(uuid, "MIG-GPU-"); found {
		uuid, _, _ = strings.Cut("GPU-"+old, "/")
	}
	return uuid
}

// Share is a part of a device that a holder has beside others: so much of its memory, and so many of the equal shares that the
// device is divided into. The zero Share is the whole device. It is comparable.
type Share struct {
	// Bytes of memory that the holder may use, of the Of bytes that the device has. Shares of different wholes cannot be added up.
	Bytes, Of uint64
	// Count of the OfCount equal shares. Both are zero where the device is divided by memory alone.
	Count   uint64 `json:",omitempty"`
	OfCount uint64 `json:",omitempty"`
}

// ShareUnit is the unit of memory shares: the smallest request, and what requests are rounded up to.
const ShareUnit = 1 << 20

// ShareOf returns a share of bytes of a device with that memory. It returns the whole device if less than one ShareUnit would be
// left, because the scheduler allocates no smaller share.
func ShareOf(bytes, memory uint64) Share {
	if bytes+ShareUnit > memory {
		return Share{}
	}
	return Share{Bytes: bytes, Of: memory}
}

// Replica is one of n equal shares of a device, in whole MiB where there are enough; the whole device for fewer than two.
func Replica(memory uint64, n int) Share {
	switch count := uint64(max(n, 0)); {
	case count < 2:
		return Share{}
	case memory < count*ShareUnit:
		// Its memory is not known: the shares stand for themselves.
		return Share{Bytes: ShareUnit, Of: count * ShareUnit}
	default:
		return Share{Bytes: memory / count / ShareUnit * ShareUnit, Of: memory}
	}
}

// Whole reports whether it is all of the device.
func (s Share) Whole() bool { return s == Share{} }

// AllMemory reports whether the share is all of the device's memory. For as much, ShareOf returns the whole device.
func (s Share) AllMemory() bool { return s.Count == 0 && ShareOf(s.Bytes, s.Of).Whole() }

// SameWhole reports whether both are shares that can be added up: of as much memory, and of as many equal shares.
func (s Share) SameWhole(other Share) bool {
	return !s.Whole() && s.Of == other.Of && s.OfCount == other.OfCount
}

// Full returns all of the whole that s is a share of.
func (s Share) Full() Share {
	s.Bytes, s.Count = s.Of, s.OfCount
	return s
}

// Plus adds a share of the same whole.
func (s Share) Plus(other Share) Share {
	s.Bytes += other.Bytes
	s.Count += other.Count
	return s
}

// Fits reports whether the share is no more than its whole.
func (s Share) Fits() bool { return s.Bytes <= s.Of && s.Count <= s.OfCount }

// String is "10240Mi of 24564Mi", "1 of 4 shares", "1 of 4 shares with 1024Mi of 24564Mi", or "all".
func (s Share) String() string {
	memory := fmt.Sprintf("%dMi of %dMi", s.Bytes/ShareUnit, s.Of/ShareUnit)
	counted := fmt.Sprintf("%d of %d shares", s.Count, s.OfCount)
	switch {
	case s.Whole():
		return "all"
	case s.OfCount == 0:
		return memory
	case s.Bytes == 0:
		return counted
	default:
		return counted + " with " + memory
	}
}
