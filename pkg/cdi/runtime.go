// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// RuntimeSupport is how much of CDI a container runtime understands, as far as one can tell from outside.
type RuntimeSupport int

const (
	// RuntimeUnknown is a runtime that nothing is known about.
	RuntimeUnknown RuntimeSupport = iota
	// RuntimeSupports injects CDI devices.
	RuntimeSupports
	// RuntimeNeedsSetting can inject them, and does not by default. It ignores them without an error, and nobody could see
	// that it was told otherwise.
	RuntimeNeedsSetting
	// RuntimeLacks ignores CDI devices without an error: containers start and have no GPU.
	RuntimeLacks
)

// containerdConfigs are where containerd's configuration is on a host: packages, K3s, RKE2, MicroK8s.
var containerdConfigs = []string{
	"etc/containerd/config.toml",
	"var/lib/rancher/k3s/agent/etc/containerd/config.toml",
	"var/lib/rancher/rke2/agent/etc/containerd/config.toml",
	"var/snap/microk8s/current/args/containerd.toml",
}

var enableCDI = regexp.MustCompile(`(?m)^\s*enable_cdi\s*=\s*(true|false)\s*(?:#.*)?$`)

// JudgeRuntime says whether a container runtime injects CDI devices, by the name and version that kubelet reports in the
// node's status ("containerd://1.7.27"), and by containerd's configuration below hostRoot, if that can be read. why is a
// sentence for whoever has to mend it; it is empty where there is nothing to mend. Sources: containerd 1.7 brought enable_cdi,
// false by default (docs/cri/config.md), and 2.0 has it on; CRI-O 1.28 follows the CRI field that Kubernetes 1.28 brought
// (KEP-4009); cri-dockerd passes CDI devices on since pull request 522 of November 2025, to a Docker that must have its feature
// "cdi" on.
func JudgeRuntime(reported, hostRoot string) (support RuntimeSupport, why string) {
	name, version, _ := strings.Cut(reported, "://")
	major, minor, ok := parseVersion(version)
	if !ok {
		return RuntimeUnknown, ""
	}
	older := func(wantMajor, wantMinor int) bool {
		return major < wantMajor || major == wantMajor && minor < wantMinor
	}
	switch {
	case name == "containerd" && older(1, 7):
		return RuntimeLacks, fmt.Sprintf("containerd %s does not know CDI: use 2.0 or newer, or 1.7 with enable_cdi = true", version)
	case name == "containerd":
		return judgeContainerd(version, !older(2, 0), hostRoot)
	case name == "cri-o" && older(1, 28):
		return RuntimeLacks, fmt.Sprintf("CRI-O %s does not take CDI devices from kubelet: use the release of your Kubernetes version", version)
	case name == "docker":
		return RuntimeNeedsSetting, fmt.Sprintf("Docker %s gets CDI devices only from a cri-dockerd of 2026 or newer and injects them only with \"features\": {\"cdi\": true}", version)
	case name == "cri-o":
		return RuntimeSupports, ""
	}
	return RuntimeUnknown, ""
}

// judgeContainerd looks for the setting where the version alone does not tell: off by default before 2.0, on since.
func judgeContainerd(version string, onByDefault bool, hostRoot string) (RuntimeSupport, string) {
	remedy := "set enable_cdi = true in the CRI plugin's section of its configuration, or use 2.0 or newer"
	if onByDefault {
		remedy = "remove enable_cdi = false"
	}
	on, path := onByDefault, ""
	for _, candidate := range containerdConfigs {
		text, err := os.ReadFile(filepath.Join(hostRoot, candidate))
		if err != nil {
			continue
		}
		path = candidate
		if found := enableCDI.FindSubmatch(text); found != nil {
			on = string(found[1]) == "true"
		}
		break
	}
	switch {
	case on:
		return RuntimeSupports, ""
	case path == "":
		return RuntimeNeedsSetting, fmt.Sprintf("containerd %s has CDI switched off unless its configuration says otherwise, which cannot be read from here: %s", version, remedy)
	default:
		return RuntimeLacks, fmt.Sprintf("containerd %s has CDI switched off (/%s): %s", version, path, remedy)
	}
}

func parseVersion(version string) (major, minor int, ok bool) {
	parts := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(parts) < 2 {
		return 0, 0, false
	}
	major, majorErr := strconv.Atoi(parts[0])
	minor, minorErr := strconv.Atoi(parts[1])
	return major, minor, majorErr == nil && minorErr == nil
}
