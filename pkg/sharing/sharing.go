// SPDX-License-Identifier: Apache-2.0

// Package sharing brings GPUs to what the holders need who share them, and back: time slices, compute modes, and the daemons of
// CUDA's Multi-Process Service. What is about to be set is recorded before anything is touched, and the record goes when
// everything is as it was before. Between the two, a process that died leaves nothing that the next cannot take up again or undo.
// Who may have a device is the ledger's decision, and has been made before.
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

// Claim is who has the devices.
type Claim struct{ UID, Namespace, Name string }

// Exclusive is the strategy of whole GPUs that are nobody else's though the node shares them by MPS: no daemon has them meanwhile. No
// parameters can say it.
const Exclusive parametersv1beta1.Strategy = "Exclusive"

// Group is what a claim has by one entry of its parameters: its containers share these devices in one way.
type Group struct {
	Claim Claim
	// Devices have UUIDs, and are all whole GPUs or all partitions.
	Devices []device.Device
	// Sharing without a strategy means that the devices are shared no more.
	Sharing parametersv1beta1.Sharing
}

func (g Group) overlaps(ref device.Ref) bool {
	return slices.ContainsFunc(g.Devices, func(d device.Device) bool { return d.Ref().Overlaps(ref) })
}

// Key is one device in the hands of one claim.
type Key struct {
	// Claim by UID.
	Claim  string
	Device device.Ref
}

// Daemon is an MPS daemon that is to run.
type Daemon struct {
	// Name is that of its directory.
	Name     string
	Settings mps.Settings
}

const mib = 1 << 20

// Check finds what of the parameters cannot be had with these devices, with the path of the field. Devices that are not made yet
// have no UUID. It is pure; Apply is not called with anything that it objects to.
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
				why := fmt.Sprintf("there is no such device: this is about %d, counted from 0", len(devices))
				all = append(all, field.Invalid(limits.Key(key), key, why))
			}
			continue
		}
		if !slices.ContainsFunc(devices, func(d device.Device) bool { return d.UUID() == key }) {
			all = append(all, field.Invalid(limits.Key(key), key,
				"this is not about a device with this UUID: count the devices instead, or take defaultPinnedDeviceMemoryLimit"))
		}
	}
	return all
}

// multiUser is what a GPU must be able to do for clients of several users (CUDA's MPS documentation: Volta and later).
func multiUser(computeCapability string) bool {
	major, _, _ := strings.Cut(computeCapability, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= 7
}

// Settings of the daemon for such a group. The devices are counted by their sorted UUIDs, as in NVIDIA's DRA driver.
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

// nameable are the UIDs that the API server makes, and whatever else may be part of a pod's name and a path.
var nameable = regexp.MustCompile(`^[a-z0-9][-a-z0-9]{0,42}$`)

// daemonName is the same for the same group after a reboot, when its partitions have other UUIDs: kubelet may remember the CDI
// device of that name. Another group of the claim has another name, and so has one that is to be shared otherwise.
func daemonName(g Group) (string, error) {
	if !nameable.MatchString(g.Claim.UID) {
		return "", fmt.Errorf("claim UID %q cannot be part of a daemon's name", g.Claim.UID)
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
	return g.Claim.UID + "-" + hex.EncodeToString(sum[:4]), nil
}

// claimOf is the UID in a daemon's name.
func claimOf(name string) string {
	if i := strings.LastIndexByte(name, '-'); i > 0 {
		return name[:i]
	}
	return name
}

// timeSlice is what the driver's tool takes for an interval (nvidia-smi compute-policy --set-timeslice).
func timeSlice(i parametersv1beta1.Interval) int {
	return max(0, slices.Index(device.Intervals, string(i)))
}
