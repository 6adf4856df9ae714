// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"context"
	"reflect"
	"sync"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/kubernetes"
)

// Memory knows which pods and claims there have been, so that what outlives its objects (force-deleted pods above all) can
// still be told apart: a pod removed from the API server keeps the claims it had, and a claim keeps every device that was
// ever allocated to it. It is safe for concurrent use.
type Memory struct {
	mu      sync.Mutex
	objects objects
}

// NewMemory returns an empty memory.
func NewMemory() *Memory {
	return &Memory{objects: objects{pods: map[string]corev1.Pod{}, claims: map[string][]resourceapi.ResourceClaim{}}}
}

// Pod remembers a pod as it was seen. Idempotent.
func (m *Memory) Pod(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.objects.addPod(*pod)
}

// Claim remembers a claim as it was seen. Idempotent.
func (m *Memory) Claim(claim *resourceapi.ResourceClaim) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.objects.addClaim(*claim)
}

// Refresh remembers everything that the API server has now. What a suspicion needs to know existed before it arose: after a
// Refresh that began later it is known, unless it came and went unseen.
func (m *Memory) Refresh(ctx context.Context, client kubernetes.Interface) error {
	now, err := readObjects(ctx, client)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, pod := range now.pods {
		m.objects.addPod(pod)
	}
	for _, versions := range now.claims {
		for _, claim := range versions {
			m.objects.addClaim(claim)
		}
	}
	return nil
}

// Forget drops what is known of a namespace.
func (m *Memory) Forget(namespace string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for uid, pod := range m.objects.pods {
		if pod.Namespace == namespace {
			delete(m.objects.pods, uid)
		}
	}
	for name, versions := range m.objects.claims {
		if versions[0].Namespace == namespace {
			delete(m.objects.claims, name)
		}
	}
}

// Judgement on a suspicion.
type Judgement string

const (
	// Innocent holders may have the device at once, Guilty ones may not.
	Innocent Judgement = "innocent"
	Guilty   Judgement = "guilty"
	// Undecided means that only holders whose claims were not seen make the others guilty: a claim came and went while the API server
	// did not answer.
	Undecided Judgement = "undecided"
)

// Judge answers the device of a suspicion with its holders, and whether they may have it at once.
func (m *Memory) Judge(s Suspicion) (Double, Judgement) {
	m.mu.Lock()
	defer m.mu.Unlock()
	found := m.objects.explain(s.those)
	double := Double{Node: s.those[0].node, Number: s.Number}
	known := double
	for _, container := range found.Containers {
		for _, device := range container.Devices {
			if device.Holder == "" || device.Number != s.numberIn(container.ID) {
				continue
			}
			double.GPU, known.GPU = device.GPU, device.GPU
			share := device.Share
			if s.Number != s.other {
				// Two partitions of a GPU do not overlap.
				share = Share{}
			}
			double.add(container, device, share)
			if device.API != Unseen {
				known.add(container, device, share)
			}
		}
	}
	switch {
	case known.guilty():
		return double, Guilty
	case double.guilty():
		return double, Undecided
	}
	return double, Innocent
}

// addPod keeps what an earlier version told about claims: their names stay even where a status is written anew without them.
func (o objects) addPod(pod corev1.Pod) {
	if before, ok := o.pods[string(pod.UID)]; ok {
		if len(pod.Status.ResourceClaimStatuses) == 0 {
			pod.Status.ResourceClaimStatuses = before.Status.ResourceClaimStatuses
		}
		if pod.Status.ExtendedResourceClaimStatus == nil {
			pod.Status.ExtendedResourceClaimStatus = before.Status.ExtendedResourceClaimStatus
		}
	}
	o.pods[string(pod.UID)] = pod
	// kubelet knows a static pod by this and not by the UID of the object that mirrors it.
	if hash := pod.Annotations["kubernetes.io/config.hash"]; hash != "" {
		o.pods[hash] = pod
	}
}

// addClaim keeps one version of a claim for each allocation it has had.
func (o objects) addClaim(claim resourceapi.ResourceClaim) {
	name := claim.Namespace + "/" + claim.Name
	for i, version := range o.claims[name] {
		if version.UID == claim.UID && reflect.DeepEqual(version.Status.Allocation, claim.Status.Allocation) {
			o.claims[name][i] = claim
			return
		}
	}
	o.claims[name] = append(o.claims[name], claim)
}
