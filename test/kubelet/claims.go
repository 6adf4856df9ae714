// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// claim is what kubelet knows of a claim of one of its pods.
type claim struct {
	uid             types.UID
	namespace, name string
	pods            map[types.UID]bool
	// devices by driver; a driver is missing until it has prepared the claim.
	devices map[string][]*drapb.Device
}

// callTimeout is kubelet's for both calls of a DRA driver.
const callTimeout = 45 * time.Second

// claimNames are the claims of a pod by the names that its containers use.
func claimNames(pod *corev1.Pod) (map[string]string, error) {
	names := map[string]string{}
	for i := range pod.Spec.ResourceClaims {
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return nil, err
		}
		if name != nil {
			names[pod.Spec.ResourceClaims[i].Name] = *name
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names[""] = extended.ResourceClaimName
	}
	return names, nil
}

// prepare has the drivers prepare the pod's claims that are not prepared yet, in one call for each driver.
func (k *Kubelet) prepare(ctx context.Context, pod *corev1.Pod) error {
	names, err := claimNames(pod)
	if err != nil || len(names) == 0 {
		return err
	}
	var objects []*resourceapi.ResourceClaim
	for _, key := range slices.Sorted(maps.Keys(names)) {
		object, err := k.Client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, names[key], metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("fetch ResourceClaim %s referenced by pod %s: %w", names[key], pod.Name, err)
		}
		if !resourceclaim.IsReservedForPod(pod, object, true) {
			return fmt.Errorf("pod %s(%s) is not allowed to use ResourceClaim %s(%s)", pod.Name, pod.UID, object.Name, object.UID)
		}
		objects = append(objects, object)
	}
	slices.SortFunc(objects, func(a, b *resourceapi.ResourceClaim) int { return strings.Compare(string(a.UID), string(b.UID)) })
	byDriver := map[string][]*drapb.Claim{}
	for _, object := range objects {
		unlock, err := k.claimLock.Lock(ctx, object.UID)
		if err != nil {
			return err
		}
		defer unlock()
		k.mu.Lock()
		c := k.claims[object.UID]
		if c == nil {
			c = &claim{uid: object.UID, namespace: object.Namespace, name: object.Name, pods: map[types.UID]bool{}, devices: map[string][]*drapb.Device{}}
			k.claims[object.UID] = c
		}
		c.pods[pod.UID] = true
		if object.Status.Allocation != nil {
			for _, result := range object.Status.Allocation.Devices.Results {
				_, prepared := c.devices[result.Driver]
				asked := slices.ContainsFunc(byDriver[result.Driver], func(other *drapb.Claim) bool { return other.GetUid() == string(c.uid) })
				if !prepared && !asked {
					byDriver[result.Driver] = append(byDriver[result.Driver], &drapb.Claim{Namespace: c.namespace, Name: c.name, Uid: string(c.uid)})
				}
			}
		}
		k.mu.Unlock()
	}
	if err := k.saveClaims(func() {}); err != nil {
		return err
	}
	for name, claims := range byDriver {
		if err := k.prepareBy(ctx, name, claims); err != nil {
			return err
		}
	}
	return nil
}

func (k *Kubelet) prepareBy(ctx context.Context, name string, claims []*drapb.Claim) error {
	driver, ok := k.Driver(name)
	if !ok {
		return fmt.Errorf("DRA driver %s is not registered", name)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := driver.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return fmt.Errorf("NodePrepareResources: %w", err)
	}
	return k.saveClaims(func() {
		for _, asked := range claims {
			result, answered := answer.GetClaims()[asked.GetUid()]
			if !answered || result.GetError() != "" {
				err = errors.Join(err, fmt.Errorf("NodePrepareResources failed for ResourceClaim %s: %s", asked.GetName(), result.GetError()))
				continue
			}
			k.claims[types.UID(asked.GetUid())].devices[name] = result.GetDevices()
		}
	}, &err)
}

// unprepare ends what prepare began, for claims that no other pod has.
func (k *Kubelet) unprepare(ctx context.Context, pod types.UID) error {
	k.mu.Lock()
	var last []*claim
	for _, c := range k.claims {
		if c.pods[pod] {
			last = append(last, c)
		}
	}
	k.mu.Unlock()
	slices.SortFunc(last, func(a, b *claim) int { return strings.Compare(string(a.uid), string(b.uid)) })
	for _, c := range last {
		unlock, err := k.claimLock.Lock(ctx, c.uid)
		if err != nil {
			return err
		}
		err = k.leave(ctx, c, pod)
		unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *Kubelet) leave(ctx context.Context, c *claim, pod types.UID) error {
	k.mu.Lock()
	shared, drivers := len(c.pods) > 1, slices.Sorted(maps.Keys(c.devices))
	k.mu.Unlock()
	if shared {
		return k.saveClaims(func() { delete(c.pods, pod) })
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for _, name := range drivers {
		driver, ok := k.Driver(name)
		if !ok {
			return fmt.Errorf("DRA driver %s is not registered", name)
		}
		answer, err := driver.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{
			Claims: []*drapb.Claim{{Namespace: c.namespace, Name: c.name, Uid: string(c.uid)}},
		})
		if err != nil {
			return fmt.Errorf("NodeUnprepareResources: %w", err)
		}
		if result, answered := answer.GetClaims()[string(c.uid)]; !answered || result.GetError() != "" {
			return fmt.Errorf("NodeUnprepareResources failed for ResourceClaim %s: %s", c.name, result.GetError())
		}
	}
	return k.saveClaims(func() { delete(k.claims, c.uid) })
}

// ClaimDevice is a device that a container has by a claim.
type ClaimDevice struct {
	Claim types.UID
	Name  string
	// Reference is how the container names it: the name in its pod, with the request if it asks for one.
	Reference            string
	Driver, Pool, Device string
	CDI                  []string
}

// claimDevices are the devices that a container of a pod has by claims.
func (k *Kubelet) claimDevices(pod *corev1.Pod, container corev1.Container) (devices []ClaimDevice) {
	names, err := claimNames(pod)
	if err != nil {
		return nil
	}
	wanted := slices.Clone(container.Resources.Claims)
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		for _, m := range extended.RequestMappings {
			if m.ContainerName == container.Name {
				wanted = append(wanted, corev1.ResourceClaim{Request: m.RequestName})
			}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.claims {
		for _, want := range wanted {
			if !c.pods[pod.UID] || names[want.Name] != c.name {
				continue
			}
			for _, name := range slices.Sorted(maps.Keys(c.devices)) {
				for _, d := range c.devices[name] {
					if want.Request != "" && !slices.ContainsFunc(d.GetRequestNames(), func(r string) bool { return resourceclaim.BaseRequestRef(r) == want.Request }) {
						continue
					}
					reference := cmp.Or(want.Name, c.name)
					if want.Request != "" {
						reference += "/" + want.Request
					}
					devices = append(devices, ClaimDevice{c.uid, c.name, reference, name, d.GetPoolName(), d.GetDeviceName(), d.GetCdiDeviceIds()})
				}
			}
		}
	}
	return devices
}

// saveClaims changes what kubelet knows of claims and writes its checkpoint, dra_manager_state. It returns the first error: one of earlier,
// which change may set, or its own.
func (k *Kubelet) saveClaims(change func(), earlier ...*error) (err error) {
	type deviceState struct {
		PoolName, DeviceName string
		RequestNames         []string
		CDIDeviceIDs         []string
	}
	type driverState struct{ Devices []deviceState }
	type claimState struct {
		ClaimUID             types.UID
		ClaimName, Namespace string
		PodUIDs              map[types.UID]struct{}
		DriverState          map[string]driverState
	}
	k.change(func() {
		change()
		var list struct{ ClaimInfoStateList []claimState }
		for _, c := range k.claims {
			state := claimState{c.uid, c.name, c.namespace, map[types.UID]struct{}{}, map[string]driverState{}}
			for uid := range c.pods {
				state.PodUIDs[uid] = struct{}{}
			}
			for name, devices := range c.devices {
				var all driverState
				for _, d := range devices {
					all.Devices = append(all.Devices, deviceState{d.GetPoolName(), d.GetDeviceName(), d.GetRequestNames(), d.GetCdiDeviceIds()})
				}
				state.DriverState[name] = all
			}
			list.ClaimInfoStateList = append(list.ClaimInfoStateList, state)
		}
		data, encodeErr := json.Marshal(list)
		if err = encodeErr; err == nil {
			err = replace(filepath.Join(k.Dir, "dra_manager_state"), map[string]any{"data": string(data), "checksum": crc32.ChecksumIEEE(data)})
		}
	})
	for _, e := range earlier {
		if *e != nil {
			return *e
		}
	}
	return err
}
