// SPDX-License-Identifier: Apache-2.0

package config

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// directory is a mounted ConfigMap with empty files: beside them are kubelet's own entries.
func directory(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "..2026_11_25"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range append(names, "..data") {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestChooseConfig(t *testing.T) {
	const unset = "(no label)"
	tests := []struct {
		name, label    string
		files          []string
		defaultName    string
		fallbacks      string
		want, wantsErr string
	}{
		{name: "label", label: "b", files: []string{"a", "b", "default"}, defaultName: "a", want: "b"},
		{name: "unknown label", label: "c", files: []string{"a", "b"}, defaultName: "a", wantsErr: "node label nvidia.com/device-plugin.config=c: "},
		{name: "kubelet's own entries", label: "..data", files: []string{"a"}, wantsErr: "has no such configuration, only a"},
		{name: "default", label: unset, files: []string{"a", "default"}, defaultName: "a", want: "a"},
		{name: "empty label", label: "", files: []string{"a", "default"}, defaultName: "a", want: "a"},
		{name: "unknown default", label: unset, files: []string{"a", "default"}, defaultName: "x", wantsErr: "--default-config=x: "},
		{name: "named", label: unset, files: []string{"a", "default"}, want: "default"},
		{name: "single", label: unset, files: []string{"a"}, want: "a"},
		{name: "neither", label: unset, files: []string{"a", "b"}, wantsErr: "none of the strategies named, single selects one of the configurations a, b"},
		{name: "single is not asked for", label: unset, files: []string{"a"}, fallbacks: "named", wantsErr: "none of the strategies named selects"},
		{name: "empty", label: unset, files: []string{"a", "b"}, fallbacks: "named,empty", want: ""},
		{name: "no file", label: unset, wantsErr: "none of the strategies"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			args := []string{"--node-name=n", "--config-dir=" + directory(t, test.files...), "--default-config=" + test.defaultName, "--run-dir=" + t.TempDir()}
			if test.fallbacks != "" {
				args = append(args, "--fallback-strategies="+test.fallbacks)
			}
			c, err := Load(args, environment{}.lookup, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			got, err := c.ChooseConfig(strings.TrimSuffix(test.label, unset), test.label != unset)
			if got != test.want || (err != nil) != (test.wantsErr != "") || err != nil && !strings.Contains(err.Error(), test.wantsErr) {
				t.Errorf("got %q, %v; want %q, %s", got, err, test.want, test.wantsErr)
			}
		})
	}
	c := Defaults()
	c.ConfigDir = filepath.Join(t.TempDir(), "absent")
	if _, err := c.ChooseConfig("", false); err == nil || !strings.Contains(err.Error(), c.ConfigDir) {
		t.Errorf("without the directory: %v", err)
	}
	if name, err := Defaults().ChooseConfig("a", true); name != "" || err != nil {
		t.Errorf("with one file: %q, %v", name, err)
	}
}

func TestRecordedChoice(t *testing.T) {
	dir, run := directory(t, "a", "b"), t.TempDir()
	put := func(content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "a"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"--node-name=n", "--config-dir=" + dir, "--run-dir=" + run}
	load := func(unchosen bool, wantName, wantStrategy, wantSays string) {
		t.Helper()
		var says strings.Builder
		c, err := Load(args, environment{}.lookup, &says)
		if err != nil || c.Unchosen != unchosen || c.ConfigName != wantName || string(c.MIGStrategy) != wantStrategy || !strings.Contains(says.String(), wantSays) {
			t.Errorf("got %t, %q, %q, %v, %s", c.Unchosen, c.ConfigName, c.MIGStrategy, err, &says)
		}
	}
	choose := func(name string) Chosen {
		t.Helper()
		chosen, err := LoadChosen(args, environment{}.lookup, name)
		if err != nil || chosen.ConfigName != name || chosen.Unchosen {
			t.Fatalf("got %+v, %v", chosen, err)
		}
		if err := chosen.Record(); err != nil {
			t.Fatal(err)
		}
		return chosen
	}
	put("flags: {migStrategy: mixed}")
	load(true, "", "none", "")
	var says strings.Builder
	if _, err := Load(append(args, "--mig-strategy=both"), environment{}.lookup, &says); err == nil || says.Len() > 0 {
		t.Errorf("a wrong flag without a record: %v, and stderr has %q", err, &says)
	}
	chosen := choose("a")
	load(false, "a", "mixed", "")
	loaded, err := Load(args, environment{}.lookup, io.Discard)
	if err != nil || !loaded.Equal(chosen.Config) {
		t.Errorf("loaded %+v, chosen %+v, %v", loaded, chosen.Config, err)
	}
	// What was right counts, whatever the file is now.
	for _, content := range []string{"flags: {migStrategie: mixed}", "flags: {migStrategy: both}", "{"} {
		put(content)
		if _, err := LoadChosen(args, environment{}.lookup, "a"); err == nil {
			t.Errorf("%s: no error", content)
		}
		load(false, "a", "mixed", "")
	}
	choose("")
	load(false, "", "none", "")
	// Each text that can be read survives the record.
	put("\xff\xfef\x00l\x00a\x00g\x00s\x00:\x00 \x00{\x00m\x00i\x00g\x00S\x00t\x00r\x00a\x00t\x00e\x00g\x00y\x00:\x00 \x00s\x00i\x00n\x00g\x00l\x00e\x00}\x00")
	choose("a")
	load(false, "a", "single", "")
	// A record that another version wrote, or that the machine spoilt.
	for content, says := range map[string]string{`{"name": "a", "text": "ZmxhZ3M6IHtmdXR1cmU6IDF9"}`: "flags.future", `{"name`: "read " + recordFile(run), `{"name": "a", "text": "ZmxhZ3M6IHttaWdTdHJhdGVneTogYm90aH0="}`: "both"} {
		if err := os.WriteFile(recordFile(run), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		load(true, "", "none", says)
	}
	chosen.RunDir = filepath.Join(run, "absent")
	if err := chosen.Record(); err == nil || !strings.Contains(err.Error(), chosen.RunDir) {
		t.Errorf("recorded in a directory that is not there: %v", err)
	}
}

func TestChoiceErrors(t *testing.T) {
	dir := directory(t, "a")
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"--config-dir=" + dir, "--config=" + write(t, "")}, "--config-dir: excludes --config"},
		{[]string{"--config-dir=configs"}, `--config-dir: "configs" is not an absolute path`},
		{[]string{"--config-dir=" + dir, "--fallback-strategies=first"}, `--fallback-strategies: "first" is not one of named, single, empty`},
		{[]string{"--default-config=a"}, "--default-config: needs --config-dir"},
	} {
		_, err := Load(append(test.args, "--node-name=n", "--run-dir="+t.TempDir()), environment{}.lookup, io.Discard)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: got %v, want %s", test.args, err, test.want)
		}
	}
}
