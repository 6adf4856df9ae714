// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// file is the node configuration: the keys of NVIDIA's device plugin (version v1) and the section "tandem". A key of NVIDIA's with
// an effect that this version does not have is an error, unless its value is empty.
type file struct {
	Version   string          `json:"version"`
	Flags     fileFlags       `json:"flags"`
	Resources json.RawMessage `json:"resources"`
	Sharing   fileSharing     `json:"sharing"`
	IMEX      struct {
		ChannelIDs []int `json:"channelIDs"`
		Required   bool  `json:"required"`
	} `json:"imex"`
	Tandem fileTandem `json:"tandem"`
}

// fileFlags needs no pointers: NVIDIA's tools write keys without a value, and no default is true.
type fileFlags struct {
	MIGStrategy             device.MIGStrategy `json:"migStrategy"`
	FailOnInitError         bool               `json:"failOnInitError"`
	MPSRoot                 string             `json:"mpsRoot"`
	NVIDIADriverRoot        string             `json:"nvidiaDriverRoot"`
	NVIDIADevRoot           string             `json:"nvidiaDevRoot"`
	GDRCopyEnabled          bool               `json:"gdrcopyEnabled"`
	GDSEnabled              bool               `json:"gdsEnabled"`
	MOFEDEnabled            bool               `json:"mofedEnabled"`
	UseNodeFeatureAPI       bool               `json:"useNodeFeatureAPI"`
	DeviceDiscoveryStrategy string             `json:"deviceDiscoveryStrategy"`
	Plugin                  struct {
		PassDeviceSpecs               bool            `json:"passDeviceSpecs"`
		DeviceListStrategy            json.RawMessage `json:"deviceListStrategy"`
		DeviceIDStrategy              string          `json:"deviceIDStrategy"`
		CDIAnnotationPrefix           string          `json:"cdiAnnotationPrefix"`
		NVIDIACTKPath                 string          `json:"nvidiaCTKPath"`
		ContainerDriverRoot           string          `json:"containerDriverRoot"`
		SharedDevicesAllocationPolicy string          `json:"sharedDevicesAllocationPolicy"`
	} `json:"plugin"`
	// GFD configures another component, which may use the same file.
	GFD json.RawMessage `json:"gfd"`
}

type fileTandem struct {
	Mode    *Mode        `json:"mode"`
	Devices []DeviceRule `json:"devices"`
	Strict  bool         `json:"strict"`
	Health  HealthRule   `json:"health"`
	// Handover is what happens to a GPU between two holders.
	Handover struct {
		Reset bool `json:"reset"`
	} `json:"handover"`
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
	flags, plugin := f.Flags, f.Flags.Plugin
	c.MIGStrategy = cmp.Or(flags.MIGStrategy, c.MIGStrategy)
	c.DriverRoot = cmp.Or(flags.NVIDIADriverRoot, c.DriverRoot)
	c.DevRoot = cmp.Or(flags.NVIDIADevRoot, c.DevRoot)
	c.GDS, c.GDRCopy, c.MOFED = flags.GDSEnabled, flags.GDRCopyEnabled, flags.MOFEDEnabled
	c.IMEXRequired = f.IMEX.Required
	if len(f.IMEX.ChannelIDs) > 0 {
		c.IMEXChannels = f.IMEX.ChannelIDs
	}
	c.PassDeviceSpecs = plugin.PassDeviceSpecs
	c.DeviceIDStrategy = cmp.Or(plugin.DeviceIDStrategy, c.DeviceIDStrategy)
	c.CDIAnnotationPrefix = cmp.Or(plugin.CDIAnnotationPrefix, c.CDIAnnotationPrefix)
	c.AllocationPolicy = cmp.Or(plugin.SharedDevicesAllocationPolicy, c.AllocationPolicy)
	if f.Tandem.Mode != nil {
		c.Mode = *f.Tandem.Mode
	}
	c.Devices, c.Strict, c.ResetGPUs = f.Tandem.Devices, f.Tandem.Strict, f.Tandem.Handover.Reset
	c.Health = f.Tandem.Health
	return errors.Join(c.setSharing(f.Sharing), c.setStrategies(plugin.DeviceListStrategy))
}

// moreThanOne reports whether there is a second YAML document, which the parser would ignore.
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
		c.DeviceListStrategies = split(one)
		return nil
	}
	c.DeviceListStrategies = nil
	if err := json.Unmarshal(raw, &c.DeviceListStrategies); err != nil {
		return errors.New("flags.plugin.deviceListStrategy: want a string or a list of strings")
	}
	return nil
}

// unsupported returns an error for each key with an effect that this version does not have. It accepts failOnInitError, because
// the agent waits for a driver anyway, and nvidiaCTKPath and containerDriverRoot, because --cdi-hook and --host-root replace them.
func (f *file) unsupported() error {
	var errs []error
	if !slices.Contains([]string{"", "auto", "nvml"}, f.Flags.DeviceDiscoveryStrategy) {
		errs = append(errs, errors.New("flags.deviceDiscoveryStrategy: only auto and nvml are known"))
	}
	if !blank(f.Resources) {
		errs = append(errs, errors.New("resources: GPUs and MIG profiles have the resource names that migStrategy gives them; "+
			"other names are not supported by this version of Tandem"))
	}
	return errors.Join(errs...)
}

// blank reports whether a section is missing, null, or contains only empty values.
func blank(raw json.RawMessage) bool {
	if len(raw) == 0 {
		return true
	}
	var value any
	return json.Unmarshal(raw, &value) == nil && blankValue(value)
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
		return !slices.ContainsFunc(slices.Collect(maps.Values(v)), func(item any) bool { return !blankValue(item) })
	}
	return false
}
