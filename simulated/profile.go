// SPDX-License-Identifier: Apache-2.0

package simulated

import (
	"crypto/sha256"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Profile describes a machine with GPUs. It is data: New, Materialize and tests read it and never change it.
type Profile struct {
	// Name identifies the profile and enters the UUIDs that are derived.
	Name   string `json:"name"`
	Driver Driver `json:"driver"`
	// NUMANodes is the number of NUMA nodes, numbered from 0; the machine's CPUs are divided among them evenly.
	NUMANodes int `json:"numaNodes"`
	// Models holds the kinds of GPU that GPUs name.
	Models map[string]Model `json:"models"`
	// GPUs are the GPUs in NVML's enumeration order.
	GPUs []GPU `json:"gpus"`
	// NVLink lists the groups of GPUs that are linked to each other; a GPU is in one group at most.
	NVLink []NVLinkGroup `json:"nvlink,omitempty"`
	// Nodes says which device nodes there are.
	Nodes Nodes `json:"nodes,omitzero"`
	// ChecksPrivileges has package simnode find out what the process may do (ProcessPrivileges). Otherwise it may do everything, which
	// suits an agent in a cluster of tests: it needs no privileges for files that simulate a GPU.
	ChecksPrivileges bool `json:"checksPrivileges,omitempty"`
}

// Nodes describes the device nodes of a machine; the zero value is a machine with all nodes of its GPUs.
type Nodes struct {
	// Missing are patterns (path.Match) of paths below /dev that are not made: "nvidia-uvm*" after a boot of a bare host,
	// "nvidia-caps/*" where the driver does not make nodes of capabilities.
	Missing []string `json:"missing,omitempty"`
	// MadeByNVML has NVML make missing nodes when a process with the right to do so initializes it: nvidiactl and nvidia<minor>, in
	// the /dev that the process sees, and never nvidia-uvm (nvidia-modprobe does the same).
	MadeByNVML bool `json:"madeByNVML,omitempty"`
	// IMEXChannels is the number of channel<n> in nvidia-caps-imex-channels.
	IMEXChannels int `json:"imexChannels,omitempty"`
	// Other are nodes of other drivers: "nvidia-fs0" (GDS), "gdrdrv" (GDRCopy), "infiniband/uverbs0" (MOFED).
	Other []string `json:"other,omitempty"`
}

// Driver is what the installed driver says of itself.
type Driver struct {
	// Version is the driver's release, "580.95.05"; it ends the names of the driver's libraries.
	Version string `json:"version"`
	// CUDA is the newest CUDA version the driver supports, "13.0".
	CUDA string `json:"cuda"`
}

// Model is a kind of GPU.
type Model struct {
	// ProductName is NVML's device name, "NVIDIA H100 80GB HBM3".
	ProductName string `json:"productName"`
	// Brand is one of "NVIDIA", "Tesla", "NVIDIARTX", "GeForce".
	Brand string `json:"brand"`
	// Architecture is one of "Turing", "Ampere", "Ada", "Hopper", "Blackwell".
	Architecture string `json:"architecture"`
	// ComputeCapability is "major.minor".
	ComputeCapability string `json:"computeCapability"`
	// MemoryMiB is the framebuffer that NVML reports as total; ReservedMiB of it belongs to the driver.
	MemoryMiB   uint64 `json:"memoryMiB"`
	ReservedMiB uint64 `json:"reservedMiB"`
	// PCIeGeneration is the largest generation the GPU can link at; links run at it, 16 lanes wide.
	PCIeGeneration int `json:"pcieGeneration"`
	// PCIDevice and PCISubsystem are "vendor:device" in hexadecimal, "10de:2330".
	PCIDevice    string `json:"pciDevice"`
	PCISubsystem string `json:"pciSubsystem"`
	// ECC says whether the memory has ECC, which is on then.
	ECC bool `json:"ecc"`
	// AddressingMode is "HMM", "ATS" or "None"; empty where the driver does not report it.
	AddressingMode string `json:"addressingMode,omitempty"`
	// MIG names what the GPU can be cut into (package models, Named: "H100-80GB"); empty for a GPU without MIG.
	MIG string `json:"mig,omitempty"`
	// NVLinks is the number of NVLinks the GPU has.
	NVLinks int `json:"nvLinks,omitempty"`
	// FabricInfo says whether the driver reports a fabric state. It does for an H100 SXM, also without NVLink.
	FabricInfo bool `json:"fabricInfo,omitempty"`
}

// GPU is one GPU and its place.
type GPU struct {
	// Model is a key of Profile.Models.
	Model string `json:"model"`
	// UUID is "GPU-" and a UUID; one is derived from profile, seed and index where it is empty.
	UUID string `json:"uuid,omitempty"`
	// Minor is the number in /dev/nvidia<minor>; the index where it is nil.
	Minor *int `json:"minor,omitempty"`
	// PCI is the GPU's address, "0000:1b:00.0".
	PCI string `json:"pci"`
	// Root is the host bridge, "pci0000:17".
	Root string `json:"root"`
	// Bridges are the addresses of the bridges between host bridge and GPU: a root port, then an upstream and a downstream
	// port for each PCIe switch on the way.
	Bridges []string `json:"bridges,omitempty"`
	// NUMANode is the node the GPU is attached to, -1 where the platform does not say.
	NUMANode int `json:"numaNode"`
	// MIGEnabled says that MIG mode is on after a boot, and Partitions what an administrator has made by then.
	MIGEnabled bool        `json:"migEnabled,omitempty"`
	Partitions []Partition `json:"partitions,omitempty"`
	// NoReset means that the GPU cannot be reset from inside, as in many virtual machines.
	NoReset bool `json:"noReset,omitempty"`
}

// Partition is a GPU instance with what is in it.
type Partition struct {
	// Profile is the GPU instance's, "3g.40gb".
	Profile string `json:"profile"`
	// Start is the first memory slice.
	Start int `json:"start"`
	// Compute are the compute slices of each compute instance in it, in order of place; all of them in one where it is empty.
	Compute []int `json:"compute,omitempty"`
}

// NVLinkGroup is a set of GPUs that are linked to each other, by switches or directly.
type NVLinkGroup struct {
	// GPUs are indices.
	GPUs []int `json:"gpus"`
	// Switches are the PCI addresses of the NVSwitches; each GPU's links are spread over them.
	Switches []string `json:"switches,omitempty"`
	// Outside says that the switches are not in the machine, as in a rack of GB200: the addresses are only those that links report.
	Outside bool `json:"outside,omitempty"`
	// ClusterUUID and CliqueID are those of the fabric, where it is larger than the machine.
	ClusterUUID string `json:"clusterUUID,omitempty"`
	CliqueID    uint32 `json:"cliqueID,omitempty"`
	// PairLinks is the number of links between any two of the group when there is no switch.
	PairLinks int `json:"pairLinks,omitempty"`
}

//go:embed profiles/*.yaml
var embedded embed.FS

// ErrNoProfile says that a name is neither an embedded profile nor a path.
var ErrNoProfile = errors.New("no such machine profile")

// Names lists the embedded profiles.
func Names() []string {
	entries, err := embedded.ReadDir("profiles")
	if err != nil {
		return nil
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	return names
}

// Load reads an embedded profile by name, or one from a file where nameOrPath has a slash or ends in ".yaml". Unknown
// fields and impossible machines are errors that name the field.
func Load(nameOrPath string) (Profile, error) {
	data, err := read(nameOrPath)
	if err != nil {
		return Profile{}, err
	}
	profile, err := Parse(data)
	if err != nil {
		return Profile{}, fmt.Errorf("load machine profile %s: %w", nameOrPath, err)
	}
	return profile, nil
}

func read(nameOrPath string) ([]byte, error) {
	if strings.ContainsRune(nameOrPath, '/') || strings.HasSuffix(nameOrPath, ".yaml") {
		data, err := os.ReadFile(nameOrPath)
		if err != nil {
			return nil, fmt.Errorf("load machine profile: %w", err)
		}
		return data, nil
	}
	data, err := embedded.ReadFile(path.Join("profiles", nameOrPath+".yaml"))
	if err != nil {
		return nil, fmt.Errorf("load machine profile %q: %w; there are %s", nameOrPath, ErrNoProfile, strings.Join(Names(), ", "))
	}
	return data, nil
}

// Parse decodes and validates a profile.
func Parse(data []byte) (Profile, error) {
	var profile Profile
	if err := decodeStrict(data, &profile); err != nil {
		return Profile{}, err
	}
	if err := profile.Validate(); err != nil {
		return Profile{}, err
	}
	return profile, nil
}

// decodeStrict decodes YAML, naming the path of each unknown or repeated field.
func decodeStrict(data []byte, into any) error {
	asJSON, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return err
	}
	strict, err := kjson.UnmarshalStrict(asJSON, into)
	if err != nil {
		return err
	}
	return errors.Join(strict...)
}

// WithIdentity fills in every UUID and minor that the profile leaves to be derived, so that the result, written to a file, names
// the same GPUs for every reader. seed, a node's name, distinguishes machines of one profile.
func (p Profile) WithIdentity(seed string) Profile {
	gpus := make([]GPU, len(p.GPUs))
	copy(gpus, p.GPUs)
	for i := range gpus {
		if gpus[i].UUID == "" {
			gpus[i].UUID = deriveUUID(p.Name, seed, i)
		}
		if gpus[i].Minor == nil {
			minor := i
			gpus[i].Minor = &minor
		}
	}
	p.GPUs = gpus
	return p
}

func deriveUUID(name, seed string, index int) string {
	return "GPU-" + formatUUID(digest(name, seed, index))
}

func formatUUID(sum [sha256.Size]byte) string {
	sum[6] = sum[6]&0x0f | 0x40
	sum[8] = sum[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", sum[0:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16])
}

func digest(name, seed string, index int) [sha256.Size]byte {
	// Encoded as JSON so that no two different inputs run together.
	text, _ := json.Marshal([]any{"simulated gpu", name, seed, index}) //nolint:errcheck // strings and an int always encode
	return sha256.Sum256(text)
}
