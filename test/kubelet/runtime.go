// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Runtime runs containers of pods. Its methods are called concurrently for different pods.
type Runtime interface {
	// StartPod makes what the containers of a pod share, and returns the pod's IP; "" for that of the node.
	StartPod(ctx context.Context, pod *corev1.Pod) (ip string, err error)
	// Start starts a container. A nil Process is a container that runs until it is told to end, or an
	// init container that has succeeded.
	Start(ctx context.Context, pod *corev1.Pod, container corev1.Container, devices Devices) (Process, error)
	// StopPod removes what StartPod made, also where that failed. All containers have ended.
	StopPod(pod *corev1.Pod) error
}

// Devices are what kubelet has a container given.
type Devices struct {
	// CDI are the names of devices.
	CDI []string
	// Env are variables of device plugins.
	Env map[string]string
}

// Process is a container that runs.
type Process interface {
	// Wait returns when the container has ended.
	Wait() Exit
	// Stop asks it to end, and ends it by force after a while.
	Stop(grace time.Duration)
}

// Exit is how a container has ended.
type Exit struct {
	Code int
	// Message is the end of its log.
	Message string
}

// still runs nothing.
type still struct{}

func (still) StartPod(context.Context, *corev1.Pod) (string, error) { return "", nil }

func (still) Start(context.Context, *corev1.Pod, corev1.Container, Devices) (Process, error) {
	return nil, nil //nolint:nilnil // documented above
}
func (still) StopPod(*corev1.Pod) error { return nil }
