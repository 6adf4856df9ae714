// SPDX-License-Identifier: Apache-2.0

package runtimes

import (
	"strings"
	"testing"
)

func TestTrustsImages(t *testing.T) {
	for want, versions := range map[string][]string{
		"": {
			"containerd://1.7.33", "containerd://2.0.8", "containerd://2.2.7", "containerd://2.3.4", "containerd://2.4.2", "containerd://v2.4.2-3-gabcdef",
			"cri-o://1.29.13", "cri-o://1.34.14", "cri-o://1.35.9", "cri-o://1.36.6", "docker://28.0.1", "containerd://", "",
		},
		"CVE-2026-53492": {
			"containerd://2.1.0", "containerd://2.1.4-k3s1", "containerd://2.1.8", "containerd://2.2.0", "containerd://2.2.4", "containerd://2.3.0", "containerd://2.3.1",
		},
		"CVE-2026-95837": {"containerd://2.1.9", "containerd://2.2.5", "containerd://2.2.6", "containerd://2.3.2", "containerd://2.3.3"},
		"CVE-2026-92574": {"cri-o://1.30.0", "cri-o://1.33.20", "cri-o://1.34.13-3.rhaos4.21", "cri-o://1.35.8", "cri-o://1.36.0", "cri-o://1.37.0", "cri-o://1.37.3"},
	} {
		for _, reported := range versions {
			_, number, _ := strings.Cut(reported, "://")
			if got := TrustsImages(reported); !strings.Contains(got, want) || (got == "") != (want == "") || got != "" && !strings.Contains(got, number) {
				t.Errorf("%s: %q, want %q", reported, got, want)
			}
			if strings.Contains(TrustsImages(reported), "1.36.6 or newer") {
				t.Errorf("%s: 1.37 is recommended", reported)
			}
		}
	}
}
