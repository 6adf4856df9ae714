// SPDX-License-Identifier: Apache-2.0

package migrate

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-gpu/tandem/internal/golden"
)

func translated(t *testing.T, name, text string) Result {
	t.Helper()
	sources, err := Read("", name, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	result, err := Translate(sources...)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// TestGolden: each testdata/*.yaml becomes the *.golden of its name. test/dropin installs them.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got, err := translated(t, filepath.Base(file), string(text)).YAML()
			if err != nil {
				t.Fatal(err)
			}
			golden.Compare(t, strings.TrimSuffix(file, ".yaml")+".golden", got)
		})
	}
}

// GPU Operator has names of Secrets; Tandem's chart wants objects with a name, as NVIDIA's charts do.
func TestPullSecrets(t *testing.T) {
	want := []any{map[string]any{"name": "ngc"}}
	for chart, text := range map[string]string{
		"gpu-operator":         "{toolkit: {}, devicePlugin: {imagePullSecrets: [ngc]}}",
		"nvidia-device-plugin": "{migStrategy: null, imagePullSecrets: [{name: ngc}]}",
	} {
		if diff := cmp.Diff(want, plain(translated(t, "file", text).Values["imagePullSecrets"])); diff != "" {
			t.Errorf("%s (-want +got):\n%s", chart, diff)
		}
	}
}

// Messages do not show environment variables, which may be secret. A name of a configuration may contain a percent sign.
func TestMessages(t *testing.T) {
	first := "{kubeletPlugin: {containers: {gpus: {env: [{name: A, value: used}]}}}}"
	second := "{kubeletPlugin: {containers: {gpus: {env: [{name: A, value: s3cret}]}}}}"
	sources, err := Read("", "second", []byte(second))
	if err != nil {
		t.Fatal(err)
	}
	one, err := Read("", "first", []byte(first))
	if err != nil {
		t.Fatal(err)
	}
	result, err := Translate(append(one, sources...)...)
	if text := fmt.Sprint(result); err != nil || strings.Contains(text, "s3cret") || !strings.Contains(text, "second has a list of variables, which is not used") {
		t.Errorf("two lists of variables: %s, %v", text, err)
	}
	if sources, err = Read("", "file", []byte(`{config: {map: {"50%d": "{"}}}`)); err != nil {
		t.Fatal(err)
	}
	_, err = Translate(sources...)
	if err == nil || strings.Contains(err.Error(), "MISSING") || !strings.Contains(err.Error(), "config.map.50%d: ") {
		t.Errorf("a configuration with a percent sign in its name: %v", err)
	}
}

// A number in a variable is text. Two sources that agree on it are no change.
func TestNumbersOfVariables(t *testing.T) {
	for other, differs := range map[string]bool{"4": false, "5": true} {
		result := translated(t, "file", `{kubeletPlugin: {}, logVerbosity: 6, consumableShares: 4}
---
{kubeletPlugin: {containers: {gpus: {env: [{name: LOG_VERBOSITY, value: "6"}, {name: CONSUMABLE_SHARES, value: "`+other+`"}]}}}}`)
		if text := strings.Join(result.Changes, "\n"); strings.Contains(text, "which is not used") != differs || strings.Contains(text, "logVerbosity") {
			t.Errorf("with %s:\n%s", other, text)
		}
	}
}

func TestMistakes(t *testing.T) {
	for text, want := range map[string]string{
		"":                            "it has no values",
		"[]":                          "it is not a YAML map",
		"{kind: Pod}":                 "kind Pod: want values of a chart",
		"{kind: ConfigMap}":           "the ConfigMap has no data",
		"{nvidiaDriverRoot: /a}":      "its keys (nvidiaDriverRoot) do not say whether it is for dra-driver-nvidia-gpu or nvidia-device-plugin: name the chart, as in -f dra-driver-nvidia-gpu=FILE",
		"{version: v2}":               "config: Tandem's agents would refuse it: version: unknown version: v2",
		"{config: {map: {a: \"{\"}}}": "config.map.a: Tandem's agents would refuse it",
		"{gfd: {noTimestamp: true}, cdi: {nvidiaHookPath: /b}, nvidiaCDIHookPath: /c}": `nvidiaCDIHookPath: is "/c", but cdiHook, another name of the setting, is "/b"`,
		"{kubeletPlugin: {kubeletPluginsDirectoryPath: /var/lib/kubelet}}":             `does not end in /plugins, so kubeletDir cannot be derived from it`,
		"{config: {default: b, map: {a: \"\"}}}":                                       "config.default: no such configuration: b (only a)",
		"{config: {flags: {migStrategy: both}}}":                                       "unknown MIG strategy: both",
	} {
		sources, err := Read("", "file", []byte(text))
		if err == nil {
			_, err = Translate(sources...)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", text, err, want)
		}
	}
}

// release returns the Secret of a Helm release.
func release(t *testing.T, namespace, name string, content map[string]any) *corev1.Secret {
	t.Helper()
	text, err := json.Marshal(content)
	if err != nil {
		t.Fatal(err)
	}
	var compressed bytes.Buffer
	writer := gzip.NewWriter(&compressed)
	if _, err := writer.Write(text); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "sh.helm.release.v1." + name + ".v1", Labels: map[string]string{"owner": "helm", "status": "deployed"}},
		Type:       "helm.sh/release.v1", Data: map[string][]byte{"release": []byte(base64.StdEncoding.EncodeToString(compressed.Bytes()))},
	}
}

// TestReleases: values are those of the chart and the user; only the user's are reported as lost. A broken Secret does not hide the rest.
func TestReleases(t *testing.T) {
	chart := func(name string, values map[string]any) map[string]any {
		return map[string]any{"metadata": map[string]any{"name": name}, "values": values}
	}
	broken := release(t, "other", "broken", nil)
	broken.Data["release"] = []byte("AAAA")
	superseded := release(t, "nvidia", "old", map[string]any{"chart": chart("nvidia-device-plugin", map[string]any{"migStrategy": "single"})})
	superseded.Labels["status"] = "superseded"
	client := fake.NewClientset(broken, superseded,
		release(t, "nvidia", "plugin", map[string]any{
			"name": "plugin",
			"chart": chart("nvidia-device-plugin", map[string]any{"priorityClassName": "low", "mps": map[string]any{"root": "/run/mps"}, "tolerations": []any{},
				"resources": map[string]any{"requests": map[string]any{"cpu": "1"}}}),
			"config": map[string]any{"resources": map[string]any{"limits": map[string]any{"cpu": "2"}}, "config": map[string]any{"name": "configs"}, "failOnInitError": true, "tolerations": nil},
		}),
		release(t, "web", "site", map[string]any{"name": "site", "chart": chart("nginx", nil)}),
		podOn("a", "plugin", &plugin),
		// A tenant's: no pod of the namespace mounts kubelet's directories.
		release(t, "aaa-tenant", "mine", map[string]any{"name": "mine", "chart": chart("nvidia-device-plugin", nil), "config": map[string]any{"priorityClassName": "high"}}),
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "nvidia", Name: "configs"}, Data: map[string]string{"a": "version: v1\nflags: {migStrategy: mixed}"}},
	)
	sources, err := ReadReleases(t.Context(), client, "")
	// The fake client does not select by fields.
	if of := client.Actions()[0].(clienttesting.ListAction).GetListRestrictions(); of.Fields.String() != "type=helm.sh/release.v1" {
		t.Errorf("Secrets are selected by %s", of.Fields)
	}
	if err == nil || !strings.Contains(err.Error(), "read Secret other/sh.helm.release.v1.broken.v1: decompress release") {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(err.Error(), "release aaa-tenant/mine is not read: no pod of its namespace mounts kubelet's directories") {
		t.Errorf("error %v", err)
	}
	result, err := Translate(sources...)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"priorityClassName": "low", "resources": map[string]any{"requests": map[string]any{"cpu": "1"}, "limits": map[string]any{"cpu": "2"}},
		"config": map[string]any{"map": map[string]any{"a": "version: v1\nflags: {migStrategy: mixed}"}},
	}
	if diff := cmp.Diff(want, result.Values); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"failOnInitError: the agent waits for the driver"}, result.Unneeded); diff != "" || len(result.Lost) > 0 {
		t.Error(diff, result.Lost)
	}
	if from := strings.Join(result.From, ", "); from != "release nvidia/plugin (nvidia-device-plugin), ConfigMap nvidia/configs (device plugin configuration)" {
		t.Error(from)
	}
}

// TestNewestRevision: what Helm has made stays when an installation or an upgrade fails.
func TestNewestRevision(t *testing.T) {
	revision := func(version, status, priority string) *corev1.Secret {
		s := release(t, "nvidia", "plugin", map[string]any{
			"name": "plugin", "config": map[string]any{"priorityClassName": priority}, "chart": map[string]any{"metadata": map[string]any{"name": "nvidia-device-plugin"}},
		})
		s.Name, s.Labels = "sh.helm.release.v1.plugin.v"+version, map[string]string{"owner": "helm", "name": "plugin", "status": status, "version": version}
		return s
	}
	for name, revisions := range map[string][]runtime.Object{
		"failed installation": {revision("1", "failed", "high")},
		"failed upgrade":      {revision("9", "deployed", "low"), revision("10", "failed", "high")},
		"rolled back":         {revision("2", "superseded", "low"), revision("3", "deployed", "high")},
		"uninstalled":         {revision("2", "failed", "low"), revision("3", "uninstalled", "low")},
	} {
		sources, err := ReadReleases(t.Context(), fake.NewClientset(append(revisions, podOn("a", "plugin", &plugin))...), "")
		if name == "uninstalled" && err == nil && len(sources) == 0 {
			continue
		}
		if err != nil || len(sources) != 1 || sources[0].Values["priorityClassName"] != "high" ||
			strings.HasPrefix(name, "failed") != strings.HasSuffix(sources[0].Name, ", failed)") {
			t.Errorf("%s: %+v, %v", name, sources, err)
		}
	}
}
