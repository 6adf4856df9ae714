// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"iter"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/test/nodriver"
)

// hardware is the driver of the node's GPUs. None of them is reset.
type hardware struct {
	nodriver.Hardware
	*host
	world *simulation
}

// Inventory has the world's GPUs with their faults. The agent decides whether a fault makes a GPU unhealthy.
func (h hardware) Inventory() device.Inventory {
	h.driver.Lock()
	defer h.driver.Unlock()
	inventory := h.world.inventory
	inventory.GPUs = slices.Clone(inventory.GPUs)
	for i := range inventory.GPUs {
		gpu := &inventory.GPUs[i]
		gpu.MIGEnabled, gpu.Partitions = h.mig.enabled[gpu.UUID], h.mig.on(gpu.UUID)
		if h.unhealthy[gpu.UUID] {
			gpu.Faults = []device.Health{{Reason: device.ReasonRowRemapFailure, Message: "a row could not be remapped"}}
		}
	}
	return inventory
}

func (h hardware) Changed() <-chan struct{} { return h.faultsChanged.Changed() }

// Settings are those that a holder can change.
func (h hardware) Settings(_ context.Context, gpu string) (device.Settings, error) {
	mode := h.mode(gpu)
	h.driver.Lock()
	defer h.driver.Unlock()
	return device.Settings{ComputeMode: mode, GraphicsClock: h.clocks[gpu].mhz}, nil
}

func (h hardware) RestoreSettings(_ context.Context, gpu string, wanted device.Settings) error {
	h.driver.Lock()
	defer h.driver.Unlock()
	if wanted.ComputeMode != "" {
		h.modes[gpu] = wanted.ComputeMode
	}
	h.clocks[gpu] = clock{mhz: wanted.GraphicsClock}
	return nil
}

// setUnhealthy replaces the GPUs that have a fault.
func (h *host) setUnhealthy(gpus map[string]bool) {
	h.driver.Lock()
	h.unhealthy = gpus
	h.driver.Unlock()
	h.faultsChanged.Notify()
}

// withFault returns the GPUs that have a fault if one begins, or ends.
func (h *host) withFault(gpu string, begins bool) map[string]bool {
	gpus := maps.Clone(h.unhealthy)
	gpus[gpu] = begins
	return gpus
}

// gpuFails makes a GPU unhealthy for a while.
func (s *simulation) gpuFails() {
	gpu := gpuUUID(s.rand.IntN(s.host.gpus))
	s.hit(gpuFault)
	s.host.setUnhealthy(s.host.withFault(gpu, true))
	s.after(s.users, s.between(100*time.Millisecond, 30*time.Second), "repairs "+gpu, func() {
		s.host.setUnhealthy(s.host.withFault(gpu, false))
	})
}

// checkList: no list offers an unhealthy GPU to a pod.
func (a *agent) checkList(list *pluginapi.ListAndWatchResponse) {
	for _, d := range list.GetDevices() {
		if gpu := device.HardwareUUID(d.GetID()); a.host.unhealthy[gpu] && d.GetHealth() == pluginapi.Healthy {
			a.fail("unhealthy: the list for limits offers %s", d.GetID())
		}
	}
}

// checkOffer: no slice offers an unhealthy GPU to a claim.
func (a *agent) checkOffer(devices []resourceapi.Device) {
	for _, d := range devices {
		if a.host.unhealthy[uuidOf(device.GPUName(d.Name))] && len(d.Taints) == 0 {
			a.fail("unhealthy: the slice offers %s", d.Name)
		}
	}
}

// clock is what a holder has set a GPU's clock to.
type clock struct {
	mhz   uint32
	owner string
}

// checkSettings: a claim that starts with a GPU finds the settings that an administrator made, not those of the holder before.
func (h *host) checkSettings(uid string, g grant) {
	h.driver.Lock()
	defer h.driver.Unlock()
	for gpu := range wholeGPUs(g) {
		if left := h.clocks[gpu]; left.mhz != 0 && left.owner != g.owner && isClaim(g.owner) {
			h.fail("not handed over: %s in pod %s starts with the clock of %s that %s has set", g.owner, uid, gpu, left.owner)
		}
	}
}

// changeClocks sets the clocks of some GPUs of a pod that has started.
func (h *host) changeClocks(g grant) {
	h.driver.Lock()
	defer h.driver.Unlock()
	for gpu := range wholeGPUs(g) {
		if !h.foreign[g.owner] && h.chance(3) {
			h.clocks[gpu] = clock{1500, g.owner}
		}
	}
}

// wholeGPUs are those of a holder without an MPS daemon.
func wholeGPUs(g grant) iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, p := range g.parts {
			if amountOf(p).all && g.daemon == "" && !yield(uuidOf(gpuOf(p))) {
				return
			}
		}
	}
}
