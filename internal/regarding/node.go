// SPDX-License-Identifier: Apache-2.0

// Package regarding names the objects that events are about, and bounds the texts of events.
package regarding

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Node returns the reference for events on a node. Its UID is the node's name, as in kubelet's events: `kubectl describe node` shows
// the events with that UID as well as those with the node's own (kubectl, pkg/describe, NodeDescriber).
func Node(name string) *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: name, UID: types.UID(name)}
}
