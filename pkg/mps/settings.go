// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// Settings of a daemon. A daemon with other settings is another daemon. They are passed as JSON.
type Settings struct {
	// Devices are the UUIDs of GPUs and partitions, in the order of CUDA_VISIBLE_DEVICES, by which the daemon numbers them.
	Devices []string `json:"devices"`
	// ActiveThreadPercentage is each client's percentage of the multiprocessors; nil is the daemon's default
	// (set_default_active_thread_percentage).
	ActiveThreadPercentage *int32 `json:"activeThreadPercentage,omitempty"`
	// PinnedMemoryMiB limits each client's memory, by the device's index in Devices. Zero and a missing entry are no limit
	// (set_default_device_pinned_mem_limit).
	PinnedMemoryMiB []int64 `json:"pinnedMemoryMiB,omitempty"`
	// MultiUser allows clients of several users at a time (-multiuser-server).
	MultiUser bool `json:"multiUser,omitempty"`
	// DriverRoot is the directory on the host in which the driver is installed.
	DriverRoot string `json:"driverRoot"`
	// Generation distinguishes daemons of the same name: the pod of an earlier one may still be terminating. Generations have no order.
	// A daemon of a version without generations has none, and keeps its hash (TestHashOfAVersionWithoutGenerations).
	Generation int64 `json:"generation,omitempty"`
}

// Hash identifies the settings in the pod's annotation and in Ready.
func (s Settings) Hash() string {
	text, err := json.Marshal(s)
	if err != nil {
		return "" // cannot happen: all fields can be encoded
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// environment returns the settings as the daemon's environment (CUDA's MPS documentation, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: "at the MPS
// control daemon level"). Clients of an earlier daemon may connect before the daemon gets a command, and their server's limits apply to
// later clients too.
func (s Settings) environment() (env []string) {
	var limits []string
	for i, limit := range s.PinnedMemoryMiB {
		if limit > 0 {
			limits = append(limits, fmt.Sprintf("%d=%dM", i, limit))
		}
	}
	if len(limits) > 0 {
		env = append(env, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="+strings.Join(limits, ","))
	}
	if p := s.ActiveThreadPercentage; p != nil && *p > 0 {
		env = append(env, fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", *p))
	}
	return env
}

// Validate returns an error for settings with which no daemon can start.
func (s Settings) Validate() error {
	var errs []error
	complain := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if len(s.Devices) == 0 {
		complain("no devices")
	}
	if len(s.PinnedMemoryMiB) > len(s.Devices) {
		complain("memory limits of %d devices, of which there are %d", len(s.PinnedMemoryMiB), len(s.Devices))
	}
	for i, limit := range s.PinnedMemoryMiB {
		if limit < 0 {
			complain("memory limit of device %d: %d MiB", i, limit)
		}
	}
	if p := s.ActiveThreadPercentage; p != nil && (*p < 0 || *p > 100) {
		complain("active thread percentage %d: not from 0 to 100", *p)
	}
	if !filepath.IsAbs(s.DriverRoot) || filepath.Clean(s.DriverRoot) != s.DriverRoot {
		complain("driver root %q: not a clean absolute path", s.DriverRoot)
	}
	return errors.Join(errs...)
}
