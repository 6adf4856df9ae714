// SPDX-License-Identifier: Apache-2.0

// Package runtimes knows which versions of container runtimes give a container what its image asks for.
package runtimes

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"
)

// flaw is a known vulnerability of the versions of one minor release before fixed. An empty fixed means all versions.
type flaw struct {
	minor, fixed string
	takes, id    string
}

const (
	devices    = "takes CDI devices from the metadata of checkpoint images"
	unknown    = "may take CDI devices from the metadata of checkpoint images, as its first version with the fix is not known"
	privileges = "restores containers from checkpoint images with the privileges that the image names"
)

// flaws has the worst flaw of a version first. containerd restores such images since 2.1. Its fix of CVE-2026-95837 disables the restore
// by default, and so does CRI-O's of CVE-2026-92574. CRI-O's restore also takes the annotations of the image, of which it reads CDI
// devices (server/container_restore.go, internal/factory/container/device_linux.go); no release fixes that by itself.
var flaws = map[string][]flaw{
	"containerd": {
		{"2.1", "2.1.9", devices, "CVE-2026-53492"},
		{"2.2", "2.2.5", devices, "CVE-2026-53492"},
		{"2.3", "2.3.2", devices, "CVE-2026-53492"},
		{"2.1", "", privileges, "CVE-2026-95837"},
		{"2.2", "2.2.7", privileges, "CVE-2026-95837"},
		{"2.3", "2.3.4", privileges, "CVE-2026-95837"},
	},
	"cri-o": {
		{"1.30", "", devices, "CVE-2026-92574"},
		{"1.31", "", devices, "CVE-2026-92574"},
		{"1.32", "", devices, "CVE-2026-92574"},
		{"1.33", "", devices, "CVE-2026-92574"},
		{"1.34", "1.34.14", devices, "CVE-2026-92574"},
		{"1.35", "1.35.9", devices, "CVE-2026-92574"},
		{"1.36", "1.36.6", devices, "CVE-2026-92574"},
		{"1.37", "", unknown, "CVE-2026-92574"},
	},
}

// safe are the versions that have no flaw.
var safe = map[string]string{"containerd": "2.2.7, 2.3.4, 2.4 or newer", "cri-o": "1.34.14, 1.35.9, 1.36.6 or a newer patch release of these"}

// TrustsImages returns why a container runtime gives a container devices or privileges that its image names and its pod does not, by the
// name and version in the node's status ("containerd://2.2.4"); empty if it is not known to. It needs CRIU on the node. A distribution may
// have fixed a version that counts as affected here.
func TrustsImages(reported string) string {
	f := worst(reported)
	if f == nil {
		return ""
	}
	name, text, _ := strings.Cut(reported, "://")
	return fmt.Sprintf("%s %s %s (%s): use %s, or make sure that the node has no CRIU", name, text, f.takes, f.id, safe[name])
}

// TakesDevices reports whether a container runtime gives a container the CDI devices that its image names, as TrustsImages does.
func TakesDevices(reported string) bool {
	f := worst(reported)
	return f != nil && f.takes != privileges
}

// worst returns the worst flaw of a container runtime; nil if it has none.
func worst(reported string) *flaw {
	name, text, _ := strings.Cut(reported, "://")
	v, err := version.ParseGeneric(text)
	if err != nil {
		return nil
	}
	for _, f := range flaws[name] {
		of := version.MustParseGeneric(f.minor)
		if v.Major() == of.Major() && v.Minor() == of.Minor() && (f.fixed == "" || v.LessThan(version.MustParseGeneric(f.fixed))) {
			return &f
		}
	}
	return nil
}
