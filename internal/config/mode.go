// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// ModeLabel is the label by which a Node object overrides the mode of everything else that configures its agent.
const ModeLabel = "tandem-gpu.dev/mode"

// Mode says through which APIs a node serves its GPUs.
type Mode string

const (
	// ModeDual serves claims and limits from the same GPUs.
	ModeDual Mode = "Dual"
	// ModeClaimsOnly serves claims and registers no device plugin.
	ModeClaimsOnly Mode = "ClaimsOnly"
	// ModeDevicePluginOnly serves limits and publishes no ResourceSlices.
	ModeDevicePluginOnly Mode = "DevicePluginOnly"
	// ModeSplit serves limits from the GPUs that the configuration names for them, and claims from the others.
	ModeSplit Mode = "Split"
	// modeNone allocates no GPU. The node configuration cannot set it.
	modeNone Mode = ""
)

// Modes are all that there are.
var Modes = []Mode{ModeDual, ModeClaimsOnly, ModeDevicePluginOnly, ModeSplit}

// Claims reports whether the node makes its GPUs, or some of them, available to new claims.
func (m Mode) Claims() bool { return m != ModeDevicePluginOnly && m != modeNone }

// Limits reports whether the node makes its GPUs, or some of them, available to new limits.
func (m Mode) Limits() bool { return m != ModeClaimsOnly && m != modeNone }

// Use is the API that a GPU is for.
type Use string

const (
	UseClaims Use = "claims"
	UseLimits Use = "limits"
	// UseNone excludes the GPU in every mode.
	UseNone Use = "none"
)

// DeviceRule says what some GPUs are for.
type DeviceRule struct {
	Match DeviceMatch `json:"match"`
	// Use is read in ModeSplit, where GPUs that no rule gives a use are for claims; UseNone in every mode.
	Use     Use          `json:"use,omitempty"`
	MIG     MIGPolicy    `json:"mig,omitempty"`
	Sharing *SharingRule `json:"sharing,omitempty"`
}

// DeviceMatch names GPUs by exactly one of its fields.
type DeviceMatch struct {
	UUID *string `json:"uuid,omitempty"`
	// Index is NVML's; it can change over a reboot.
	Index *int `json:"index,omitempty"`
	// Model is the product name, as the attribute productName has it.
	Model *string `json:"model,omitempty"`
}

func (m DeviceMatch) matches(gpu device.GPU) bool {
	switch {
	case m.UUID != nil:
		return gpu.UUID == *m.UUID
	case m.Index != nil:
		return gpu.Index == *m.Index
	case m.Model != nil:
		return gpu.ProductName == *m.Model
	}
	return false
}

func (m DeviceMatch) String() string {
	switch {
	case m.UUID != nil:
		return "uuid " + *m.UUID
	case m.Index != nil:
		return fmt.Sprintf("index %d", *m.Index)
	case m.Model != nil:
		return fmt.Sprintf("model %q", *m.Model)
	}
	return "nothing"
}

// problems are what is wrong with a rule whatever the node has.
func (r DeviceRule) problems(path string) []error {
	var errs []error
	complain := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf(path+field+": "+format, args...))
	}
	keys := 0
	for _, set := range []bool{r.Match.UUID != nil, r.Match.Index != nil, r.Match.Model != nil} {
		if set {
			keys++
		}
	}
	if keys != 1 {
		complain(".match", "want exactly one of uuid, index and model")
	}
	if r.Match.UUID != nil && !strings.HasPrefix(*r.Match.UUID, "GPU-") {
		complain(".match.uuid", "%q is no UUID of a GPU (nvidia-smi -L lists them)", *r.Match.UUID)
	}
	if r.Match.Index != nil && *r.Match.Index < 0 {
		complain(".match.index", "%d is less than 0", *r.Match.Index)
	}
	if r.Match.Model != nil && *r.Match.Model == "" {
		complain(".match.model", "is empty")
	}
	if r.Use == "" && r.MIG == "" && r.Sharing == nil {
		complain("", "says nothing about its GPUs: want use, mig, sharing or several of them")
	}
	if uses := []Use{UseClaims, UseLimits, UseNone}; r.Use != "" && !slices.Contains(uses, r.Use) {
		complain(".use", "%q is not one of %s", string(r.Use), join(uses))
	}
	if r.Sharing != nil {
		errs = append(errs, r.Sharing.problems(path+".sharing")...)
		if r.MIG == MIGDynamic && r.Sharing.policy().Shared() {
			complain(".sharing", "does not go with mig: dynamic: such a GPU is divided into partitions")
		}
	}
	if r.MIG != "" && r.MIG != MIGStatic && r.MIG != MIGDynamic {
		complain(".mig", "%q is neither %s nor %s", string(r.MIG), MIGStatic, MIGDynamic)
	}
	return errs
}

// modeProblems judges mode and rules without knowing the node's GPUs. Rules without Split are for nodes whose label says Split.
func (c *Config) modeProblems() []error {
	var errs []error
	if !slices.Contains(Modes, c.Mode) {
		errs = append(errs, fmt.Errorf("tandem.mode: %q is not one of %s", string(c.Mode), join(Modes)))
	}
	for i, rule := range c.Devices {
		errs = append(errs, rule.problems(fmt.Sprintf("tandem.devices[%d]", i))...)
	}
	if c.Mode == ModeSplit && !slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.Use != "" && r.Use != UseNone }) {
		errs = append(errs, errors.New("tandem.devices: is required by mode Split: say which GPUs are for limits"))
	}
	return errs
}

func join[T ~string](items []T) string {
	var text []string
	for _, item := range items {
		text = append(text, string(item))
	}
	return strings.Join(text, ", ")
}

// ForNode is the configuration with what the Node object's label says, if it is there. The receiver was validated before.
func (c Config) ForNode(label string, labelled bool) (Config, error) {
	if !labelled {
		return c, nil
	}
	c.Mode = Mode(label)
	if err := errors.Join(c.modeProblems()...); err != nil {
		return Config{}, fmt.Errorf("node label %s=%s: %w", ModeLabel, label, err)
	}
	return c, nil
}

// ServingNothing is the configuration of a node with an unknown mode: the agent offers no device and serves the holders that it
// has.
func (c Config) ServingNothing() Config {
	c.Mode = modeNone
	return c
}

// Equal reports whether an agent would do the same with both.
func (c Config) Equal(other Config) bool { return reflect.DeepEqual(c, other) }

// OfferedToClaims reports whether a GPU is for claims. It and OfferedToPods are pure.
func (c Config) OfferedToClaims(gpu device.GPU) bool {
	return c.Mode.Claims() && !c.Excluded(gpu) && (c.Mode != ModeSplit || c.uses(gpu, UseClaims))
}

// OfferedToPods reports whether a GPU is for limits.
func (c Config) OfferedToPods(gpu device.GPU) bool {
	return c.Mode.Limits() && !c.Excluded(gpu) && (c.Mode != ModeSplit || c.uses(gpu, UseLimits))
}

// Excluded reports whether a rule keeps the GPU from everybody.
func (c Config) Excluded(gpu device.GPU) bool {
	return slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.Use == UseNone && r.Match.matches(gpu) })
}

// uses reports whether all rules that match a GPU agree on the use. A GPU with contradicting rules is excluded.
func (c Config) uses(gpu device.GPU, use Use) bool {
	matched := false
	for _, rule := range c.Devices {
		if rule.Use != "" && rule.Match.matches(gpu) {
			matched = true
			if rule.Use != use {
				return false
			}
		}
	}
	return matched || use == UseClaims
}

// CheckDevices holds the rules against the GPUs of the node: a GPU about which two rules disagree is a mistake, and in Split a
// rule that matches none. A rule about MIG alone may match none: one configuration may serve nodes of several models.
func (c Config) CheckDevices(inv device.Inventory) error {
	return errors.Join(append(c.contradictions(inv), c.unmatched(inv)...)...)
}

// CheckContradictions is CheckDevices without the rules that match nothing: their GPU may be lost for now.
func (c Config) CheckContradictions(inv device.Inventory) error {
	return errors.Join(c.contradictions(inv)...)
}

// mustMatch reports whether it is a mistake when a rule matches no GPU.
func (c Config) mustMatch(rule DeviceRule) bool { return c.Mode == ModeSplit && rule.Use != "" }

func (c Config) unmatched(inv device.Inventory) []error {
	var errs []error
	for i, rule := range c.Devices {
		if c.mustMatch(rule) && !slices.ContainsFunc(inv.GPUs, rule.Match.matches) {
			errs = append(errs, fmt.Errorf("tandem.devices[%d].match: no GPU of this node has %s", i, rule.Match))
		}
	}
	return errs
}

func (c Config) contradictions(inv device.Inventory) []error {
	var errs []error
	for _, gpu := range inv.GPUs {
		if c.Mode == ModeSplit {
			errs = append(errs, c.disagreements(gpu, "different uses", func(r DeviceRule) string { return string(r.Use) })...)
		}
		errs = append(errs, c.disagreements(gpu, "both static and dynamic MIG", func(r DeviceRule) string { return string(r.MIG) })...)
		errs = append(errs, c.disagreements(gpu, "different sharing", func(r DeviceRule) string {
			if r.Sharing == nil {
				return ""
			}
			return fmt.Sprintf("%+v", *r.Sharing)
		})...)
		if c.Dynamic(gpu) && slices.ContainsFunc(c.Devices, func(r DeviceRule) bool {
			return r.Sharing != nil && r.Sharing.policy().Shared() && r.Match.matches(gpu)
		}) {
			errs = append(errs, fmt.Errorf("tandem.devices: GPU %s (index %d) cannot be shared and have MIG partitions on demand", gpu.UUID, gpu.Index))
		}
	}
	return errs
}

// disagreements are the rules that want something else of a GPU than the first that wants anything.
func (c Config) disagreements(gpu device.GPU, what string, wants func(DeviceRule) string) []error {
	var errs []error
	first := -1
	for i, rule := range c.Devices {
		switch {
		case wants(rule) == "" || !rule.Match.matches(gpu):
		case first < 0:
			first = i
		case wants(c.Devices[first]) != wants(rule):
			errs = append(errs, fmt.Errorf("tandem.devices[%d] (%s) and tandem.devices[%d] (%s) want %s of GPU %s (index %d)",
				first, c.Devices[first].Match, i, rule.Match, what, gpu.UUID, gpu.Index))
		}
	}
	return errs
}
