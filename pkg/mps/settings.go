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

// Settings are what a daemon is made of: one with other settings is another daemon. They travel as JSON.
type Settings struct {
	// Devices are the UUIDs of GPUs and partitions, in the order of CUDA_VISIBLE_DEVICES, by which the daemon numbers them.
	Devices []string `json:"devices"`
	// ActiveThreadPercentage of the multiprocessors is what a client gets; nil leaves it to the daemon
	// (set_default_active_thread_percentage).
	ActiveThreadPercentage *int32 `json:"activeThreadPercentage,omitempty"`
	// PinnedMemoryMiB is what a client gets of each device's memory, by the device's place in Devices; 0 is no limit, and so is what
	// is not there (set_default_device_pinned_mem_limit).
	PinnedMemoryMiB []int64 `json:"pinnedMemoryMiB,omitempty"`
	// MultiUser lets clients of several users in at a time (-multiuser-server).
	MultiUser bool `json:"multiUser,omitempty"`
	// DriverRoot is the directory on the host in which the driver is installed.
	DriverRoot string `json:"driverRoot"`
	// Generation tells a daemon from those of the same name before it: the pod of one that was ended, which is still being deleted, is
	// not taken for that of the next. Nothing is said of their order; 0 is that of a version that had none.
	Generation int64 `json:"generation,omitempty"`
}

// Hash tells daemons of different settings apart: in the pod's annotation, and in Ready.
func (s Settings) Hash() string {
	text, err := json.Marshal(s)
	if err != nil {
		return "" // strings, numbers and truths can always be encoded
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}

// environment has the daemon begin with its settings (CUDA's MPS documentation, CUDA_MPS_PINNED_DEVICE_MEM_LIMIT: "at the MPS control
// daemon level"). A daemon that is started anew has clients of before as soon as it listens: the server that they get limits all that
// come after them, whatever the daemon is told meanwhile.
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

// Validate says what no daemon could be started with.
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
