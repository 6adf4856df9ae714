// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestJudgeRuntime(t *testing.T) {
	const packages, k3s = "etc/containerd/config.toml", "var/lib/rancher/k3s/agent/etc/containerd/config.toml"
	for name, c := range map[string]struct {
		reported    string
		path, text  string
		want        RuntimeSupport
		wantMention string
	}{
		"containerd 2":                      {reported: "containerd://2.4.2", want: RuntimeSupports},
		"containerd 2, restores CDI names":  {reported: "containerd://2.1.4", want: RuntimeTrustsImages, wantMention: "CVE-2026-53492"},
		"containerd 2, and newer":           {reported: "containerd://2.3.1", want: RuntimeTrustsImages, wantMention: "use 2.2.7, 2.3.4, 2.4 or newer"},
		"containerd 2, restores privileges": {reported: "containerd://2.2.6", want: RuntimeTrustsImages, wantMention: "CVE-2026-95837"},
		"containerd 2, development":         {reported: "containerd://v2.4.2-3-gabcdef", want: RuntimeSupports},
		"containerd 2, disabled":            {reported: "containerd://2.1.4", path: packages, text: "  enable_cdi = false\n", want: RuntimeLacks, wantMention: "remove enable_cdi = false"},
		"containerd 1.6":                    {reported: "containerd://1.6.38", want: RuntimeLacks, wantMention: "1.6.38"},
		"containerd 1.7, on":                {reported: "containerd://1.7.27", path: packages, text: "[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = true # GPUs\n", want: RuntimeSupports},
		"containerd 1.7, off":               {reported: "containerd://1.7.27", path: packages, text: "  enable_cdi = false\n", want: RuntimeLacks, wantMention: "/" + packages},
		"containerd 1.7, commented out":     {reported: "containerd://1.7.27", path: packages, text: "version = 2\n#  enable_cdi = true\n", want: RuntimeLacks, wantMention: "enable_cdi = true"},
		"containerd 1.7 of K3s":             {reported: "containerd://1.7.27-k3s1", path: k3s, text: "enable_cdi=true", want: RuntimeSupports},
		"containerd 1.7, no configuration":  {reported: "containerd://1.7.27", want: RuntimeNeedsSetting, wantMention: "cannot be read"},
		"CRI-O":                             {reported: "cri-o://1.34.14", want: RuntimeSupports},
		"CRI-O, restores CDI names":         {reported: "cri-o://1.34.0", want: RuntimeTrustsImages, wantMention: "CVE-2026-92574"},
		"old CRI-O":                         {reported: "cri-o://1.27.3", want: RuntimeLacks, wantMention: "1.27.3"},
		"Docker":                            {reported: "docker://28.0.1", want: RuntimeNeedsSetting, wantMention: "cri-dockerd"},
		"unknown runtime":                   {reported: "frakti://1.0.0", want: RuntimeSupports},
		"no version":                        {reported: "containerd://", want: RuntimeSupports},
		"not reported yet":                  {reported: "", want: RuntimeSupports},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if c.path != "" {
				path := filepath.Join(root, c.path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(c.text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, why := JudgeRuntime(c.reported, root)
			if got != c.want || !strings.Contains(why, c.wantMention) || (why == "") != (c.wantMention == "") {
				t.Errorf("got %d, %q; want %d and %q mentioned", got, why, c.want, c.wantMention)
			}
		})
	}
}
