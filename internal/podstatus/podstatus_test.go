// SPDX-License-Identifier: Apache-2.0

package podstatus

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestEnded(t *testing.T) {
	for phase, want := range map[corev1.PodPhase]bool{
		"": false, corev1.PodPending: false, corev1.PodRunning: false, corev1.PodUnknown: false, corev1.PodSucceeded: true, corev1.PodFailed: true,
	} {
		if got := Ended(&corev1.Pod{Status: corev1.PodStatus{Phase: phase}}); got != want {
			t.Errorf("phase %q: %t", phase, got)
		}
	}
}

func TestReady(t *testing.T) {
	for name, c := range map[string]struct {
		conditions []corev1.PodCondition
		want       bool
	}{
		"no condition":      {},
		"not ready":         {conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}},
		"unknown":           {conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionUnknown}}},
		"another condition": {conditions: []corev1.PodCondition{{Type: corev1.ContainersReady, Status: corev1.ConditionTrue}}},
		"ready":             {[]corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionTrue}}, true},
	} {
		if got := Ready(&corev1.Pod{Status: corev1.PodStatus{Conditions: c.conditions}}); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
