// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"fmt"
	"path/filepath"
)

// Paths and names of the daemon's pod. The controller writes them, the supervisor reads them.
const (
	// PodDir is the mount of the daemon's directory, PodRoot that of the driver's root.
	PodDir  = "/daemon"
	PodRoot = "/driver-root"
	// ShmVolume is the name of the memory volume.
	ShmVolume = "shm"
)

// Environment of the supervisor, and of the probes beside it.
const (
	SettingsEnv   = "MPS_SETTINGS" // Settings as JSON
	PodUIDEnv     = "POD_UID"
	KubeletDirEnv = "KUBELET_DIR" // on the host
)

// FromEnvironment returns the daemon of this process's pod.
func FromEnvironment(lookup func(string) (string, bool)) (Daemon, error) {
	values := map[string]string{}
	for _, name := range []string{SettingsEnv, PodUIDEnv, KubeletDirEnv} {
		value, ok := lookup(name)
		if !ok || value == "" {
			return Daemon{}, fmt.Errorf("%s is not set; the controller sets it in the pods of MPS daemons", name)
		}
		values[name] = value
	}
	var settings Settings
	if err := json.Unmarshal([]byte(values[SettingsEnv]), &settings); err != nil {
		return Daemon{}, fmt.Errorf("read %s: %w", SettingsEnv, err)
	}
	return Daemon{
		Settings: settings, Dir: PodDir, Root: PodRoot, PipeDir: ClientPipeDir, LogDir: ClientLogDir, Pod: values[PodUIDEnv], Grace: grace,
		// Where kubelet mounts it (pkg/volume/emptydir).
		Shm: filepath.Join(values[KubeletDirEnv], "pods", values[PodUIDEnv], "volumes/kubernetes.io~empty-dir", ShmVolume),
	}, nil
}
