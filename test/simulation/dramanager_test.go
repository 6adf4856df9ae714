// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// lookForPlugin finds the driver's registration socket.
func (k *kubelet) lookForPlugin() {
	k.after(k.process, k.between(0, 300*time.Millisecond), "looks for plugins", func() {
		var found server
		switch a := k.agent; {
		case k.installed():
			found = k.foreign
		case a != nil && a.serving && !a.process.over:
			found = a
		}
		if found == nil || k.plugin == found {
			return
		}
		k.plugin = found
		k.after(found.life(), k.latency(), "is registered by kubelet", found.refresh)
	})
}

// loseDevicePlugin notices that the driver's socket no longer answers. kubelet removes the slices of a driver that stays away.
func (k *kubelet) loseDevicePlugin() {
	k.after(k.process, k.latency(), "loses the driver", func() {
		if k.plugin == nil || !k.plugin.life().over {
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
	k.note("    " + w.uid + " is not prepared: " + strings.ReplaceAll(err.Error(), k.host.dir, ""))
	if w.phase == starting {
		k.hit(prepareRetried)
		k.syncSoon(w, k.between(60*time.Second, 90*time.Second))
	}
}

// prepare follows prepareResources of kubelet's DRA manager. Claims that another pod has had prepared are not prepared again; all
// others are in one call.
func (k *kubelet) prepare(w *worker) {
	if err := k.mayPrepare(w); err != nil {
		k.prepareRetry(w, err)
		return
	}
	batch, err := k.attach(w)
	if err != nil {
		k.prepareRetry(w, err)
		return
	}
	if len(batch) == 0 {
		k.run(w, k.grants(w))
		return
	}
	if len(batch) < len(w.pod.claims) {
		k.hit(someClaimsPrepared)
	}
	w.preparing = true
	a := k.plugin
	var answer map[string][]kubeletplugin.Device
	k.call(a, "prepare "+names(batch)+" for "+w.uid, 45*time.Second, func(ctx context.Context) (err error) {
		answer, err = a.prepare(ctx, batch)
		return err
	}, func(err error) {
		w.preparing = false
		if err == nil {
			err = k.prepared(w, batch, answer)
		}
		if err != nil {
			k.prepareRetry(w, err)
			return
		}
		if len(batch) > 1 {
			k.hit(severalPrepared)
		}
		k.run(w, k.grants(w))
	})
}

// mayPrepare is what kubelet checks before it notes anything.
func (k *kubelet) mayPrepare(w *worker) error {
	if k.api.down {
		k.hit(prepareWithoutAPI)
		return errAway
	}
	for _, name := range w.pod.claims {
		if wanted, ok := get[*claim](k.api, claimKey(name)); !ok || !slices.Contains(wanted.reservedFor, w.uid) {
			return fmt.Errorf("claim %s is not reserved for the pod", name)
		}
	}
	if k.plugin == nil || k.plugin.life().over {
		return errors.New("the driver is not registered")
	}
	return nil
}

// attach notes the pod at its claims, one after the other, and returns those that are to be prepared. At the first that cannot be
// noted it stops: those before stay noted.
func (k *kubelet) attach(w *worker) (batch []*claimInfo, err error) {
	for i, name := range w.pod.claims {
		wanted, _ := get[*claim](k.api, claimKey(name))
		info := k.claims[name]
		switch {
		case info != nil && info.uid != wanted.uid:
			return nil, errors.New("an old claim of the same name is still there")
		case info != nil && info.unpreparing && k.version >= 37:
			k.hit(attachDuringUnprepare)
			if i > 0 {
				k.hit(attachedInPart)
			}
			return nil, errors.New("the claim is being unprepared")
		case info == nil:
			info = &claimInfo{uid: wanted.uid, name: wanted.name, pods: map[string]bool{}}
			k.claims[info.name] = info
		}
		info.pods[w.uid] = true
		k.host.writeState(k.claims)
		switch {
		case !info.prepared:
			batch = append(batch, info)
		case info.unpreparing:
			k.hit(attachDuringUnprepare)
		}
	}
	return batch, nil
}

// prepared notes the driver's answer.
func (k *kubelet) prepared(w *worker, batch []*claimInfo, answer map[string][]kubeletplugin.Device) error {
	for _, info := range batch {
		now := k.claims[info.name]
		if now == nil {
			return errNotCached
		}
		now.devices = nil
		if k.version >= 37 {
			delete(k.host.cdi, info.uid) // earlier ones add to what they had
			delete(k.host.mixed, info.uid)
		}
		var answered []string
		for _, d := range answer[info.uid] {
			now.devices = append(now.devices, d.DeviceName)
			answered = append(answered, d.CDIDeviceIDs...)
		}
		if slices.ContainsFunc(k.host.cdi[info.uid], func(id string) bool { return !slices.Contains(answered, id) }) {
			k.host.mixed[info.uid] = true
		}
		for _, id := range answered {
			if !slices.Contains(k.host.cdi[info.uid], id) {
				k.host.cdi[info.uid] = append(k.host.cdi[info.uid], id)
			}
		}
	}
	for _, info := range batch {
		k.claims[info.name].prepared = true
	}
	k.host.writeState(k.claims)
	for _, name := range w.pod.claims {
		if k.claims[name] == nil {
			// It was prepared for another pod before, and a third has had it unprepared. kubelet finds out when it makes the containers.
			return errNotCached
		}
	}
	return nil
}

var errNotCached = errors.New("the claim is not in the cache any more")

// names of claims, for the trace.
func names(batch []*claimInfo) string {
	var all []string
	for _, info := range batch {
		all = append(all, info.name)
	}
	return strings.Join(all, ", ")
}

// unprepare follows unprepareResources: all claims that no other pod has are in one call. Kubelets before 1.37 do not look whether a
// claim is the pod's.
func (k *kubelet) unprepare(podUID string, claims []string, done func(error)) {
	var batch []*claimInfo
	for _, name := range claims {
		info := k.claims[name]
		switch {
		case info == nil, k.version >= 37 && !info.pods[podUID]:
		case len(info.pods) > 1:
			if info.pods[podUID] {
				k.hit(sharedClaimOutlives)
			}
			delete(info.pods, podUID)
		default:
			info.unpreparing = true
			batch = append(batch, info)
		}
	}
	switch {
	case len(batch) == 0:
		k.host.writeState(k.claims)
		done(nil)
		return
	case k.plugin == nil || k.plugin.life().over:
		done(errors.New("the driver is not registered"))
		return
	case len(batch) > 1:
		k.hit(severalUnprepared)
	}
	for _, info := range batch {
		for uid := range info.pods {
			if uid != podUID && k.host.busy(uid) {
				k.hit(unprepareInUse)
			}
		}
	}
	a := k.plugin
	k.call(a, "unprepare "+names(batch)+" for "+podUID, 45*time.Second, func(ctx context.Context) error {
		return a.unprepare(ctx, batch)
	}, func(err error) {
		if err != nil {
			done(err)
			return
		}
		for _, info := range batch {
			delete(k.claims, info.name)
			delete(k.host.cdi, info.uid)
			delete(k.host.mixed, info.uid)
		}
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
	inactive := map[string][]string{}
	for _, name := range sorted(k.claims) {
		for uid := range k.claims[name].pods {
			if !k.active(uid) {
				inactive[uid] = append(inactive[uid], name)
			}
		}
	}
	for _, uid := range sorted(inactive) {
		k.hit(unprepareByReconcileLoop)
		k.unprepare(uid, inactive[uid], func(error) {})
	}
}

// prepare is what the library's helper does around the driver: it gets all claims first. It returns devices by the UIDs of claims.
func (a *agent) prepare(ctx context.Context, batch []*claimInfo) (map[string][]kubeletplugin.Device, error) {
	var claims []*claim
	var objects []*resourceapi.ResourceClaim
	for _, info := range batch {
		turn(ctx, "gets the claim "+info.name)
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if a.api.down {
			return nil, errAway
		}
		c, ok := get[*claim](a.api, claimKey(info.name))
		if !ok || c.uid != info.uid || c.allocation == nil {
			return nil, fmt.Errorf("claim %s is gone or not allocated", info.name)
		}
		claims, objects = append(claims, c), append(objects, resourceClaim(c))
	}
	before := a.holders()
	results, err := a.driver.PrepareResourceClaims(ctx, objects)
	if err != nil {
		return nil, err
	}
	devices, after := map[string][]kubeletplugin.Device{}, a.holders()
	for _, c := range claims {
		result := results[types.UID(c.uid)]
		if a.sawPrepare(c, result.Err); result.Err != nil {
			err = errors.Join(err, result.Err)
		}
		if len(result.Devices) > 0 {
			devices[c.uid] = result.Devices
		}
	}
	for _, c := range claims {
		// A claim of several pods may be prepared for another one, and one that waits for its own daemon keeps what it holds.
		if err != nil && ctx.Err() == nil && c.pod != "" && !c.ownDaemon && (len(devices[c.uid]) > 0 || after[c.uid] && !before[c.uid]) {
			a.fail("claim %s has %v after a refused call: %v", c.uid, c.devices(), err)
		}
	}
	return devices, err
}

// holders are the claims that hold devices and are not about to end, by UID.
func (a *agent) holders() map[string]bool {
	holders := map[string]bool{}
	for _, h := range a.book.Holds() {
		holders[h.Holder.ID] = holders[h.Holder.ID] || h.State != ledger.StateDraining
	}
	return holders
}

func (a *agent) unprepare(ctx context.Context, batch []*claimInfo) error {
	var objects []kubeletplugin.NamespacedObject
	for _, info := range batch {
		object := kubeletplugin.NamespacedObject{UID: types.UID(info.uid)}
		object.Namespace, object.Name = namespace, info.name
		objects = append(objects, object)
	}
	results, err := a.driver.UnprepareResourceClaims(ctx, objects)
	for _, info := range batch {
		err = errors.Join(err, results[types.UID(info.uid)])
	}
	return err
}
