// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// lookForPlugin finds the driver's registration socket.
func (k *kubelet) lookForPlugin() {
	k.after(k.process, k.between(0, 300*time.Millisecond), "looks for plugins", func() {
		a := k.agent
		if a == nil || !a.serving || a.process.over || k.plugin == a {
			return
		}
		k.plugin = a
		k.after(a.process, k.latency(), "is registered by kubelet", a.refresh)
	})
}

// loseDevicePlugin notices that the driver's socket no longer answers. kubelet removes the slices of a driver that stays away.
func (k *kubelet) loseDevicePlugin() {
	k.after(k.process, k.latency(), "loses the driver", func() {
		if k.plugin == nil || !k.plugin.process.over {
			return
		}
		k.plugin = nil
		k.after(k.process, 30*time.Second, "wipes the slices of a driver that stays away", func() {
			if k.plugin == nil && !k.api.down {
				k.api.put("slice/", nil)
			}
		})
	})
}

// prepareRetry is how long kubelet waits before it looks at a pod again whose claim could not be prepared.
func (k *kubelet) prepareRetry(w *worker, err error) {
	w.preparing = false
	k.note("    " + w.uid + " is not prepared: " + err.Error())
	if w.phase == starting {
		k.hit(prepareRetried)
		k.syncSoon(w, k.between(60*time.Second, 90*time.Second))
	}
}

// prepare follows prepareResources of kubelet's DRA manager.
func (k *kubelet) prepare(w *worker) {
	if k.api.down {
		k.hit(prepareWithoutAPI)
		k.prepareRetry(w, errAway)
		return
	}
	wanted, ok := get[*claim](k.api, claimKey(w.pod.claim))
	info := k.claims[w.pod.claim]
	switch {
	case !ok || !slices.Contains(wanted.reservedFor, w.uid):
		k.prepareRetry(w, errors.New("the claim is not reserved for the pod"))
		return
	case k.plugin == nil || k.plugin.process.over:
		k.prepareRetry(w, errors.New("the driver is not registered"))
		return
	case info != nil && info.uid != wanted.uid:
		k.prepareRetry(w, errors.New("an old claim of the same name is still there"))
		return
	case info != nil && info.unpreparing && k.version >= 37:
		k.hit(attachDuringUnprepare)
		k.prepareRetry(w, errors.New("the claim is being unprepared"))
		return
	}
	if info == nil {
		info = &claimInfo{uid: wanted.uid, name: wanted.name, pods: map[string]bool{}}
		k.claims[info.name] = info
	}
	info.pods[w.uid] = true
	k.host.writeState(k.claims)
	if info.prepared {
		if info.unpreparing {
			k.hit(attachDuringUnprepare)
		}
		k.run(w, info.uid, k.partsOf(info.uid, info.devices))
		return
	}
	w.preparing = true
	a := k.plugin
	var devices []string
	k.call(a, "prepare "+info.name+" for "+w.uid, 45*time.Second, func(ctx context.Context) (err error) {
		devices, err = a.prepare(ctx, info.name, info.uid)
		return err
	}, func(err error) {
		w.preparing = false
		if err == nil && k.claims[info.name] == nil {
			err = errors.New("the claim is not in the cache any more")
		}
		if err != nil {
			k.prepareRetry(w, err)
			return
		}
		now := k.claims[info.name]
		now.devices, now.prepared = devices, true
		k.host.writeState(k.claims)
		k.run(w, info.uid, k.partsOf(info.uid, devices))
	})
}

// unprepare follows unprepareResources. Kubelets before 1.37 do not look whether the claim is the pod's.
func (k *kubelet) unprepare(podUID string, names []string, done func(error)) {
	if len(names) == 0 {
		done(nil)
		return
	}
	name := names[0]
	info := k.claims[name]
	switch {
	case info == nil, k.version >= 37 && !info.pods[podUID]:
		done(nil)
		return
	case len(info.pods) > 1:
		if info.pods[podUID] {
			k.hit(sharedClaimOutlives)
		}
		delete(info.pods, podUID)
		k.host.writeState(k.claims)
		done(nil)
		return
	case k.plugin == nil || k.plugin.process.over:
		done(errors.New("the driver is not registered"))
		return
	}
	for uid := range info.pods {
		if uid != podUID && k.host.busy(uid) {
			k.hit(unprepareInUse)
		}
	}
	info.unpreparing = true
	a := k.plugin
	k.call(a, "unprepare "+name+" for "+podUID, 45*time.Second, func(ctx context.Context) error {
		return a.unprepare(ctx, name, info.uid)
	}, func(err error) {
		if err != nil {
			done(err)
			return
		}
		delete(k.claims, name)
		k.host.writeState(k.claims)
		done(nil)
	})
}

// reconcile unprepares once a minute what pods have that are not active any more.
func (k *kubelet) reconcile() {
	k.after(k.process, 60*time.Second, "reconciles claims", k.reconcile)
	if !k.sourcesReady {
		return
	}
	for _, name := range sorted(k.claims) {
		for _, uid := range sorted(k.claims[name].pods) {
			if !k.active(uid) && k.claims[name] != nil {
				k.hit(unprepareByReconcileLoop)
				k.unprepare(uid, []string{name}, func(error) {})
			}
		}
	}
}

// prepare is what the library's helper does around the driver: it gets the claim first.
func (a *agent) prepare(ctx context.Context, name, uid string) ([]string, error) {
	turn(ctx, "gets the claim")
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if a.api.down {
		return nil, errAway
	}
	c, ok := get[*claim](a.api, claimKey(name))
	if !ok || c.uid != uid || c.allocation == nil {
		return nil, fmt.Errorf("claim %s is gone or not allocated", name)
	}
	object := resourceClaim(c)
	results, err := a.driver.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{object})
	if err != nil {
		return nil, err
	}
	result := results[object.UID]
	a.sawPrepare(c, result.Err)
	if result.Err != nil {
		return nil, result.Err
	}
	var devices []string
	for _, d := range result.Devices {
		devices = append(devices, d.DeviceName)
	}
	return devices, nil
}

func (a *agent) unprepare(ctx context.Context, name, uid string) error {
	object := kubeletplugin.NamespacedObject{UID: types.UID(uid)}
	object.Namespace, object.Name = namespace, name
	results, err := a.driver.UnprepareResourceClaims(ctx, []kubeletplugin.NamespacedObject{object})
	if err != nil {
		return err
	}
	return results[types.UID(uid)]
}
