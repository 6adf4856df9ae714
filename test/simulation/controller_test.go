// SPDX-License-Identifier: Apache-2.0

package simulation

import (
	"fmt"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/test/nodriver"
)

// gpuNode is the node's GPUNode.
type gpuNode struct {
	spec    []v1alpha1.AllocatedClaim
	trouble []v1alpha1.WaitingDaemon
	status  v1alpha1.GPUNodeStatus
}

// String is for the trace.
func (g *gpuNode) String() string {
	var daemons []string
	for _, d := range g.status.Daemons {
		daemons = append(daemons, d.Name)
	}
	return fmt.Sprintf("allocated %v, conflicts %v, daemons %v, unknown %v, waiting %v", g.spec, g.status.Conflicts, daemons, g.status.UnknownDaemons, g.trouble)
}

// controllerModel is one life of the controller: it decides by the product's functions, on what it has heard.
type controllerModel struct {
	*simulation
	process *process
	seen    *watch
	busy    map[string]bool
	// value is what it last saw allocatable, how many kubelet listed then, and since when.
	value, listed int
	since         time.Time
	retried       map[types.UID]*patience
}

type patience struct {
	next     time.Time
	interval time.Duration
	retries  int
}

func (s *simulation) startController() {
	d := &controllerModel{simulation: s, process: newProcess("controller"), busy: map[string]bool{}, retried: map[types.UID]*patience{}}
	s.controller = d
	d.seen = s.api.watch(d.process, "claim/ node/ gpunode/ pod/ daemonpod/", func(string, any, any) { d.lookSoon(0) }, func() { d.lookSoon(0) })
}

func (s *simulation) killController() {
	if s.controller == nil || s.controller.process.over {
		return
	}
	if s.daemonStarts() {
		s.hit(daemonsControllerDies)
	}
	s.kill(s.controller.process)
	// Another replica leads when the lease has run out.
	s.after(s.host.alive, s.between(time.Second, 15*time.Second), "starts the controller", func() {
		if s.controller.process.over {
			s.startController()
		}
	})
}

// once has one request of a kind under way at a time.
func (d *controllerModel) once(what string, do func()) {
	if d.busy[what] {
		return
	}
	d.busy[what] = true
	d.api.request(d.process, what, func() {
		delete(d.busy, what)
		do()
		d.lookSoon(0)
	})
}

func (d *controllerModel) lookSoon(delay time.Duration) {
	what := "look"
	if delay > 0 {
		what = "look again"
	}
	if d.busy[what] {
		return
	}
	d.busy[what] = true
	d.after(d.process, delay+d.between(0, 12*time.Millisecond), "decides", func() {
		delete(d.busy, what)
		object, ok := d.seen.cache["gpunode/"].(*gpuNode)
		if !ok {
			return
		}
		claims := d.relay(object)
		d.allocatable(object, claims)
		d.heal(object)
		d.retry(object, claims)
		d.runDaemons(object)
	})
}

func (d *controllerModel) relay(object *gpuNode) []v1alpha1.AllocatedClaim {
	var claims []resourceapi.ResourceClaim
	for _, k := range all[*claim](d.seen.cache) {
		claims = append(claims, *resourceClaim(k))
	}
	relayed := controller.Relay(claims, driverName, nodeName)
	if !reflect.DeepEqual(relayed, object.spec) {
		d.once("relays claims", func() {
			if now, ok := get[*gpuNode](d.api, "gpunode/"); ok && !reflect.DeepEqual(relayed, now.spec) {
				d.api.put("gpunode/", &gpuNode{spec: relayed, trouble: now.trouble, status: now.status})
			}
		})
	}
	return relayed
}

// runDaemons makes and deletes the pods of MPS daemons.
func (d *controllerModel) runDaemons(object *gpuNode) {
	node := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "gpunode"}, Status: object.status}
	config := controller.DaemonPods{
		Template:  &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "mps-daemon"}}}},
		Namespace: "tandem-system", RunDir: d.host.run(), KubeletDir: d.host.kubeletDir(), DriverRoots: []string{nodriver.Root},
	}
	plan := controller.PlanDaemons(node, all[*corev1.Pod](d.seen.cache), config, time.Now())
	for _, pod := range plan.Delete {
		d.once("deletes "+pod.Name, func() {
			if v := d.host.supervisors[pod.Name]; v != nil && v.pod.UID == pod.UID && v.holder != nil && !v.ending {
				d.host.checkNoClients(v.name(), "the controller deletes its pod")
			}
			d.deletePod(pod)
		})
	}
	for _, daemon := range plan.Create {
		pod, err := config.Pod(node, daemon)
		if err != nil {
			d.fail("the controller makes no pod for %v: %v", daemon, err)
			return
		}
		d.once("makes "+pod.Name, func() {
			if _, exists := get[*corev1.Pod](d.api, daemonPodKey(pod.Name)); !exists {
				pod.UID, pod.CreationTimestamp = types.UID(d.api.uid("daemon")), metav1.Now()
				d.api.put(daemonPodKey(pod.Name), pod)
			}
		})
	}
	if !reflect.DeepEqual(plan.Waiting, object.trouble) {
		d.once("reports on daemons", func() {
			if now, ok := get[*gpuNode](d.api, "gpunode/"); ok {
				d.api.put("gpunode/", &gpuNode{spec: now.spec, trouble: plan.Waiting, status: now.status})
			}
		})
	}
	if plan.Again > 0 {
		d.lookSoon(plan.Again)
	}
}

// settle is the controller's: how long a greater number has to hold good unless kubelet lists more itself.
const settle = 2 * time.Second

func (d *controllerModel) allocatable(object *gpuNode, claims []v1alpha1.AllocatedClaim) {
	node, ok := d.seen.cache["node/"].(*nodeObject)
	value, known := controller.Allocatable(object.status, claims, resourceName)
	if !ok || !known {
		return
	}
	want, current, listed := min(int(value), node.capacity), node.allocatable, 0
	for _, device := range object.status.Devices {
		if device.ExtendedResourceState == v1alpha1.ExtendedResourceAllocatable {
			listed++
			if device.Sharing != nil && device.Sharing.Replicas > 0 {
				listed += int(device.Sharing.Allocatable) - 1
			}
		}
	}
	now := time.Now()
	if d.since.IsZero() || d.value != current {
		d.value, d.listed, d.since = current, listed, now
	}
	before := d.listed
	d.listed = listed
	switch {
	case want == current:
	case want < current, listed > before, now.Sub(d.since) >= settle:
		d.once("patches allocatable", func() {
			if n, ok := get[*nodeObject](d.api, "node/"); ok && n.allocatable == current {
				if want < current {
					d.hit(allocatableLowered)
				}
				d.api.put("node/", &nodeObject{allocatable: want, capacity: n.capacity})
			}
		})
	default:
		d.lookSoon(settle - now.Sub(d.since))
	}
}

func (d *controllerModel) heal(object *gpuNode) {
	for _, conflict := range object.status.Conflicts {
		if !conflict.PendingEviction {
			continue
		}
		d.lookSoon(2 * time.Second)
		d.once("judges "+conflict.Name, func() { d.judge(conflict.Name) })
	}
}

// judge evicts the pods of a claim that is still pending eviction, unless they changed since they were read.
func (d *controllerModel) judge(name string) {
	object, ok := get[*gpuNode](d.api, "gpunode/")
	if !ok {
		return
	}
	agent := d.agentProcess()
	k, ok := get[*claim](d.api, claimKey(name))
	if !ok {
		return
	}
	judged := map[types.UID]*pod{}
	var pods []*corev1.Pod
	for _, uid := range k.reservedFor {
		if p, ok := get[*pod](d.api, podKey(uid)); ok {
			judged[types.UID(uid)] = p
			if object := podObject(p); object != nil {
				pods = append(pods, object)
			}
		}
	}
	for _, evicted := range controller.PlanEviction(object.status, resourceClaim(k), pods, driverName, nodeName).Evict {
		was := judged[evicted.UID]
		d.once("evicts "+was.uid, func() {
			if now, ok := get[*pod](d.api, podKey(was.uid)); !ok || now != was {
				d.hit(evictionOvertaken)
				return
			}
			d.hit(pendingEvicted)
			// A restarted agent no longer has the pending eviction.
			if was.owner == "" || d.host.busy(was.uid) && agent == d.agentProcess() {
				d.fail("pod %s of claim %s is evicted, owner %q, running %v", was.uid, k.name, was.owner, d.host.busy(was.uid))
			}
			d.cluster.remove(was.uid)
		})
	}
}

// retry changes an annotation of pods that kubelet could start now.
func (d *controllerModel) retry(object *gpuNode, claims []v1alpha1.AllocatedClaim) {
	now, before := time.Now(), d.retried
	d.retried = map[types.UID]*patience{}
	for _, n := range controller.Retries(object.status, claims, d.waiting()) {
		key := n.UID
		if n.Pod != "" {
			key = n.Pod
		}
		p := before[key]
		if p == nil {
			p = &patience{next: now.Add(n.WaitBudget), interval: 5 * time.Second}
		}
		d.retried[key] = p
		if n.Pod != "" && p.retries >= 5 {
			continue
		}
		if now.Before(p.next) {
			d.lookSoon(p.next.Sub(now))
			continue
		}
		p.next, p.interval, p.retries = now.Add(p.interval), min(2*p.interval, 80*time.Second), p.retries+1
		d.lookSoon(p.next.Sub(now))
		k, ok := d.seen.cache[claimKey(n.Name)].(*claim)
		if !ok || k.uid != string(n.UID) {
			continue
		}
		for _, uid := range k.reservedFor {
			if n.Pod != "" && n.Pod != types.UID(uid) {
				continue
			}
			d.once("retries "+uid, func() {
				p, ok := get[*pod](d.api, podKey(uid))
				if ok && p.bound && controller.Retryable(podObject(p), nodeName) && (n.Pod == "" || controller.Unstarted(podObject(p))) {
					d.hit(retried)
					if n.Pod != "" {
						d.hit(latecomerRetried)
					}
					d.api.updatePod(uid, func(p *pod) { p.retry = time.Now().Format(time.RFC3339Nano) })
				}
			})
		}
	}
}

// waiting are the Pending pods that it has heard of, by the UIDs of the claims that they have reserved.
func (d *controllerModel) waiting() map[types.UID][]types.UID {
	waiting := map[types.UID][]types.UID{}
	for _, k := range all[*claim](d.seen.cache) {
		for _, uid := range k.reservedFor {
			if p, ok := d.seen.cache[podKey(uid)].(*pod); ok && p.bound && p.phase == pending && !p.deleting {
				waiting[types.UID(k.uid)] = append(waiting[types.UID(k.uid)], types.UID(uid))
			}
		}
	}
	return waiting
}
