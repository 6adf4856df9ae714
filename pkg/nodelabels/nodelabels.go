// SPDX-License-Identifier: Apache-2.0

// Package nodelabels computes and writes the labels that NVIDIA's GPU Feature Discovery (GFD) gives to a node: keys, values and exceptions are
// those of k8s-device-plugin, internal/lm and docs/gpu-feature-discovery.
package nodelabels

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// Prefix begins the key of each label.
const Prefix = "nvidia.com/"

// timestamp is the label with the time of GPU Feature Discovery's start.
const timestamp = "gfd.timestamp"

// longest is the longest value that the API accepts.
const longest = 63

// Options of Of.
type Options struct {
	Resources device.Resources
	// Machine is the model of the machine, as in /sys/class/dmi/id/product_name; empty if it is not known.
	Machine string
	// Timestamp is when the labels are made; zero for no such label.
	Timestamp time.Time
}

// Of returns the labels of a node, and none without a GPU. GPUs and partitions have the sharing of the node configuration. It is pure. The
// values are valid: GFD's own may be too long.
func Of(inv device.Inventory, o Options) map[string]string {
	if len(inv.GPUs) == 0 {
		return nil
	}
	l := labels{}
	l.set("gpu.machine", sanitise(cmp.Or(strings.TrimSpace(o.Machine), "unknown")))
	l.versions(inv)
	l.set("mig.capable", slices.ContainsFunc(inv.GPUs, func(g device.GPU) bool { return g.MIGCapable }))
	l.set("mps.capable", mpsCapable(inv.GPUs))
	l.set("vgpu.present", false) // Tandem serves no guests with a vGPU
	l.set("gpu.mode", mode(inv.GPUs))
	if clique := clique(inv.GPUs); clique != "" {
		l.set("gpu.clique", clique)
	}
	if !o.Timestamp.IsZero() {
		l.set(timestamp, o.Timestamp.Unix())
	}
	l.gpus(inv.GPUs, o.Resources)
	switch o.Resources.Strategy {
	case device.MIGStrategySingle:
		l.set("mig.strategy", o.Resources.Strategy)
		l.single(inv.GPUs, o.Resources)
	case device.MIGStrategyMixed:
		l.set("mig.strategy", o.Resources.Strategy)
		for profile, partitions := range byProfile(inv.GPUs) {
			resource := o.Resources.Of(profile)
			_, key, _ := strings.Cut(resource, "/")
			l.partitions(key, resource, partitions)
		}
	}
	return l
}

type labels map[string]string

func (l labels) set(key string, value any) {
	l[Prefix+key] = shorten(fmt.Sprint(value), longest)
}

// shorten cuts a text, and what a label value may not begin or end with.
func shorten(text string, most int) string {
	return strings.Trim(text[:min(len(text), most)], "-_.")
}

// versions are driver and CUDA, under the deprecated names as well.
func (l labels) versions(inv device.Inventory) {
	driver := strings.Split(inv.DriverVersion, ".")
	for i, names := range [][2]string{{"major", "major"}, {"minor", "minor"}, {"rev", "revision"}} {
		part := ""
		if i < len(driver) {
			part = driver[i]
		}
		l.set("cuda.driver."+names[0], part)
		l.set("cuda.driver-version."+names[1], part)
	}
	l.set("cuda.driver-version.full", inv.DriverVersion)
	major, minor, _ := strings.Cut(inv.GPUs[0].CUDADriverVersion, ".")
	l.set("cuda.runtime.major", major)
	l.set("cuda.runtime.minor", minor)
	l.set("cuda.runtime-version.major", major)
	l.set("cuda.runtime-version.minor", minor)
	l.set("cuda.runtime-version.full", inv.GPUs[0].CUDADriverVersion)
}

// partitioned reports whether a GPU is in MIG mode for the administrator's partitions. Partitions for claims come and go, and do not count.
func partitioned(g device.GPU) bool { return g.MIGEnabled && !g.Dynamic }

// fixed returns the administrator's partitions of a GPU.
func fixed(g device.GPU) (devices []device.Device) {
	for _, p := range g.Fixed() {
		if p.Known() {
			devices = append(devices, device.Device{GPU: g, Partition: p})
		}
	}
	return devices
}

func byProfile(gpus []device.GPU) map[string][]device.Device {
	found := map[string][]device.Device{}
	for _, g := range gpus {
		for _, d := range fixed(g) {
			found[d.Partition.Profile] = append(found[d.Partition.Profile], d)
		}
	}
	return found
}

// gpus are the labels of the node's GPUs, in MIG mode or not. Those that are not in MIG mode are described if there are any. Of several
// models the commonest counts; GFD takes any.
func (l labels) gpus(gpus []device.GPU, r device.Resources) {
	models, all := map[string][]device.GPU{}, map[string]int{}
	described := slices.DeleteFunc(slices.Clone(gpus), partitioned)
	if len(described) == 0 {
		described = gpus
	}
	for _, g := range gpus {
		all[g.ProductName]++
	}
	for _, g := range described {
		models[g.ProductName] = append(models[g.ProductName], g)
	}
	names := slices.SortedFunc(maps.Keys(models), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(models[b]), len(models[a])), cmp.Compare(models[a][0].Index, models[b][0].Index))
	})
	shown := models[names[0]][0]
	count := all[shown.ProductName]
	if !partitioned(shown) {
		l.base("gpu", count, device.Device{GPU: shown}, r.GPU, sanitise(shown.ProductName))
	} else {
		l.set("gpu.product", sanitise(shown.ProductName))
		l.set("gpu.count", count)
		l.set("gpu.replicas", 0)
		l.set("gpu.sharing-strategy", "none")
	}
	if shown.MemoryBytes > 0 {
		l.set("gpu.memory", shown.MemoryBytes>>20)
	}
	if major, minor, found := strings.Cut(shown.ComputeCapability, "."); found && major != "0" {
		l.set("gpu.family", family(major, minor))
		l.set("gpu.compute.major", major)
		l.set("gpu.compute.minor", minor)
	}
}

// base has the labels that every resource has.
func (l labels) base(key string, count int, d device.Device, resource string, parts ...string) {
	sharing := d.Sharing()
	replicas := sharing.ReplicasOf(resource)
	strategy := "none"
	if replicas.Count > 1 {
		strategy = map[device.SharingStrategy]string{device.TimeSlicing: "time-slicing", device.MPS: "mps"}[sharing.Strategy]
		if !replicas.Renamed {
			parts = append(parts, "SHARED")
		}
	}
	// The end distinguishes products of one model.
	end := strings.Join(append([]string{""}, parts[1:]...), "-")
	l.set(key+".product", shorten(parts[0], longest-len(end))+end)
	l.set(key+".count", count)
	l.set(key+".replicas", max(1, replicas.Count))
	l.set(key+".sharing-strategy", strategy)
}

// single sets the labels of MIGStrategySingle. They describe the partitions instead of the GPUs, or say that the partitions differ.
func (l labels) single(gpus []device.GPU, r device.Resources) {
	first := slices.IndexFunc(gpus, partitioned)
	if first < 0 {
		return
	}
	profiles := byProfile(gpus)
	isWhole := func(g device.GPU) bool { return !partitioned(g) }
	isEmpty := func(g device.GPU) bool { return partitioned(g) && len(fixed(g)) == 0 }
	if len(profiles) != 1 || slices.ContainsFunc(gpus, isWhole) || slices.ContainsFunc(gpus, isEmpty) {
		l.set("gpu.product", sanitise(gpus[first].ProductName)+"-MIG-INVALID")
		l.set("gpu.count", 0)
		l.set("gpu.replicas", 0)
		l.set("gpu.sharing-strategy", "")
		l.set("gpu.memory", 0)
		return
	}
	for _, partitions := range profiles {
		l.partitions("gpu", r.GPU, partitions)
	}
}

// partitions has the labels of partitions of one profile, which are one resource.
func (l labels) partitions(key, resource string, partitions []device.Device) {
	d := partitions[0]
	l.base(key, len(partitions), d, resource, sanitise(d.GPU.ProductName), "MIG", sanitise(strings.ReplaceAll(d.Partition.Profile, "+", ".")))
	c := d.Partition.Capacity
	gi, ci := slicesOf(d.Partition.Profile)
	for name, value := range map[string]int{
		"memory": int(c.MemoryBytes >> 20), "multiprocessors": c.Multiprocessors, "slices.gi": gi, "slices.ci": ci,
		"engines.copy": c.CopyEngines, "engines.decoder": c.Decoders, "engines.encoder": c.Encoders, "engines.jpeg": c.JPEGEngines, "engines.ofa": c.OFAEngines,
	} {
		l.set(key+"."+name, value)
	}
}

// slicesOf returns the slices of GPU instance and compute instance in the name of a profile: 3 and 2 in "2c.3g.40gb".
func slicesOf(profile string) (gi, ci int) {
	for part := range strings.SplitSeq(profile, ".") {
		if n, err := strconv.Atoi(strings.TrimSuffix(part, "g")); err == nil && strings.HasSuffix(part, "g") {
			gi = n
		}
		if n, err := strconv.Atoi(strings.TrimSuffix(part, "c")); err == nil && strings.HasSuffix(part, "c") {
			ci = n
		}
	}
	return gi, cmp.Or(ci, gi)
}

// mpsCapable reports whether GPUs are shared by MPS, which excludes MIG.
func mpsCapable(gpus []device.GPU) bool {
	byMPS := func(g device.GPU) bool { return g.Sharing.Strategy == device.MPS && g.Sharing.Shared() }
	return slices.ContainsFunc(gpus, byMPS) && !slices.ContainsFunc(gpus, partitioned)
}

// mode is what the PCI class of all GPUs says.
func mode(gpus []device.GPU) string {
	const unknown = "unknown"
	class := gpus[0].PCIClass
	if slices.ContainsFunc(gpus, func(g device.GPU) bool { return g.PCIClass != class }) {
		return unknown
	}
	switch class {
	case device.PCIClassVGA:
		return "graphics"
	case device.PCIClass3D:
		return "compute"
	}
	return unknown
}

// clique is the NVLink fabric of all GPUs that have one, if it is the same.
func clique(gpus []device.GPU) (clique string) {
	for _, g := range gpus {
		switch {
		case g.FabricClique == "", g.FabricClique == clique:
		case clique != "":
			return ""
		default:
			clique = g.FabricClique
		}
	}
	return clique
}

// families are architectures by the major number of the compute capability.
var families = map[string]string{
	"1": "tesla", "2": "fermi", "3": "kepler", "5": "maxwell", "6": "pascal", "7": "turing", "8": "ada-lovelace", "9": "hopper",
	"10": "blackwell", "12": "blackwell", "13": "rubin",
}

func family(major, minor string) string {
	switch n, _ := strconv.Atoi(minor); {
	case major == "7" && n < 5:
		return "volta"
	case major == "8" && n < 9:
		return "ampere"
	}
	return cmp.Or(families[major], "undefined")
}

var notInLabels = regexp.MustCompile(`[^A-Za-z0-9-_. ]`)

// sanitise turns a name into a valid label value.
func sanitise(name string) string {
	return strings.Join(strings.Fields(notInLabels.ReplaceAllString(name, "")), "-")
}
