// SPDX-License-Identifier: Apache-2.0

package podstate

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// CheckCgroups returns why the cgroups of pods prove nothing: they cannot be read, or the agent's pod has none, or a pod that kubelet started
// since Run began has had none for a minute, because kubelet came back with --cgroups-per-qos=false. Then no pod counts as gone until
// CheckCgroups returns nil. The agent calls it every few seconds, from one goroutine.
func (p *Pods) CheckCgroups() error {
	roots, err := p.cgroups.podRoots()
	if err != nil {
		return err
	}
	uids, err := uidsBelow(roots)
	if err != nil {
		return err
	}
	p.cgroups.distrust(p.withoutCgroup(uids, time.Now()))
	_, err = p.cgroups.trustedRoots()
	return err
}

// withoutCgroup returns an error if a pod has run without a cgroup for reportDelay: its end may not be known yet before. Pods from before
// Run do not count: after a reboot, kubelet may not have started them again.
func (p *Pods) withoutCgroup(uids []string, now time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	missing := map[types.UID]time.Time{}
	var long []string
	for uid, pod := range p.pods {
		runs := !pod.deleted && pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning && len(pod.Status.ContainerStatuses) > 0
		if !runs || p.synced.IsZero() || pod.Status.StartTime == nil || !pod.Status.StartTime.After(p.synced) {
			continue
		}
		if _, found := slices.BinarySearch(uids, string(uid)); found {
			continue
		}
		missing[uid] = now
		if since, known := p.missing[uid]; known {
			missing[uid] = since
		}
		if now.Sub(missing[uid]) >= reportDelay {
			long = append(long, pod.Namespace+"/"+pod.Name)
		}
	}
	p.missing = missing
	if len(long) == 0 {
		return nil
	}
	return fmt.Errorf("pod %s runs without a cgroup, and so do %d more: %w", slices.Min(long), len(long)-1, ErrNoPodCgroups)
}
