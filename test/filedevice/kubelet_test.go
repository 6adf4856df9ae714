// SPDX-License-Identifier: Apache-2.0

package filedevice

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/test/kubelet"
)

// caller calls an agent as kubelet does, one call at a time.
type caller struct {
	*kubelet.Kubelet
	t *testing.T
}

// startKubelet listens in kubelet's directory until the test ends.
func startKubelet(t *testing.T, dir string) caller {
	t.Helper()
	k, err := kubelet.Start(t.Context(), kubelet.Options{Dir: dir})
	check(t, err)
	t.Cleanup(func() {
		k.Stop()
		for _, failure := range k.Failures() {
			t.Error(failure)
		}
	})
	return caller{k, t}
}

// list returns the last device list.
func (k caller) list() []*pluginapi.Device {
	plugin, _ := k.DevicePlugin(resourceName)
	return plugin.Devices
}

// listed describes the last device list: the ID of each healthy device, and "!ID" of each other one.
func (k caller) listed() string {
	var ids []string
	for _, d := range k.list() {
		if d.GetHealth() == pluginapi.Healthy {
			ids = append(ids, d.GetID())
		} else {
			ids = append(ids, "!"+d.GetID())
		}
	}
	return strings.Join(ids, " ")
}

// registered reports whether kubelet has registered the driver and the device plugin.
func (k caller) registered() error {
	_, driver := k.Driver(driverName)
	if _, plugin := k.DevicePlugin(resourceName); !driver || !plugin {
		return fmt.Errorf("the driver is registered: %t, the device plugin: %t", driver, plugin)
	}
	return nil
}

// callTimeout is kubelet's for both calls of a DRA driver.
const callTimeout = 45 * time.Second

// prepare prepares a claim for a starting pod, and returns the CDI names of its devices.
func (k caller) prepare(claim *resourceapi.ResourceClaim) ([]string, error) {
	ctx, cancel := context.WithTimeout(k.t.Context(), callTimeout)
	defer cancel()
	driver, ok := k.Driver(driverName)
	if !ok {
		return nil, fmt.Errorf("driver %s is not registered", driverName)
	}
	answer, err := driver.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claimsOf(claim)})
	if err != nil {
		return nil, err
	}
	prepared, answered := answer.GetClaims()[string(claim.UID)]
	if !answered || prepared.GetError() != "" {
		return nil, fmt.Errorf("claim %s is answered: %t: %s", claim.Name, answered, prepared.GetError())
	}
	var names []string
	for _, d := range prepared.GetDevices() {
		names = append(names, d.GetCdiDeviceIds()...)
	}
	return names, nil
}

// unprepare unprepares a claim whose pods have ended.
func (k caller) unprepare(claim *resourceapi.ResourceClaim) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), callTimeout)
	defer cancel()
	driver, ok := k.Driver(driverName)
	if !ok {
		k.t.Fatalf("driver %s is not registered", driverName)
	}
	answer, err := driver.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: claimsOf(claim)})
	check(k.t, err)
	if unprepared, answered := answer.GetClaims()[string(claim.UID)]; !answered || unprepared.GetError() != "" {
		k.t.Fatalf("unprepare claim %s: answered %t: %s", claim.Name, answered, unprepared.GetError())
	}
}

func claimsOf(claim *resourceapi.ResourceClaim) []*drapb.Claim {
	return []*drapb.Claim{{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}}
}

// allocate allocates a device to a container with a limit, and returns its CDI names.
func (k caller) allocate(id string) ([]string, error) {
	plugin, ok := k.DevicePlugin(resourceName)
	if !ok {
		return nil, fmt.Errorf("no device plugin of %s is registered", resourceName)
	}
	answer, err := plugin.Allocate(k.t.Context(), &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}},
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, container := range answer.GetContainerResponses() {
		for _, d := range container.GetCdiDevices() {
			names = append(names, d.GetName())
		}
	}
	return names, nil
}
