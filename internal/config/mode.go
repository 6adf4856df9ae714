// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// ModeLabel is the label of a Node object that overrides the mode from all other sources.
const ModeLabel = "tandem-gpu.dev/mode"

// Mode selects the APIs through which a node serves its GPUs.
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

// Modes are the modes that a configuration can set.
var Modes = []Mode{ModeDual, ModeClaimsOnly, ModeDevicePluginOnly, ModeSplit}

// Claims reports whether the node makes its GPUs, or some of them, available to new claims.
func (m Mode) Claims() bool { return m != ModeDevicePluginOnly && m != modeNone }

// Limits reports whether the node makes its GPUs, or some of them, available to new limits.
func (m Mode) Limits() bool { return m != ModeClaimsOnly && m != modeNone }

// Use is the API that serves a GPU.
type Use string

const (
	UseClaims Use = "claims"
	UseLimits Use = "limits"
	// UseNone excludes the GPU in every mode.
	UseNone Use = "none"
)

// DeviceRule sets how the node uses the GPUs that match.
type DeviceRule struct {
	// Match selects GPUs, by one of its keys.
	Match DeviceMatch `json:"match"`
	// Use is the API that serves the GPUs in mode Split: claims (the default) or limits. In every mode, none excludes the GPUs.
	Use Use `json:"use,omitempty"`
	// MIG is who creates partitions: an administrator (static, the default), or Tandem for each claim (dynamic).
	MIG MIGPolicy `json:"mig,omitempty"`
	// Sharing lets the GPUs have several holders at once. If several rules set it, they must agree.
	Sharing *SharingRule `json:"sharing,omitempty"`
	// Health is what to do about faults of these GPUs. If several rules have an action for a fault, the last one applies.
	Health *HealthRule `json:"health,omitempty"`
}

// DeviceMatch names GPUs by exactly one of its fields.
type DeviceMatch struct {
	// UUID is the UUID of a GPU (nvidia-smi -L).
	UUID *string `json:"uuid,omitempty"`
	// Index is NVML's index of a GPU. It can change in a reboot.
	Index *int `json:"index,omitempty"`
	// Model is the product name of GPUs, as in the attribute productName of ResourceSlices.
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

// check validates a rule without the node's GPUs.
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
	if r.Use == "" && r.MIG == "" && r.Sharing == nil && r.Health == nil {
		p.add(at, "has no effect: set use, mig, sharing, health or several of them")
	}
	if r.Health != nil {
		r.Health.check(p, at+".health")
	}
	if r.Use != "" {
		oneOf(p, at+".use", r.Use, UseClaims, UseLimits, UseNone)
	}
	if r.Sharing != nil {
		r.Sharing.check(p, at+".sharing")
		if r.MIG == MIGDynamic && r.Sharing.policy().Shared() {
			p.add(at+".sharing", "conflicts with mig: dynamic: a GPU with partitions on demand cannot be shared")
		}
	}
	if r.MIG != "" && r.MIG != MIGStatic && r.MIG != MIGDynamic {
		p.add(at+".mig", "%q is neither %s nor %s", string(r.MIG), MIGStatic, MIGDynamic)
	}
}

// checkMode validates mode and rules without the node's GPUs. Rules with a use are valid in every mode: a node's label may set Split.
func (c *Config) checkMode(p *problems) {
	oneOf(p, "tandem.mode", c.Mode, Modes...)
	for i, rule := range c.Devices {
		rule.check(p, fmt.Sprintf("tandem.devices[%d]", i))
	}
	if c.Mode == ModeSplit && !slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.Use != "" && r.Use != UseNone }) {
		p.add("tandem.devices", "is required by mode Split: set which GPUs serve limits")
	}
}

func join[T ~string](items []T) string {
	var text []string
	for _, item := range items {
		text = append(text, string(item))
	}
	return strings.Join(text, ", ")
}

// ForNode returns the configuration with the mode of the Node object's label, if there is one. The receiver must be valid.
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

// ServingNothing returns the configuration of a node with an unknown mode: the agent offers no device and serves existing holders.
func (c Config) ServingNothing() Config {
	c.Mode = modeNone
	return c
}

// Equal reports whether both have the same effect.
func (c Config) Equal(other Config) bool {
	return reflect.DeepEqual(c.effective(), other.effective())
}

// effective returns the configuration without what only messages need.
func (c Config) effective() Config {
	c.Unused = nil
	c.Sharing.Resources = slices.Clone(c.Sharing.Resources)
	for i := range c.Sharing.Resources {
		c.Sharing.Resources[i].Path = ""
	}
	return c
}

// OfferedToClaims reports whether a GPU serves claims. It and OfferedToPods are pure.
func (c Config) OfferedToClaims(gpu device.GPU) bool {
	return c.Mode.Claims() && !c.Excluded(gpu) && (c.Mode != ModeSplit || c.uses(gpu, UseClaims))
}

// OfferedToPods reports whether a GPU serves pods with limits.
func (c Config) OfferedToPods(gpu device.GPU) bool {
	return c.Mode.Limits() && !c.Excluded(gpu) && (c.Mode != ModeSplit || c.uses(gpu, UseLimits))
}

// Excluded reports whether a rule excludes the GPU from both APIs.
func (c Config) Excluded(gpu device.GPU) bool {
	return slices.ContainsFunc(c.Devices, func(r DeviceRule) bool { return r.Use == UseNone && r.Match.matches(gpu) })
}

// uses reports whether all rules that match a GPU agree on the use. A GPU with contradicting rules is excluded.
func (c Config) uses(gpu device.GPU, use Use) bool {
	wanted, err := agreed(c, gpu, "different uses", DeviceRule.use)
	return err == nil && cmp.Or(wanted, UseClaims) == use
}

func (r DeviceRule) use() Use             { return r.Use }
func (r DeviceRule) mig() MIGPolicy       { return r.MIG }
func (r DeviceRule) sharing() SharingRule { return ptr.Deref(r.Sharing, SharingRule{}) }

// agreed returns what the rules set for a GPU, and an error for each rule that contradicts the first one. The zero value means that no
// rule sets it.
func agreed[T comparable](c Config, gpu device.GPU, what string, setting func(DeviceRule) T) (want T, err error) {
	var unset T
	first := -1
	for i, rule := range c.Devices {
		switch got := setting(rule); {
		case got == unset || !rule.Match.matches(gpu):
		case first < 0:
			first, want = i, got
		case got != want:
			err = errors.Join(err, fmt.Errorf("tandem.devices[%d] (%s) and tandem.devices[%d] (%s) set %s for GPU %s (index %d)",
				first, c.Devices[first].Match, i, rule.Match, what, gpu.UUID, gpu.Index))
		}
	}
	return want, err
}

// CheckDevices validates the rules against the node's GPUs: two rules must not contradict each other for a GPU, and in Split each
// rule with a use must match a GPU. Other rules may match none (CheckEffect): one configuration may serve nodes of several models.
func (c Config) CheckDevices(inv device.Inventory) error {
	errs := []error{c.CheckContradictions(inv)}
	for i, rule := range c.Devices {
		if c.mustMatch(rule) && !slices.ContainsFunc(inv.GPUs, rule.Match.matches) {
			errs = append(errs, unmatched(i, rule))
		}
	}
	return errors.Join(errs...)
}

// mustMatch reports whether a rule that matches no GPU is an error.
func (c Config) mustMatch(rule DeviceRule) bool { return c.Mode == ModeSplit && rule.Use != "" }

func unmatched(i int, rule DeviceRule) error {
	return fmt.Errorf("tandem.devices[%d].match: no GPU of this node has %s", i, rule.Match)
}

// CheckContradictions is CheckDevices, but rules may match nothing: their GPU may be missing for a while.
func (c Config) CheckContradictions(inv device.Inventory) error {
	var errs []error
	for _, gpu := range inv.GPUs {
		if c.Mode == ModeSplit {
			_, err := agreed(c, gpu, "different uses", DeviceRule.use)
			errs = append(errs, err)
		}
		_, contradicting := agreed(c, gpu, "both static and dynamic MIG", DeviceRule.mig)
		shared, different := agreed(c, gpu, "different sharing", DeviceRule.sharing)
		errs = append(errs, contradicting, different)
		if c.Dynamic(gpu) && shared.policy().Shared() {
			errs = append(errs, fmt.Errorf("tandem.devices: GPU %s (index %d) cannot be shared and have MIG partitions on demand", gpu.UUID, gpu.Index))
		}
	}
	return errors.Join(errs...)
}

// MIGPolicy selects who creates the partitions of a GPU.
type MIGPolicy string

const (
	// MIGStatic leaves them to the administrator. It is the default.
	MIGStatic MIGPolicy = "static"
	// MIGDynamic creates a partition for a claim, and destroys it after the claim's last use.
	MIGDynamic MIGPolicy = "dynamic"
)

// Dynamic reports whether partitions of a GPU are created for claims. It is pure and does not depend on the mode: claims keep their
// partitions when the mode changes. A GPU with contradicting rules is static.
func (c Config) Dynamic(gpu device.GPU) bool {
	policy, err := agreed(c, gpu, "both static and dynamic MIG", DeviceRule.mig)
	return gpu.MIGCapable && err == nil && policy == MIGDynamic
}

// CheckEffect returns an error for each rule that has no effect on this node: it matches no GPU, or it has mig: dynamic and those GPUs have
// no MIG. The model may be misspelt, or the configuration may serve nodes of several models. It omits rules that CheckDevices reports.
func (c Config) CheckEffect(inv device.Inventory) error {
	var errs []error
	for i, rule := range c.Devices {
		gpus := slices.DeleteFunc(slices.Clone(inv.GPUs), func(g device.GPU) bool { return !rule.Match.matches(g) })
		switch {
		case len(gpus) == 0 && !c.mustMatch(rule):
			errs = append(errs, unmatched(i, rule))
		case len(gpus) > 0 && rule.MIG == MIGDynamic && !slices.ContainsFunc(gpus, func(g device.GPU) bool { return g.MIGCapable }):
			errs = append(errs, fmt.Errorf("tandem.devices[%d].mig: %s of this node has no MIG (%s)", i, rule.Match, gpus[0].ProductName))
		}
	}
	return errors.Join(errs...)
}

// Resources are the extended resources of the node's devices.
func (c Config) Resources() device.Resources {
	return device.Resources{GPU: c.ResourceName, Strategy: c.MIGStrategy}
}
