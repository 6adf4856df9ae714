// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// ConfigLabel is the label of a Node object that selects a file of ConfigDir, as in NVIDIA's device plugin (k8s-device-plugin,
// cmd/config-manager).
const ConfigLabel = "nvidia.com/device-plugin.config"

// Values of FallbackStrategies (k8s-device-plugin, cmd/config-manager).
const (
	// fallbackNamed uses the file "default".
	fallbackNamed = "named"
	// fallbackSingle uses the only file.
	fallbackSingle = "single"
	// fallbackEmpty uses no file.
	fallbackEmpty = "empty"
)

var fallbackStrategies = []string{fallbackNamed, fallbackSingle, fallbackEmpty}

func (c *Config) checkChoice(p *problems) {
	if c.ConfigDir == "" {
		if c.DefaultConfig != "" {
			p.add("--default-config", "needs --config-dir: it names a file of that directory")
		}
		return
	}
	p.path("--config-dir", c.ConfigDir)
	if c.ConfigFile != "" && c.ConfigFile != c.fileOf(c.ConfigName) {
		p.add("--config-dir", "excludes --config: set one of the two")
	}
	for _, s := range c.FallbackStrategies {
		oneOf(p, "--fallback-strategies", s, fallbackStrategies...)
	}
}

// ChooseConfig returns which file of ConfigDir a node with this value of ConfigLabel uses; empty for none. The agent calls it for each
// change of label or directory.
func (c Config) ChooseConfig(label string, labelled bool) (name string, err error) {
	if c.ConfigDir == "" {
		return "", nil
	}
	names, err := configsIn(c.ConfigDir)
	if err != nil {
		return "", err
	}
	wanted, by := label, "node label "+ConfigLabel+"="+label
	if !labelled || label == "" {
		wanted, by = c.DefaultConfig, "--default-config="+c.DefaultConfig
	}
	if wanted != "" {
		if !slices.Contains(names, wanted) {
			return "", fmt.Errorf("%s: %s has no such configuration, only %s", by, c.ConfigDir, strings.Join(names, ", "))
		}
		return wanted, nil
	}
	const byDefault = "default"
	for _, strategy := range c.FallbackStrategies {
		switch {
		case strategy == fallbackNamed && slices.Contains(names, byDefault):
			return byDefault, nil
		case strategy == fallbackSingle && len(names) == 1:
			return names[0], nil
		case strategy == fallbackEmpty:
			return "", nil
		}
	}
	return "", fmt.Errorf("the node has no label %s, and none of the strategies %s selects one of the configurations %s in %s: "+
		"set the label, or --default-config (chart value config.default)",
		ConfigLabel, strings.Join(c.FallbackStrategies, ", "), strings.Join(names, ", "), c.ConfigDir)
}

// fileOf returns the path of a file of ConfigDir; empty for none.
func (c Config) fileOf(name string) string {
	if name == "" {
		return ""
	}
	return filepath.Join(c.ConfigDir, name)
}

// configsIn returns the files of a mounted ConfigMap, sorted. kubelet's own entries begin with a dot.
func configsIn(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list configurations: %w", err)
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), ".") && !entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

// Chosen is a configuration with the file of ConfigDir that was selected, or with none.
type Chosen struct {
	Config
	// text is what the file had.
	text []byte
}

// record is the file that an agent starts with. At a start the node's label is not known, and the file may have changed or become wrong.
type record struct {
	Name string `json:"name"`
	Text []byte `json:"text"`
}

func recordFile(runDir string) string { return filepath.Join(runDir, "config.json") }

// Record makes the next Load use this configuration. The agent calls it before it restarts, and for a text with the same effect. It is
// atomic and idempotent.
func (c Chosen) Record() error {
	if c.ConfigDir == "" {
		return nil
	}
	if r, found, err := recorded(c.RunDir); err == nil && found && r.Name == c.ConfigName && bytes.Equal(r.Text, c.text) {
		return nil
	}
	data, err := json.Marshal(record{c.ConfigName, c.text})
	path := recordFile(c.RunDir)
	if err == nil {
		err = os.WriteFile(path+".new", data, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("record the chosen configuration: %w", err)
	}
	return nil
}

// recorded returns the configuration of the last Record; ok is false if there was none.
func recorded(runDir string) (r record, ok bool, err error) {
	data, err := os.ReadFile(recordFile(runDir))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, false, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		return record{}, false, fmt.Errorf("read %s: %w", recordFile(runDir), err)
	}
	return r, true, nil
}
