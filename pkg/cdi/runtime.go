// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/tandem-gpu/tandem/internal/runtimes"
)

// RuntimeSupport is how well a container runtime supports CDI, as far as its version and configuration show.
type RuntimeSupport int

const (
	// RuntimeSupports injects CDI devices. A runtime or version that this package does not know counts as one that does.
	RuntimeSupports RuntimeSupport = iota
	// RuntimeNeedsSetting injects CDI devices only if a setting enables that, and the setting is not visible from here. Without it
	// the runtime ignores CDI devices without an error.
	RuntimeNeedsSetting
	// RuntimeLacks ignores CDI devices without an error: containers start and have no GPU.
	RuntimeLacks
	// RuntimeTrustsImages injects CDI devices, and gives a container devices or privileges that its image names (runtimes.TrustsImages).
	RuntimeTrustsImages
)

// containerdConfigs are the paths of containerd's configuration on a host: packages, K3s, RKE2, MicroK8s.
var containerdConfigs = []string{
	"etc/containerd/config.toml",
	"var/lib/rancher/k3s/agent/etc/containerd/config.toml",
	"var/lib/rancher/rke2/agent/etc/containerd/config.toml",
	"var/snap/microk8s/current/args/containerd.toml",
}

var enableCDI = regexp.MustCompile(`(?m)^\s*enable_cdi\s*=\s*(true|false)\s*(?:#.*)?$`)

// JudgeRuntime returns whether a container runtime injects CDI devices, by the name and version in the node's status
// ("containerd://1.7.27"), and by containerd's configuration below hostRoot if it is readable. why explains the problem and its
// solution; it is empty if there is none. Sources: containerd 1.7 added enable_cdi, off by default (docs/cri/config.md), 2.0
// enables it; CRI-O 1.28 supports the CRI field of Kubernetes 1.28 (KEP-4009); cri-dockerd passes CDI devices since pull
// request 522 of November 2025, to a Docker whose feature "cdi" must be enabled.
func JudgeRuntime(reported, hostRoot string) (support RuntimeSupport, why string) {
	name, text, _ := strings.Cut(reported, "://")
	v, err := version.ParseGeneric(text)
	switch {
	case err != nil:
	case name == "containerd" && v.LessThan(version.MajorMinor(1, 7)):
		return RuntimeLacks, fmt.Sprintf("containerd %s does not support CDI: use 2.0 or newer, or 1.7 with enable_cdi = true", text)
	case name == "containerd":
		support, why = judgeContainerd(text, v.AtLeast(version.MajorMinor(2, 0)), hostRoot)
	case name == "cri-o" && v.LessThan(version.MajorMinor(1, 28)):
		return RuntimeLacks, fmt.Sprintf("CRI-O %s does not accept CDI devices from kubelet: use the release of your Kubernetes version", text)
	case name == "docker":
		return RuntimeNeedsSetting, fmt.Sprintf("Docker %s gets CDI devices only from cri-dockerd of 2026 or newer, and injects them only with "+
			"\"features\": {\"cdi\": true}", text)
	}
	if trusts := runtimes.TrustsImages(reported); support == RuntimeSupports && trusts != "" {
		return RuntimeTrustsImages, trusts
	}
	return support, why
}

// judgeContainerd reads enable_cdi, whose default is off before 2.0 and on since.
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
		return RuntimeNeedsSetting, fmt.Sprintf(
			"containerd %s has CDI disabled by default, and its configuration cannot be read from here: %s", version, remedy)
	default:
		return RuntimeLacks, fmt.Sprintf("containerd %s has CDI disabled (/%s): %s", version, path, remedy)
	}
}
