// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// file is the node configuration: the keys of NVIDIA's device plugin (version v1) and a section of our own. Keys of theirs
// whose effect this version does not have are errors when they ask for something, never ignored in silence.
type file struct {
	Version   string          `json:"version"`
	Flags     fileFlags       `json:"flags"`
	Resources json.RawMessage `json:"resources"`
	Sharing   fileSharing     `json:"sharing"`
	IMEX      json.RawMessage `json:"imex"`
	Tandem    fileTandem      `json:"tandem"`
}

type fileFlags struct {
	MIGStrategy             *string `json:"migStrategy"`
	FailOnInitError         *bool   `json:"failOnInitError"`
	MPSRoot                 *string `json:"mpsRoot"`
	NVIDIADriverRoot        *string `json:"nvidiaDriverRoot"`
	NVIDIADevRoot           *string `json:"nvidiaDevRoot"`
	GDRCopyEnabled          *bool   `json:"gdrcopyEnabled"`
	GDSEnabled              *bool   `json:"gdsEnabled"`
	MOFEDEnabled            *bool   `json:"mofedEnabled"`
	UseNodeFeatureAPI       *bool   `json:"useNodeFeatureAPI"`
	DeviceDiscoveryStrategy *string `json:"deviceDiscoveryStrategy"`
	Plugin                  struct {
		PassDeviceSpecs               *bool           `json:"passDeviceSpecs"`
		DeviceListStrategy            json.RawMessage `json:"deviceListStrategy"`
		DeviceIDStrategy              *string         `json:"deviceIDStrategy"`
		CDIAnnotationPrefix           *string         `json:"cdiAnnotationPrefix"`
		NVIDIACTKPath                 *string         `json:"nvidiaCTKPath"`
		ContainerDriverRoot           *string         `json:"containerDriverRoot"`
		SharedDevicesAllocationPolicy *string         `json:"sharedDevicesAllocationPolicy"`
	} `json:"plugin"`
	// GFD configures another component, which may share the file.
	GFD json.RawMessage `json:"gfd"`
}

type fileTandem struct {
	Mode    *Mode        `json:"mode"`
	Devices []DeviceRule `json:"devices"`
	Strict  *bool        `json:"strict"`
}

func (c *Config) loadFile(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read node configuration: %w", err)
	}
	if len(bytes.TrimSpace(data)) > 0 {
		if err := c.parseFile(data); err != nil {
			return fmt.Errorf("node configuration %s: %w", path, err)
		}
	}
	c.ConfigFile = path
	return nil
}

func (c *Config) parseFile(data []byte) error {
	if moreThanOne(data) {
		return errors.New("more than one YAML document")
	}
	asJSON, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return err
	}
	var f file
	strict, err := kjson.UnmarshalStrict(asJSON, &f)
	if err := errors.Join(append(strict, err)...); err != nil {
		return err
	}
	if f.Version != "" && f.Version != "v1" {
		return fmt.Errorf("version: unknown version: %s", f.Version)
	}
	if err := f.unsupported(); err != nil {
		return err
	}
	setText((*string)(&c.MIGStrategy), f.Flags.MIGStrategy)
	setText(&c.DriverRoot, f.Flags.NVIDIADriverRoot)
	setText(&c.DevRoot, f.Flags.NVIDIADevRoot)
	set(&c.PassDeviceSpecs, f.Flags.Plugin.PassDeviceSpecs)
	setText(&c.DeviceIDStrategy, f.Flags.Plugin.DeviceIDStrategy)
	setText(&c.CDIAnnotationPrefix, f.Flags.Plugin.CDIAnnotationPrefix)
	setText(&c.AllocationPolicy, f.Flags.Plugin.SharedDevicesAllocationPolicy)
	set(&c.Mode, f.Tandem.Mode)
	c.Devices = f.Tandem.Devices
	set(&c.Strict, f.Tandem.Strict)
	return errors.Join(c.setSharing(f.Sharing), c.setStrategies(f.Flags.Plugin.DeviceListStrategy))
}

// moreThanOne finds a second YAML document, of which the parser would say nothing.
func moreThanOne(data []byte) bool {
	documents := 0
	content := false
	for line := range bytes.Lines(data) {
		line = bytes.TrimRight(line, " \t\r\n")
		switch {
		case bytes.Equal(line, []byte("---")):
			content = false
		case len(line) > 0 && line[0] != '#' && !content:
			content = true
			documents++
		}
	}
	return documents > 1
}

// setStrategies accepts one string, with commas or without, as a list, as NVIDIA's file does.
func (c *Config) setStrategies(raw json.RawMessage) error {
	if blank(raw) {
		return nil
	}
	var one string
	if err := json.Unmarshal(raw, &one); err == nil {
		return list{&c.DeviceListStrategies}.Set(one)
	}
	var several []string
	if err := json.Unmarshal(raw, &several); err != nil {
		return errors.New("flags.plugin.deviceListStrategy: want a string or a list of strings")
	}
	c.DeviceListStrategies = several
	return nil
}

// setText ignores empty values: NVIDIA's tools write keys without a value.
func setText(target, value *string) {
	if value != nil && *value != "" {
		*target = *value
	}
}

func set[T any](target *T, value *T) {
	if value != nil {
		*target = *value
	}
}

// unsupported finds what is asked for and cannot be given. Keys that ask for what is the case anyway pass
// (failOnInitError: a missing driver is awaited; nvidiaCTKPath, containerDriverRoot: --cdi-hook and --host-root say it).
func (f *file) unsupported() error {
	var errs []error
	refuse := func(key string, refused bool, what string) {
		if refused {
			errs = append(errs, fmt.Errorf("%s: %s", key, what))
		}
	}
	const notYet = "not supported by this version of Tandem"
	is := func(value *string, accepted ...string) bool {
		if value == nil {
			return true
		}
		for _, a := range accepted {
			if *value == a {
				return true
			}
		}
		return false
	}
	on := func(value *bool) bool { return value != nil && *value }
	refuse("flags.deviceDiscoveryStrategy", !is(f.Flags.DeviceDiscoveryStrategy, "", "auto", "nvml"), "only auto and nvml are known")
	refuse("flags.gdrcopyEnabled", on(f.Flags.GDRCopyEnabled), notYet)
	refuse("flags.gdsEnabled", on(f.Flags.GDSEnabled), notYet)
	refuse("flags.mofedEnabled", on(f.Flags.MOFEDEnabled), notYet)
	refuse("resources", !blank(f.Resources),
		"GPUs and MIG profiles have the resource names that migStrategy gives them; other names are "+notYet)
	refuse("imex", !blank(f.IMEX), notYet)
	return errors.Join(errs...)
}

// blank reports whether a section asks for nothing: absent, null, or only empty values all the way down.
func blank(raw json.RawMessage) bool {
	if len(raw) == 0 {
		return true
	}
	var value any
	if err := json.Unmarshal(raw, &value); err != nil {
		return false
	}
	return blankValue(value)
}

func blankValue(value any) bool {
	switch v := value.(type) {
	case nil:
		return true
	case bool:
		return !v
	case string:
		return v == ""
	case []any:
		return len(v) == 0
	case map[string]any:
		for _, item := range v {
			if !blankValue(item) {
				return false
			}
		}
		return true
	}
	return false
}
