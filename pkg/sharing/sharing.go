// SPDX-License-Identifier: Apache-2.0

// Package sharing applies and reverts sharing settings of devices: time slices, compute modes, and the daemons of CUDA's
// Multi-Process Service. It records on disk what it is about to set, and removes the record once everything is restored. So
// after a crash the next process applies or reverts what the last one began. The ledger decides who may have a device, before
// this package is called.
package sharing

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"

	parametersv1beta1 "github.com/tandem-gpu/tandem/api/parameters/v1beta1"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/mps"
)

// Claim is the holder of the devices.
type Claim struct{ UID, Namespace, Name string }

// Exclusive is the strategy of a claim that has a GPU as a whole though the node shares it by MPS: its daemon ends meanwhile.
// Parameters cannot request it.
const Exclusive parametersv1beta1.Strategy = "Exclusive"

// Group is the devices of a claim that one entry of its parameters is about.
type Group struct {
	Claim Claim
	// Devices have UUIDs, and are all whole GPUs or all partitions.
	Devices []device.Device
	// Sharing without a strategy means that the devices are no longer shared.
	Sharing parametersv1beta1.Sharing

	// policy is set for a GPU that the node's policy shares. There is no claim then.
	policy bool
}

func (g Group) owner() Owner {
	if g.policy {
		return policyOwner(g.Devices[0].GPU.UUID)
	}
	return OwnerOf(g.Claim.UID)
}

func (g Group) overlaps(ref device.Ref) bool {
	return slices.ContainsFunc(g.Devices, func(d device.Device) bool { return d.Ref().Overlaps(ref) })
}

func (g Group) keys() (keys []Key) {
	for _, d := range g.Devices {
		keys = append(keys, Key{g.owner(), d.Ref()})
	}
	return keys
}

// Owner is what settings are for: a claim, or the node's policy for one GPU. It is a part of the names of records, daemons and locks.
type Owner string

// policyPrefix begins the owners that are no claims. The API server gives claims UUIDs, which have no such prefix.
const policyPrefix = "gpu-"

// OwnerOf returns the owner for a claim, by UID.
func OwnerOf(claim string) Owner { return Owner(claim) }

func policyOwner(gpu string) Owner {
	return Owner(policyPrefix + strings.TrimPrefix(strings.ToLower(gpu), policyPrefix))
}

func (o Owner) isPolicy() bool { return strings.HasPrefix(string(o), policyPrefix) }

// Claim returns the UID of the claim; empty for the node's policy.
func (o Owner) Claim() string {
	if o.isPolicy() {
		return ""
	}
	return string(o)
}

// Key is one device of one owner.
type Key struct {
	Owner  Owner
	Device device.Ref
}

// Daemon is a requested MPS daemon.
type Daemon struct {
	// Name is also the name of its directory.
	Name     string
	Settings mps.Settings
}

const mib = 1 << 20

// Check returns the parameters that these devices do not support, with the path of the field. A partition that does not exist
// yet has no UUID. Pure. Callers plan only what passes Check.
func Check(devices []device.Device, s parametersv1beta1.Sharing, path *field.Path) field.ErrorList {
	if s.MPS == nil {
		return nil
	}
	var all field.ErrorList
	path = path.Child("mpsConfig")
	if s.MPS.MultiUser {
		for _, d := range devices {
			if !multiUser(d.GPU.ComputeCapability) {
				why := fmt.Sprintf("needs compute capability 7.0, and device %s (%s) has %q", d.Name(), d.GPU.ProductName, d.GPU.ComputeCapability)
				all = append(all, field.Invalid(path.Child("multiUser"), true, why))
			}
		}
	}
	limits := path.Child("defaultPerDevicePinnedMemoryLimit")
	for _, key := range slices.Sorted(maps.Keys(s.MPS.PerDevicePinnedMemoryLimit)) {
		if i, err := strconv.Atoi(key); err == nil {
			if i >= len(devices) {
				why := fmt.Sprintf("there is no such device: the claim has %d devices, counted from 0", len(devices))
				all = append(all, field.Invalid(limits.Key(key), key, why))
			}
			continue
		}
		if !slices.ContainsFunc(devices, func(d device.Device) bool { return d.UUID() == key }) {
			all = append(all, field.Invalid(limits.Key(key), key,
				"the claim has no device with this UUID: use the device's index, or defaultPinnedDeviceMemoryLimit"))
		}
	}
	return all
}

// multiUser reports whether a GPU supports clients of several users (CUDA's MPS documentation: Volta and later).
func multiUser(computeCapability string) bool {
	major, _, _ := strings.Cut(computeCapability, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= 7
}

// Settings returns the settings of a group's daemon. Devices are numbered by sorted UUID, as in NVIDIA's DRA driver.
func Settings(devices []device.Device, s parametersv1beta1.MPS, driverRoot string) mps.Settings {
	settings := mps.Settings{MultiUser: s.MultiUser, DriverRoot: driverRoot}
	for _, d := range devices {
		settings.Devices = append(settings.Devices, d.UUID())
	}
	slices.Sort(settings.Devices)
	if p := s.ActiveThreadPercentage; p != nil {
		percentage := int32(*p)
		settings.ActiveThreadPercentage = &percentage
	}
	limits := make([]int64, len(settings.Devices))
	for i, uuid := range settings.Devices {
		limit := s.PinnedMemoryLimit
		for _, key := range []string{strconv.Itoa(i), uuid} {
			if own, ok := s.PerDevicePinnedMemoryLimit[key]; ok {
				limit = &own
			}
		}
		if limit != nil {
			limits[i] = limit.Value() / mib
		}
	}
	if slices.Max(limits) > 0 {
		settings.PinnedMemoryMiB = limits
	}
	return settings
}

// nameable matches UIDs that can be part of a pod's name and of a path, such as those of the API server.
var nameable = regexp.MustCompile(`^[a-z0-9][-a-z0-9]{0,42}$`)

// daemonName depends on the claim, the refs and the parameters. It does not depend on UUIDs of partitions, which change with a
// reboot while kubelet remembers the CDI device of that name (TestMPSOfPartition).
func daemonName(g Group) (string, error) {
	owner := string(g.owner())
	if !nameable.MatchString(owner) {
		return "", fmt.Errorf("claim UID %q cannot be part of a daemon's name", owner)
	}
	var refs []string
	for _, d := range g.Devices {
		refs = append(refs, d.Ref().String())
	}
	slices.Sort(refs)
	text, err := json.Marshal([]any{refs, g.Sharing})
	if err != nil {
		return "", fmt.Errorf("name the daemon: %w", err)
	}
	sum := sha256.Sum256(text)
	return owner + "-" + hex.EncodeToString(sum[:4]), nil
}

// ownerOfDaemon returns the owner in a daemon's name.
func ownerOfDaemon(name string) Owner {
	return Owner(name[:max(0, strings.LastIndexByte(name, '-'))])
}

// timeSlice returns the interval's number for nvidia-smi compute-policy --set-timeslice.
func timeSlice(i parametersv1beta1.Interval) int {
	return max(0, slices.Index(device.Intervals, string(i)))
}
