// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	goyaml "go.yaml.in/yaml/v2"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// file is the node configuration: the keys of NVIDIA's device plugin (version v1) and the section "tandem".
type file struct {
	// Version is the version of the format, v1.
	Version string `json:"version"`
	// Flags are settings of NVIDIA's device plugin.
	Flags fileFlags `json:"flags"`
	// Resources has no effect: flags.migStrategy names the resources.
	Resources fileResources `json:"resources"`
	// Sharing shares the GPUs for which no rule in tandem.devices has sharing.
	Sharing fileSharing `json:"sharing"`
	// IMEX gives containers channels of NVIDIA's IMEX, by which GPUs of several nodes share memory.
	IMEX struct {
		// ChannelIDs are the channels that containers get: [0], or none.
		ChannelIDs []int `json:"channelIDs"`
		// Required keeps the agent from offering GPUs while the channel does not exist on the node.
		Required bool `json:"required"`
	} `json:"imex"`
	// Tandem are the settings that NVIDIA's device plugin does not have.
	Tandem fileTandem `json:"tandem"`
}

// fileFlags has pointers only for keys without effect, to report those that are set. For the others a missing key, null and the zero
// value all mean the default.
type fileFlags struct {
	// MIGStrategy is how pods with limits get static partitions: none (GPUs only, the default), single (partitions under the resource name
	// of GPUs, if all GPUs have the same ones), or mixed (partitions under a resource name for each profile).
	MIGStrategy device.MIGStrategy `json:"migStrategy"`
	// FailOnInitError has no effect: the agent waits for the driver.
	FailOnInitError *bool `json:"failOnInitError"`
	// MPSRoot has no effect: MPS daemons keep their files below --run-dir.
	MPSRoot *string `json:"mpsRoot"`
	// NVIDIADriverRoot is where the driver is on the host. Empty: the agent searches. The chart's value driverRoot overrides it.
	NVIDIADriverRoot string `json:"nvidiaDriverRoot"`
	// NVIDIADevRoot is the parent of the dev directory with the device nodes. Empty: the agent searches. The chart's value devRoot
	// overrides it.
	NVIDIADevRoot string `json:"nvidiaDevRoot"`
	// GDRCopyEnabled gives containers the device of GDRCopy.
	GDRCopyEnabled bool `json:"gdrcopyEnabled"`
	// GDSEnabled gives containers the devices of GPUDirect Storage.
	GDSEnabled bool `json:"gdsEnabled"`
	// MOFEDEnabled gives containers the devices of Mellanox OFED.
	MOFEDEnabled bool `json:"mofedEnabled"`
	// UseNodeFeatureAPI lets the agent write the node's labels to a NodeFeature for Node Feature Discovery.
	UseNodeFeatureAPI bool `json:"useNodeFeatureAPI"`
	// DeviceDiscoveryStrategy is how GPUs are found: auto or nvml, which are the same. Others are refused.
	DeviceDiscoveryStrategy string `json:"deviceDiscoveryStrategy"`
	// Plugin are settings for pods with limits.
	Plugin struct {
		// PassDeviceSpecs lists the device nodes in the answer to kubelet as well, with envvar and volume-mounts.
		PassDeviceSpecs bool `json:"passDeviceSpecs"`
		// DeviceListStrategy is how containers get their devices: cdi-cri (the default), cdi-annotations, envvar, volume-mounts, or a list
		// of them.
		DeviceListStrategy json.RawMessage `json:"deviceListStrategy"`
		// DeviceIDStrategy is how envvar and volume-mounts name devices: uuid (the default) or index.
		DeviceIDStrategy string `json:"deviceIDStrategy"`
		// CDIAnnotationPrefix is the prefix of the annotations of cdi-annotations. Empty: cdi.k8s.io/.
		CDIAnnotationPrefix string `json:"cdiAnnotationPrefix"`
		// NVIDIACTKPath has no effect: --cdi-hook selects the hook.
		NVIDIACTKPath *string `json:"nvidiaCTKPath"`
		// ContainerDriverRoot has no effect: the agent finds the driver below --host-root.
		ContainerDriverRoot *string `json:"containerDriverRoot"`
		// SharedDevicesAllocationPolicy is how replicas of shared devices are spread: distributed (the default) or packed.
		SharedDevicesAllocationPolicy string `json:"sharedDevicesAllocationPolicy"`
	} `json:"plugin"`
	// GFD are settings for the labels of the node.
	GFD fileGFD `json:"gfd"`
}

// fileGFD has the keys of GPU Feature Discovery, which may use the same file.
type fileGFD struct {
	// Oneshot has no effect: the agent keeps the labels up to date.
	Oneshot *bool `json:"oneshot"`
	// NoTimestamp leaves out the label nvidia.com/gfd.timestamp. The default is true.
	NoTimestamp *bool `json:"noTimestamp"`
	// SleepInterval is how often removed labels are restored: a duration such as 60s (the default), a number of nanoseconds, or infinite.
	SleepInterval interval `json:"sleepInterval"`
	// OutputFile has no effect: the agent writes the labels to the API server.
	OutputFile *string `json:"outputFile"`
	// MachineTypeFile is the path of a file with the value of the label nvidia.com/gpu.machine. Empty: the product name in the machine's DMI.
	MachineTypeFile string `json:"machineTypeFile"`
}

// interval is a duration such as "60s", or "infinite"; empty if it is not set. The file may have a number of nanoseconds instead.
type interval string

// UnmarshalJSON implements json.Unmarshaler.
func (i *interval) UnmarshalJSON(text []byte) error {
	var value any
	if err := json.Unmarshal(text, &value); err != nil {
		return err
	}
	switch v := value.(type) {
	case nil:
		return nil
	case float64:
		*i = interval(time.Duration(max(0, min(v, math.MaxInt32*float64(time.Second)))).String())
		return nil
	case string:
		if _, err := time.ParseDuration(v); err == nil || v == infinite {
			*i = interval(v)
			return nil
		}
	}
	return fmt.Errorf("sleepInterval: %s is not a duration such as 60s, a number of nanoseconds, or infinite", text)
}

// fileResources names resources by the product names of GPUs and by MIG profiles.
type fileResources struct {
	// GPUs has no effect.
	GPUs []fileResource `json:"gpus"`
	// MIG has no effect.
	MIG []fileResource `json:"mig"`
}

type fileResource struct {
	// Pattern has no effect.
	Pattern *string `json:"pattern"`
	// Name has no effect.
	Name *string `json:"name"`
}

type fileTandem struct {
	// Mode is which APIs serve the node's GPUs. The default is Dual. The node's label tandem-gpu.dev/mode overrides it.
	Mode *Mode `json:"mode"`
	// Devices are rules, each for the GPUs that it matches.
	Devices []DeviceRule `json:"devices"`
	// Strict lets the scheduler bind a pod only after the node has reserved the devices of its claims. The chart's value strict sets it.
	Strict bool `json:"strict"`
	// Health is what to do about faults of GPUs for which no rule in devices has an action.
	Health HealthRule `json:"health"`
	// Handover is what happens to a GPU between two holders.
	Handover struct {
		// Reset resets a GPU between two holders, unless it has static partitions or is shared.
		Reset bool `json:"reset"`
		// MonitorNamespaces are those of pods whose processes may use GPUs that they do not hold, beside kube-system, the agents' and
		// podPolicy.exemptNamespaces of the chart. Name none in which tenants may create pods.
		MonitorNamespaces []string `json:"monitorNamespaces"`
	} `json:"handover"`
}

func readFile(path string) ([]byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read node configuration: %w", err)
	}
	return text, nil
}

func (c *Config) loadFile(path string, text []byte) error {
	if len(bytes.TrimSpace(text)) > 0 {
		if err := c.parseFile(text); err != nil {
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
	toJSON := yaml.YAMLToJSONStrict
	if c.UnknownKeys == UnknownKeysWarn {
		toJSON = yaml.YAMLToJSON // of two equal keys the last one counts, as in NVIDIA's device plugin
	}
	asJSON, err := toJSON(data)
	if err != nil {
		return errors.New(strings.ReplaceAll(err.Error(), "yaml: unmarshal errors:\n  ", "yaml: "))
	}
	var f file
	strict, err := kjson.UnmarshalStrict(asJSON, &f)
	if err != nil {
		return inWords(err)
	}
	if c.UnknownKeys == UnknownKeysWarn {
		for _, err := range strict {
			c.Unused = append(c.Unused, err.Error())
		}
	} else if err := errors.Join(strict...); err != nil {
		return err
	}
	if f.Version != "" && f.Version != "v1" {
		return fmt.Errorf("version: unknown version: %s", f.Version)
	}
	if err := errors.Join(checkDiscovery("flags.deviceDiscoveryStrategy", f.Flags.DeviceDiscoveryStrategy), f.Resources.check()); err != nil {
		return err
	}
	c.Unused = append(c.Unused, f.unused()...)
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
	c.UseNodeFeatureAPI = flags.UseNodeFeatureAPI
	c.NoTimestamp = ptr.Deref(flags.GFD.NoTimestamp, c.NoTimestamp)
	c.MachineTypeFile = cmp.Or(flags.GFD.MachineTypeFile, c.MachineTypeFile)
	if f.Tandem.Mode != nil {
		c.Mode = *f.Tandem.Mode
	}
	c.Devices, c.Strict, c.ResetGPUs = f.Tandem.Devices, f.Tandem.Strict, f.Tandem.Handover.Reset
	c.MonitorNamespaces = f.Tandem.Handover.MonitorNamespaces
	c.Health = f.Tandem.Health
	if interval := flags.GFD.SleepInterval; interval != "" {
		if err := c.setLabelInterval(string(interval)); err != nil {
			return fmt.Errorf("flags.gfd.sleepInterval: %w", err)
		}
	}
	return errors.Join(c.setSharing(f.Sharing), c.setStrategies(plugin.DeviceListStrategy))
}

// inWords says what a value of the wrong type should be, in terms of YAML.
func inWords(err error) error {
	mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return err
	}
	want := map[reflect.Kind]string{
		reflect.Struct: "a map", reflect.Map: "a map", reflect.Slice: "a list", reflect.Bool: "true or false", reflect.String: "a string",
	}[mismatch.Type.Kind()]
	kind, value, _ := strings.Cut(mismatch.Value, " ")
	got := map[string]string{"object": "a map", "array": "a list", "bool": "true or false", "string": "a string", "number": "a number"}[kind]
	words := fmt.Sprintf("want %s, not %s", cmp.Or(want, "a whole number"), cmp.Or(value, got, kind))
	text := strings.Replace(err.Error(), mismatch.Error(), words, 1) // a section with a parser of its own says where it is
	switch {
	case mismatch.Field != "":
		text = mismatch.Field + ": " + words
	case text == words:
		text = "the whole file: " + words
	}
	return errors.New(text)
}

// CheckFile validates the text of a configuration file as an agent without other settings does. unused are the keys without effect, with
// the reasons, sorted. unknownKeys is UnknownKeysError or UnknownKeysWarn.
func CheckFile(text []byte, unknownKeys string) (unused []string, err error) {
	c := Defaults()
	c.UnknownKeys, c.NodeName = unknownKeys, "node"
	if len(bytes.TrimSpace(text)) > 0 {
		if err := c.parseFile(text); err != nil {
			return nil, err
		}
	}
	l := loader{lookupEnv: func(string) (string, bool) { return "", false }, into: &c, check: c.validate}
	err = l.finish()
	return c.Unused, err
}

// moreThanOne reports whether there is a second YAML document that is not empty, which the parser would ignore.
func moreThanOne(data []byte) bool {
	documents := 0
	for decoder := goyaml.NewDecoder(bytes.NewReader(data)); ; {
		var content any
		if err := decoder.Decode(&content); err != nil {
			return documents > 1 // the parser reports mistakes
		}
		if content != nil {
			documents++
		}
	}
}

// setStrategies accepts one string, with commas or without, as a list, as NVIDIA's file does.
func (c *Config) setStrategies(raw json.RawMessage) error {
	if len(raw) == 0 {
		return nil
	}
	var one string // null leaves it empty
	var list []string
	if json.Unmarshal(raw, &one) == nil {
		if one != "" {
			list = split(one)
		}
	} else if json.Unmarshal(raw, &list) != nil {
		return errors.New("flags.plugin.deviceListStrategy: want a string or a list of strings")
	}
	if len(list) > 0 {
		c.DeviceListStrategies = list
	}
	return nil
}

// check validates the section as NVIDIA's device plugin does, which then discards it (api/config/v1, DisableResourceNamingInConfig).
func (r fileResources) check() error {
	var errs []error
	for _, section := range []struct {
		path string
		list []fileResource
	}{{"resources.gpus", r.GPUs}, {"resources.mig", r.MIG}} {
		for i, entry := range section.list {
			at := fmt.Sprintf("%s[%d]", section.path, i)
			switch {
			case entry.Pattern == nil:
				errs = append(errs, fmt.Errorf("%s.pattern: resources must have a 'pattern' field set", at))
			case entry.Name == nil:
				errs = append(errs, fmt.Errorf("%s.name: resources must have a 'name' field set", at))
			default:
				if err := checkRename(*entry.Name); err != nil {
					errs = append(errs, fmt.Errorf("%s.name: %w", at, err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// checkRename validates a name that a resource would get, as NVIDIA's device plugin does (api/config/v1, NewResourceName).
func checkRename(name string) error {
	const domain, longest = "nvidia.com/", 63
	name = domain + strings.TrimPrefix(name, domain)
	if len(name) > longest {
		return fmt.Errorf("fully-qualified resource name must be %d characters or less: %s", longest, name)
	}
	if wrong := validation.IsDNS1123Subdomain(strings.TrimPrefix(name, domain)); len(wrong) > 0 {
		return fmt.Errorf("incorrect format for resource name '%s': %s", name, strings.Join(wrong, "; "))
	}
	return nil
}

// unused returns the keys that are set and have no effect.
func (f *file) unused() (unused []string) {
	add := func(isSet bool, key, why string) {
		if isSet {
			unused = append(unused, key+": "+why)
		}
	}
	flags, gfd := f.Flags, f.Flags.GFD
	add(flags.FailOnInitError != nil, "flags.failOnInitError", whyUnused["fail-on-init-error"])
	add(flags.MPSRoot != nil, "flags.mpsRoot", whyUnused["mps-root"])
	add(flags.Plugin.NVIDIACTKPath != nil, "flags.plugin.nvidiaCTKPath", whyUnused["nvidia-ctk-path"])
	add(flags.Plugin.ContainerDriverRoot != nil, "flags.plugin.containerDriverRoot", whyUnused["container-driver-root"])
	add(gfd.Oneshot != nil, "flags.gfd.oneshot", "the agent keeps the node's labels up to date")
	add(gfd.OutputFile != nil, "flags.gfd.outputFile", "the agent writes the labels to the API server")
	add(len(f.Resources.GPUs)+len(f.Resources.MIG) > 0, "resources",
		"GPUs and MIG profiles have the resource names that migStrategy gives them, as with NVIDIA's device plugin")
	return unused
}

// whyUnused are flags of NVIDIA's device plugin that are accepted and have no effect, and why.
var whyUnused = map[string]string{
	"fail-on-init-error":    "the agent waits for the driver and its GPUs",
	"mps-root":              "MPS daemons keep their files below --run-dir",
	"nvidia-ctk-path":       "--cdi-hook selects the hook",
	"container-driver-root": "the agent finds the driver below --host-root",
	"driver-root-ctr-path":  "the agent finds the driver below --host-root",
	"kubelet-socket":        "the agent finds kubelet's socket below --kubelet-dir",
}

// checkDiscovery accepts what finds the same GPUs as the agent.
func checkDiscovery(at, strategy string) error {
	if slices.Contains([]string{"", "auto", "nvml"}, strategy) {
		return nil
	}
	return fmt.Errorf("%s: %q is not one of auto, nvml (Tandem has no other way to find GPUs)", at, strategy)
}
