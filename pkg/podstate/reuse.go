// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/internal/podstatus"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// reusePatience is how long Reuses waits for the watch. kubelet admits no other pod meanwhile, but an error fails the pod for good.
const reusePatience = time.Second

// Reuses implements ledger.PodStates. It is safe for concurrent use.
func (p *Pods) Reuses(h ledger.Hold) (reuses bool) {
	ctx, cancel := context.WithTimeout(context.Background(), reusePatience)
	defer cancel()
	named := false
	decided := p.await(ctx, func() (decided bool) {
		reuses, decided, named = p.reusesNow(h)
		return decided
	})
	if settling := Unsettled(h); decided && !reuses && named {
		// The pods have ended within Settling. The hold ends with that, and an error would fail the next pod. The hold may not name its pod yet:
		// the reconciler does that a moment after kubelet has written its checkpoint.
		time.Sleep(settling)
		reuses, _ = p.ReusesNow(h)
	}
	return reuses
}

// ReusesNow is Reuses without waiting: decided is false where the watch has yet to report the pod or its end. kubelet gives a device again
// only to a later container of the pod, and only from an init container that is no sidecar (k8s.io/kubernetes
// pkg/kubelet/cm/devicemanager, devicesToReuse). It writes its checkpoint between the two calls. Simulations call it, too.
func (p *Pods) ReusesNow(h ledger.Hold) (reuses, decided bool) {
	reuses, decided, _ = p.reusesNow(h)
	return reuses, decided
}

// reusesNow is ReusesNow. named reports whether the hold or kubelet's checkpoint names a pod.
func (p *Pods) reusesNow(h ledger.Hold) (reuses, decided, named bool) {
	checkpoint, err := ReadDeviceCheckpoint(p.kubeletDir)
	if err != nil {
		return false, true, len(h.Pods) > 0
	}
	uids := map[string]bool{}
	for _, pod := range h.Pods {
		uids[pod.UID] = true
	}
	has := map[string][]PodDevice{}
	for _, d := range checkpoint.Devices {
		if d.Resource != h.Resource {
			continue
		}
		has[d.PodUID] = append(has[d.PodUID], d)
		if d.ID == h.Holder.ID && !p.Predates(checkpoint, h) {
			uids[d.PodUID] = true
		}
	}
	if len(uids) == 0 {
		// An earlier Allocate failed after the ledger had recorded it, or a later write of the checkpoint has overtaken the one that names
		// the pod.
		return Unsettled(h) == 0 || p.admits(h.Resource), true, false
	}
	decided = true
	for uid := range uids {
		pod, alive, ended := p.lifeOf(uid)
		if alive && asksAgain(pod, h, has[uid]) {
			return true, true, true
		}
		decided = decided && ended
	}
	return false, decided, true
}

// lifeOf returns a pod that the watch has reported, whether kubelet may admit it, and whether it has ended by the watch.
func (p *Pods) lifeOf(uid string) (pod *corev1.Pod, alive, ended bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	seen, known := p.pods[types.UID(uid)]
	if !known {
		return nil, false, false
	}
	ended = seen.deleted || podstatus.Ended(seen.Pod)
	return seen.Pod, !ended && seen.DeletionTimestamp == nil, ended
}

// admits reports whether kubelet may be admitting a pod with several containers that request the resource.
func (p *Pods) admits(resource string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pod := range p.pods {
		if !pod.deleted && pod.Status.StartTime == nil && !podstatus.Ended(pod.Pod) && len(askersOf(pod.Pod, resource)) > 1 {
			return true
		}
	}
	return false
}

// asksAgain reports whether kubelet has yet to allocate to a container of a trimmed pod, and may take the device of h for it. has is what
// the pod's containers have.
func asksAgain(pod *corev1.Pod, h ledger.Hold, has []PodDevice) bool {
	askers := askersOf(pod, h.Resource)
	served := map[string]bool{}
	for _, d := range has {
		served[d.Container] = true
		first := slices.ContainsFunc(askers, func(c corev1.Container) bool { return c.Name == d.Container && c.RestartPolicy == nil })
		if d.ID == h.Holder.ID && !first {
			return false
		}
	}
	return slices.ContainsFunc(askers, func(c corev1.Container) bool { return !served[c.Name] })
}

func askersOf(pod *corev1.Pod, resource string) []corev1.Container {
	return slices.DeleteFunc(slices.Clone(pod.Spec.InitContainers), func(c corev1.Container) bool {
		quantity := c.Resources.Limits[corev1.ResourceName(resource)]
		return quantity.IsZero()
	})
}

// keeps marks a container that leaves its devices to no other one.
var keeps = corev1.ContainerRestartPolicyAlways

// askers returns the containers of a pod that request extended resources, if they are several. Those that keep their devices have a
// restart policy. Only limits are set, so limitsOf does not count them. trimmed must be idempotent.
func askers(pod *corev1.Pod) (all []corev1.Container) {
	add := func(c corev1.Container, policy *corev1.ContainerRestartPolicy) {
		wanted := corev1.ResourceList{}
		for name, quantity := range c.Resources.Limits {
			if isExtended(name) && !quantity.IsZero() {
				wanted[name] = quantity
			}
		}
		if c.Name != "" && len(wanted) > 0 {
			all = append(all, corev1.Container{Name: c.Name, RestartPolicy: policy, Resources: corev1.ResourceRequirements{Limits: wanted}})
		}
	}
	for _, c := range pod.Spec.InitContainers {
		policy := c.RestartPolicy
		if policy != nil && *policy != keeps {
			policy = nil
		}
		add(c, policy)
	}
	for _, c := range pod.Spec.Containers {
		add(c, &keeps)
	}
	if len(all) < 2 {
		return nil
	}
	return all
}
