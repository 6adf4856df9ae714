// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"encoding/json"
	"fmt"
	"path/filepath"
)

// What the daemon's pod is made of, which the controller says and the supervisor finds.
const (
	// PodDir is where the daemon's directory is mounted, PodRoot where the driver's root is.
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

// FromEnvironment is the daemon of the pod that this process is in.
func FromEnvironment(lookup func(string) (string, bool)) (Daemon, error) {
	values := map[string]string{}
	for _, name := range []string{SettingsEnv, PodUIDEnv, KubeletDirEnv} {
		value, ok := lookup(name)
		if !ok || value == "" {
			return Daemon{}, fmt.Errorf("%s is not set: the controller makes the pods of MPS daemons, and sets it", name)
		}
		values[name] = value
	}
	var settings Settings
	if err := json.Unmarshal([]byte(values[SettingsEnv]), &settings); err != nil {
		return Daemon{}, fmt.Errorf("read %s: %w", SettingsEnv, err)
	}
	return Daemon{
		Settings: settings, Dir: PodDir, Root: PodRoot, PipeDir: ClientPipeDir, LogDir: ClientLogDir, Pod: values[PodUIDEnv],
		// Where kubelet mounts it (pkg/volume/emptydir).
		Shm: filepath.Join(values[KubeletDirEnv], "pods", values[PodUIDEnv], "volumes/kubernetes.io~empty-dir", ShmVolume),
	}, nil
}
