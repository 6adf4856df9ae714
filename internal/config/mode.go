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

// check finds what is wrong with a rule whatever the node has.
func (r DeviceRule) check(p *problems, at string) {
	m := r.Match
	keys := slices.DeleteFunc([]bool{m.UUID != nil, m.Index != nil, m.Model != nil}, func(set bool) bool { return !set })
	if len(keys) != 1 {
		p.add(at+".match", "want exactly one of uuid, index and model")
	}
	if m.UUID != nil && !strings.HasPrefix(*m.UUID, "GPU-") {
		p.add(at+".match.uuid", "%q is no UUID of a GPU (nvidia-smi -L lists them)", *m.UUID)
	}
	if m.Index != nil && *m.Index < 0 {
		p.add(at+".match.index", "%d is less than 0", *m.Index)
	}
	if m.Model != nil && *m.Model == "" {
		p.add(at+".match.model", "is empty")
	}
	if r.Use == "" && r.MIG == "" && r.Sharing == nil {
		p.add(at, "says nothing about its GPUs: want use, mig, sharing or several of them")
	}
	if r.Use != "" {
		oneOf(p, at+".use", r.Use, UseClaims, UseLimits, UseNone)
	}
	if r.Sharing != nil {
		r.Sharing.check(p, at+".sharing")
		if r.MIG == MIGDynamic && r.Sharing.policy().Shared() {
			p.add(at+".sharing", "does not go with mig: dynamic: such a GPU is divided into partitions")
		}
	}
	if r.MIG != "" && r.MIG != MIGStatic && r.MIG != MIGDynamic {
		p.add(at+".mig", "%q is neither %s nor %s", string(r.MIG), MIGStatic, MIGDynamic)
	}
}

// checkMode checks mode and rules without the node's GPUs. Rules without Split are for nodes whose label says Split.
func (c *Config) checkMode(p *problems) {
	oneOf(p, "tandem.mode", c.Mode, Modes...)
	for i, rule := range c.Devices {
		rule.check(p, fmt.Sprintf("tandem.devices[%d]", i))
	}
	if c.Mode == ModeSplit && !slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.Use != "" && r.Use != UseNone }) {
		p.add("tandem.devices", "is required by mode Split: say which GPUs are for limits")
	}
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
	var p problems
	c.checkMode(&p)
	if err := errors.Join(p...); err != nil {
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

// Excluded reports whether a rule excludes the GPU from both APIs.
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

// CheckDevices checks the rules against the GPUs of the node: two rules must not disagree about a GPU, and in Split each rule with a
// use must match one. A rule about MIG alone may match none: one configuration may serve nodes of several models.
func (c Config) CheckDevices(inv device.Inventory) error {
	errs := []error{c.CheckContradictions(inv)}
	for i, rule := range c.Devices {
		if c.mustMatch(rule) && !slices.ContainsFunc(inv.GPUs, rule.Match.matches) {
			errs = append(errs, unmatched(i, rule))
		}
	}
	return errors.Join(errs...)
}

// mustMatch reports whether it is a mistake when a rule matches no GPU.
func (c Config) mustMatch(rule DeviceRule) bool { return c.Mode == ModeSplit && rule.Use != "" }

func unmatched(i int, rule DeviceRule) error {
	return fmt.Errorf("tandem.devices[%d].match: no GPU of this node has %s", i, rule.Match)
}

// CheckContradictions is CheckDevices without the rules that match nothing: their GPU may be lost for now.
func (c Config) CheckContradictions(inv device.Inventory) error {
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
	return errors.Join(errs...)
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

// MIGPolicy says who makes the partitions of a GPU.
type MIGPolicy string

const (
	// MIGStatic leaves them to the administrator. It is what holds for a GPU that no rule speaks of.
	MIGStatic MIGPolicy = "static"
	// MIGDynamic has them made when a claim asks for one, and destroyed when the claim is gone.
	MIGDynamic MIGPolicy = "dynamic"
)

// Dynamic reports whether partitions of a GPU are made as claims ask for them. It is pure, and the same in every mode: claims
// that have partitions keep them when the mode changes. A GPU about which rules disagree is static.
func (c Config) Dynamic(gpu device.GPU) bool {
	wants := func(policy MIGPolicy) bool {
		return slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.MIG == policy && r.Match.matches(gpu) })
	}
	return gpu.MIGCapable && wants(MIGDynamic) && !wants(MIGStatic)
}

// CheckDynamic says which rules ask in vain for partitions to be made. That is no mistake where one configuration serves nodes of
// several models, and a misspelt model looks the same. What CheckDevices says of a rule is not said again.
func (c Config) CheckDynamic(inv device.Inventory) error {
	var errs []error
	for i, rule := range c.Devices {
		gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !rule.Match.matches(g) })
		switch {
		case rule.MIG != MIGDynamic || slices.ContainsFunc(gpus, func(g device.GPU) bool { return g.MIGCapable }):
		case len(gpus) > 0:
			errs = append(errs, fmt.Errorf("tandem.devices[%d].mig: %s of this node has no MIG (%s)", i, rule.Match, gpus[0].ProductName))
		case !c.mustMatch(rule):
			errs = append(errs, unmatched(i, rule))
		}
	}
	return errors.Join(errs...)
}

// Resources are the extended resources by which limits ask for the node's devices.
func (c Config) Resources() device.Resources {
	return device.Resources{GPU: c.ResourceName, Strategy: c.MIGStrategy}
}
