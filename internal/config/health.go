// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/pkg/device"
)

// HealthRule sets what to do about a fault, by its class. An empty action is the node's, or NoSchedule.
type HealthRule struct {
	// Contained is for XIDs that end programs and leave the GPU working.
	Contained device.FaultAction `json:"contained,omitempty"`
	// Fabric is for faults of NVLink's fabric. ResetWhenIdle is not allowed.
	Fabric device.FaultAction `json:"fabric,omitempty"`
	// Memory is for faults of the GPU's memory.
	Memory device.FaultAction `json:"memory,omitempty"`
	// Reset is for faults that end with a reset of the GPU.
	Reset device.FaultAction `json:"reset,omitempty"`
	// Reboot is for faults that end with a reboot of the node. ResetWhenIdle is not allowed.
	Reboot device.FaultAction `json:"reboot,omitempty"`
	// Lost is for GPUs that do not answer. Ignore and ResetWhenIdle are not allowed.
	Lost device.FaultAction `json:"lost,omitempty"`
}

// faultActions are the actions of each class. A GPU that does not work cannot be offered, and only some faults end with a reset.
var faultActions = map[device.FaultClass][]device.FaultAction{
	device.FaultContained: {device.FaultIgnore, device.FaultNoSchedule, device.FaultNoExecute, device.FaultResetWhenIdle},
	device.FaultFabric:    {device.FaultIgnore, device.FaultNoSchedule, device.FaultNoExecute},
	device.FaultMemory:    {device.FaultIgnore, device.FaultNoSchedule, device.FaultNoExecute, device.FaultResetWhenIdle},
	device.FaultReset:     {device.FaultIgnore, device.FaultNoSchedule, device.FaultNoExecute, device.FaultResetWhenIdle},
	device.FaultReboot:    {device.FaultIgnore, device.FaultNoSchedule, device.FaultNoExecute},
	device.FaultLost:      {device.FaultNoSchedule, device.FaultNoExecute},
}

func (r HealthRule) of(class device.FaultClass) device.FaultAction {
	return map[device.FaultClass]device.FaultAction{
		device.FaultContained: r.Contained, device.FaultFabric: r.Fabric, device.FaultMemory: r.Memory,
		device.FaultReset: r.Reset, device.FaultReboot: r.Reboot, device.FaultLost: r.Lost,
	}[class]
}

func (r HealthRule) check(p *problems, at string) {
	if r == (HealthRule{}) {
		p.add(at, "has no effect: set contained, fabric, memory, reset, reboot, lost or several of them")
	}
	for _, class := range slices.Sorted(maps.Keys(faultActions)) { // the agent reports a file again when its mistakes read differently
		if action := r.of(class); action != "" {
			oneOf(p, at+"."+string(class), action, faultActions[class]...)
		}
	}
}

// HealthChecks are the XIDs that variables of NVIDIA's device plugin and of its DRA driver select.
type HealthChecks struct {
	// NoXIDs ignores all XIDs that Enabled does not name. Nothing also ignores every other fault of a GPU that works.
	NoXIDs, Nothing bool
	// Disabled XIDs are ignored beside those of applications. Enabled XIDs count although they are disabled as well; AllXIDs counts all.
	Disabled, Enabled []int
	AllXIDs           bool
}

// The environment variables of NVIDIA's device plugin (NVIDIA/k8s-device-plugin, internal/rm/health.go). "all" and "xids" disable all
// checks of XIDs, or enable all; a list adds to the XIDs that are ignored, or count. An XID that is both disabled and enabled counts.
// Other words are ignored. The last variable is that of NVIDIA's DRA driver (cmd/gpu-kubelet-plugin/main.go): a list of XIDs that are ignored.
const (
	disableHealthChecks = "DP_DISABLE_HEALTHCHECKS"
	enableHealthChecks  = "DP_ENABLE_HEALTHCHECKS"
	ignoredXIDs         = "ADDITIONAL_XIDS_TO_IGNORE"
)

func (c *Config) readHealthChecks(lookupEnv func(string) (string, bool)) {
	words := func(name string) []string {
		value, _ := lookupEnv(name)
		return split(strings.ToLower(value))
	}
	disabled, enabled := words(disableHealthChecks), words(enableHealthChecks)
	allXIDs := slices.Contains(enabled, "all") || slices.Contains(enabled, "xids")
	c.HealthChecks = HealthChecks{
		Nothing: slices.Contains(disabled, "all") && !allXIDs, NoXIDs: slices.Contains(disabled, "all") || slices.Contains(disabled, "xids"),
		Disabled: slices.Concat(numbers(disabled), numbers(words(ignoredXIDs))), Enabled: numbers(enabled), AllXIDs: allXIDs,
	}
}

func numbers(words []string) (all []int) {
	for _, word := range words {
		if n, err := strconv.ParseUint(word, 10, 31); err == nil && n > 0 {
			all = append(all, int(n))
		}
	}
	return all
}

// CountsXID reports whether an XID makes its device unhealthy, unless the action for its class is Ignore. It is pure.
func (c Config) CountsXID(xid int) bool {
	h := c.HealthChecks
	switch {
	case device.XIDClass(xid) == device.FaultNone:
		return false
	case h.AllXIDs || slices.Contains(h.Enabled, xid):
		return true
	case h.NoXIDs || slices.Contains(h.Disabled, xid):
		return false
	default:
		return device.XIDClass(xid) != device.FaultApplication
	}
}

// FaultAction returns what to do about a fault of a GPU. It is pure.
func (c Config) FaultAction(gpu device.GPU, fault device.Health) device.FaultAction {
	class := fault.Class()
	if fault.Reason == device.ReasonXID && !c.CountsXID(fault.XID) {
		return device.FaultIgnore
	}
	if class == device.FaultApplication {
		class = device.FaultContained // it counts because the environment says so
	}
	action := c.Health.of(class)
	for _, rule := range c.Devices {
		if rule.Health != nil && rule.Match.matches(gpu) {
			action = cmp.Or(rule.Health.of(class), action)
		}
	}
	switch {
	case action != "":
		return action
	case c.HealthChecks.Nothing && class != device.FaultLost && fault.Reason != device.ReasonXID:
		return device.FaultIgnore
	case fault.Reason == device.ReasonRowRemapPending:
		return device.FaultIgnore // the GPU works until its next reset
	default:
		return device.FaultNoSchedule
	}
}
