// SPDX-License-Identifier: Apache-2.0

// Package oracle reads a cluster of hack/cluster from outside. It reports which container can see which GPU, and whether
// containers of different holders see the same GPU. It reads processes, cgroups and device nodes of the host's kernel and objects
// of the API server. It never asks the driver, reads none of its files and shares no code with it, so that its result is
// independent of the ledger's.
package oracle

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/hack/cluster"
)

// Number is a character device's number.
type Number struct{ Major, Minor uint32 }

// String is major:minor.
func (n Number) String() string { return fmt.Sprintf("%d:%d", n.Major, n.Minor) }

// GPU is what the files of a node's driver say about a device number. It is zero but for Minor where they say nothing.
type GPU struct {
	UUID     string
	PCIBusID string
	// Index is the GPU's place in PCI order, NUMANode -1 where unknown.
	Index, Minor, NUMANode int
	// Memory in bytes; zero where unknown.
	Memory int64
	// Sharing is what the caller of NewLookout passed for this GPU.
	Sharing
}

// Sharing is how the configuration of a node shares a GPU among several holders.
type Sharing struct {
	// Replicas is the number of devices that limits see for the GPU; zero if it is not shared.
	Replicas int
	// Shares is the number of equal shares for claims; zero if the GPU has none.
	Shares int
}

// Share is the part of a device that a holder has. The zero Share is the whole device.
type Share struct {
	// Part means that it is not the whole device. A claim of a GPU without a limit may have neither memory nor equal shares.
	Part bool
	// Memory is in bytes, Count the number of equal shares.
	Memory, Count int64
}

// least returns the smaller of two shares that a holder may have.
func (s Share) least(other Share) Share {
	switch {
	case !s.Part:
		return other
	case !other.Part:
		return s
	}
	return Share{Part: true, Memory: min(s.Memory, other.Memory), Count: min(s.Count, other.Count)}
}

// most returns the larger of two shares that a holder may have.
func (s Share) most(other Share) Share {
	if !s.Part || !other.Part {
		return Share{}
	}
	return Share{Part: true, Memory: max(s.Memory, other.Memory), Count: max(s.Count, other.Count)}
}

// Partition is a compute instance of a GPU.
type Partition struct {
	// Instance is "gi7/ci0", as the driver lists capabilities.
	Instance string
	// GPU is the number of the GPU that it is a partition of.
	GPU Number
	// UUID of the MIG device, and the memory slices that it has; zero where the machine does not know it any more.
	UUID        string
	Start, Size int
	// Published ends the names under which it can be published: GPU instance profile and start, and the compute instance's start.
	Published [2]string
}

// Whole reports whether the device is a GPU.
func (d Device) Whole() bool { return d.Partition.Instance == "" }

// gpu is the number of the GPU that the device is, or is a partition of.
func (d Device) gpu() Number {
	if d.Whole() {
		return d.Number
	}
	return d.Partition.GPU
}

// Minor is that of the GPU that the device is, or is a partition of.
func (d Device) Minor() int { return int(d.gpu().Minor) }

// Is reports whether the device is meant by a name under which it can be published, by a UUID, or by the device ID of a foreign plugin
// (ForeignID).
func (d Device) Is(name string) bool {
	if d.Whole() {
		minor, foreign := ForeignID(name)
		return name == d.GPU.UUID || d.published(name) || foreign && minor == d.Minor()
	}
	return name == d.Partition.UUID && name != "" || d.published(name)
}

// Overlaps reports whether both use the same hardware.
func (d Device) Overlaps(other Device) bool {
	a, b := d.Partition, other.Partition
	switch {
	case d.gpu() != other.gpu():
		return false
	case d.Whole() || other.Whole() || d.Number == other.Number:
		return true
	case gpuInstance(a) == gpuInstance(b):
		return false
	}
	return a.Start < b.Start+b.Size && b.Start < a.Start+a.Size
}

func gpuInstance(p Partition) string {
	name, _, _ := strings.Cut(p.Instance, "/")
	return name
}

// API is how a pod came to a device, as the API server's objects tell.
type API string

const (
	// Claim means that a ResourceClaim of the pod has the device allocated.
	Claim API = "claim"
	// Limits means that the pod asks for devices by limits and no claim of it has this one.
	Limits API = "limits"
	// Admin means that only claims with admin access have the device allocated to the pod. They hold nothing.
	Admin API = "admin"
	// Unexplained means that the pod asks for no device at all, or is unknown to the API server.
	Unexplained API = "unexplained"
	// Unseen means that the pod has a claim of which no allocation was seen. What it has of the device is unknown.
	Unseen API = "unseen"
)

// Device is a GPU's device node in a container, or of a MIG partition that of the right to use it.
type Device struct {
	Number Number
	// Path of the node in the container.
	Path string
	// GPU that it is, or that it is a partition of.
	GPU GPU
	// Partition is zero for a whole GPU.
	Partition Partition
	API       API
	// ClaimUID and ClaimName are those of the claim where API is Claim.
	ClaimUID, ClaimName string
	// Holder is equal for those who hold the device together: "claim/UID" or "pod/UID"; empty where API is Admin.
	Holder string
	// Share is what the holder has of the device.
	Share Share
}

// Container is a container with a live process, on a node.
type Container struct {
	Node   string
	PodUID string
	ID     string
	// Namespace, Pod and Name are empty where the API server does not know the pod or the container (a sandbox).
	Namespace, Pod, Name string
	// PIDs are its processes, as the host numbers them.
	PIDs []int
	// Devices are the GPUs' nodes below its /dev, in order of their numbers.
	Devices []Device
}

// Title names the pod for a reader.
func (c Container) Title() string {
	if c.Pod == "" {
		return "unknown pod " + c.PodUID
	}
	return c.Namespace + "/" + c.Pod
}

// Picture is what was seen at one moment: there was an instant at which all its containers had live processes.
type Picture struct {
	// Containers in the order of node, namespace, pod, name. Those of the driver itself are not among them.
	Containers []Container
}

// Double is a device that containers of different holders can see, who may not have it at once.
type Double struct {
	Node   string
	Number Number
	GPU    GPU
	// Holders, at least two, and the containers in which they have it.
	Holders    []string
	Containers []Container
	// shares are the holders' shares of it.
	shares map[string]Share
}

// String names the device and the pods.
func (d Double) String() string {
	text := fmt.Sprintf("%s: device %s (%s) has %d holders:", d.Node, d.Number, d.GPU.UUID, len(d.Holders))
	for _, container := range d.Containers {
		text += fmt.Sprintf(" %s/%s", container.Title(), container.Name)
	}
	for _, holder := range d.Holders {
		share := d.shares[holder]
		if share.Memory > 0 {
			text += fmt.Sprintf("; %s has %d MiB of %d", holder, share.Memory>>20, d.GPU.Memory>>20)
		}
		if share.Count > 0 {
			text += fmt.Sprintf("; %s has %d shares of %d", holder, share.Count, d.GPU.Shares)
		}
	}
	return text
}

// add records a container in which a holder has this share of the device. The containers of one holder use its share together.
func (d *Double) add(container Container, device Device, share Share) {
	if d.shares == nil {
		d.shares = map[string]Share{}
	}
	if before, known := d.shares[device.Holder]; known {
		share = share.most(before)
	} else {
		d.Holders = append(d.Holders, device.Holder)
	}
	d.shares[device.Holder] = share
	d.Containers = append(d.Containers, container)
}

// guilty reports whether the holders must not have the device at once. There are several, and one of them has the whole device, or the
// device does not have enough memory or enough equal shares for all. If the GPU's memory or number of equal shares is unknown, guilty
// does not check it.
func (d Double) guilty() bool {
	var sum Share
	for _, share := range d.shares {
		if !share.Part {
			return len(d.Holders) > 1
		}
		sum.Memory += share.Memory
		sum.Count += share.Count
	}
	memory, shares := d.GPU.Memory, int64(d.GPU.Shares)
	return len(d.Holders) > 1 && (memory > 0 && sum.Memory > memory || shares > 0 && sum.Count > shares)
}

// DoublyOwned returns the devices that containers of different holders see and may not see at once, in order of node and number.
// A pod is one holder. Pods that share a ResourceClaim for the same device are one holder. Admin access holds nothing. A
// partition belongs to its GPU: it conflicts with a holder of the whole GPU. Claims with shares of a GPU do not conflict while
// it has memory for all of them. DoublyOwned does not know the numbers of equal shares and of replicas. So it does not count equal shares,
// and a pod with an extended resource counts as a holder of the whole GPU.
func (p Picture) DoublyOwned() []Double {
	type place struct {
		node   string
		number Number
	}
	seen := map[place]*Double{}
	for _, container := range p.Containers {
		for _, device := range container.Devices {
			if device.Holder == "" {
				continue
			}
			at := place{container.Node, device.Number}
			if seen[at] == nil {
				seen[at] = &Double{Node: container.Node, Number: device.Number, GPU: device.GPU}
			}
			seen[at].add(container, device, device.Share)
		}
	}
	for _, container := range p.Containers {
		for _, device := range container.Devices {
			whole := seen[place{container.Node, device.Partition.GPU}]
			if device.Holder != "" && !device.Whole() && whole != nil {
				whole.add(container, device, Share{})
			}
		}
	}
	var doubles []Double
	for _, double := range seen {
		if double.guilty() {
			doubles = append(doubles, *double)
		}
	}
	slices.SortFunc(doubles, func(a, b Double) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), a.Number.compare(b.Number))
	})
	return doubles
}

func (n Number) compare(other Number) int {
	return cmp.Or(cmp.Compare(n.Major, other.Major), cmp.Compare(n.Minor, other.Minor))
}

// Pod answers the live containers of a pod.
func (p Picture) Pod(namespace, name string) []Container {
	var found []Container
	for _, container := range p.Containers {
		if container.Namespace == namespace && container.Pod == name {
			found = append(found, container)
		}
	}
	return found
}

// PodDevices answers the devices that any container of a pod sees, each once, in order of their numbers.
func (p Picture) PodDevices(namespace, name string) []Device {
	var found []Device
	for _, container := range p.Pod(namespace, name) {
		for _, device := range container.Devices {
			if !slices.ContainsFunc(found, func(d Device) bool { return d.Number == device.Number }) {
				found = append(found, device)
			}
		}
	}
	slices.SortFunc(found, func(a, b Device) int { return a.Number.compare(b.Number) })
	return found
}

// Unexplained answers the containers that see a GPU which nothing the pod asked for explains.
func (p Picture) Unexplained() []Container {
	var found []Container
	for _, container := range p.Containers {
		if slices.ContainsFunc(container.Devices, func(d Device) bool { return d.API == Unexplained || d.API == Unseen }) {
			found = append(found, container)
		}
	}
	return found
}

// Observe looks at every node of a cluster. It needs root on the host. Any number may run at once. A node that is down has
// no containers; a process that ends while it is looked at is left out.
func Observe(ctx context.Context, c *cluster.Cluster) (Picture, error) {
	var found []sighting
	for _, node := range c.Nodes() {
		seen, err := lookAt(ctx, node)
		if err != nil {
			return Picture{}, fmt.Errorf("observe %s: %w", node.Name(), err)
		}
		found = append(found, seen...)
	}
	// Objects after processes: what runs was created before, so only what is deleted meanwhile can be missing.
	config, err := c.RESTConfig()
	if err != nil {
		return Picture{}, fmt.Errorf("observe cluster: %w", err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return Picture{}, fmt.Errorf("observe cluster: %w", err)
	}
	objects, err := readObjects(ctx, client)
	if err != nil {
		return Picture{}, fmt.Errorf("observe cluster: %w", err)
	}
	// Whatever has ended by now may have been seen beside its successor.
	found = slices.DeleteFunc(found, func(s sighting) bool { return !s.alive() })
	return objects.explain(found), nil
}
