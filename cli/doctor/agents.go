// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/tandem-gpu/tandem/cli/explain"
	"github.com/tandem-gpu/tandem/pkg/availability"
)

func (e *examination) agents() {
	if e.read(KindDaemonSets) && len(e.DaemonSets) == 0 && !slices.Contains(e.NoBinding, KindDaemonSets) {
		e.add(Error, "cluster", pageInstall, "run helm upgrade --install", "there is no DaemonSet of the agents, so that no agent runs")
	}
	for _, d := range e.DaemonSets {
		object, s := name("daemonset", d.Namespace, d.Name), d.Status
		switch {
		case s.ObservedGeneration < d.Generation:
		case s.DesiredNumberScheduled == 0:
			e.add(Error, object, pageInstall, "compare its nodeSelector, affinity and tolerations with the labels and taints of the nodes with GPUs",
				"it selects no node, so that no agent runs")
		case s.CurrentNumberScheduled < s.DesiredNumberScheduled:
			e.add(Error, object, pageInstallation, "read its events: kubectl describe daemonset -n "+d.Namespace+" "+d.Name,
				"it has %d of %d pods", s.CurrentNumberScheduled, s.DesiredNumberScheduled)
		}
	}
	for _, pod := range e.Agents {
		ready, since := readiness(&pod)
		ends := pod.DeletionTimestamp
		if !ready || ends != nil {
			e.starting[pod.Spec.NodeName] = true
		}
		if ends != nil && e.Now.Sub(ends.Time) >= rollout {
			// The grace period is over: kubelet does not answer, or a process hangs.
			e.add(Error, "node "+pod.Spec.NodeName, pageInstallation,
				"see whether the node is ready, and what its kubelet logs of pod "+pod.Name+"; if the machine is gone, delete the Node",
				"its agent should have ended at %s and has not, so that no other can start there", ends.UTC().Format(time.RFC3339))
		}
		if ready || ends != nil {
			continue
		}
		w := e.waitsFor(&pod)
		severity := Error
		if !w.failed && e.Now.Sub(since) < rollout {
			severity = Warning
		}
		if why := e.saysItself(pod.Spec.NodeName); why != "" && !w.failed {
			w.why = why
		} else if event, found := e.lastEvent(pod.Spec.NodeName, time.Time{}, anyType...); found && !w.failed {
			w.why = said(event)
		}
		e.add(severity, "node "+pod.Spec.NodeName, pageInstallation, w.action(&pod),
			"its agent has not been ready since %s: %s", since.UTC().Format(time.RFC3339), cmp.Or(w.why, "no reason is known"))
	}
}

// readyFor returns for how long the agent of a node has been ready; zero if it is not.
func (e *examination) readyFor(node string) time.Duration {
	for i := range e.Agents {
		if ready, since := readiness(&e.Agents[i]); e.Agents[i].Spec.NodeName == node && ready {
			return e.Now.Sub(since)
		}
	}
	return 0
}

// saysItself returns the reason that the agent of a node has written into its GPUNode; empty if it has written none, or does not run.
func (e *examination) saysItself(node string) string {
	for _, n := range e.GPUNodes {
		if w := n.Status.Waiting; n.Name == node && w != availability.Stopped && !strings.Contains(w, availability.Silent) {
			return explain.OneLine(w)
		}
	}
	return ""
}

// readiness returns whether a pod is ready, and since when it is as it is.
func readiness(pod *corev1.Pod) (ready bool, since time.Time) {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue, c.LastTransitionTime.Time
		}
	}
	return false, pod.CreationTimestamp.Time
}

// wait is what a pod waits for.
type wait struct {
	why string
	// failed is set if a container has ended with an error, which waiting does not mend. container is the one to look at; empty for the pod.
	failed    bool
	container string
	// before is set if the log is that of the container's last run.
	before bool
}

// waitsFor returns what the first container that is not ready waits for, or the scheduler. A container behind an init container waits for that.
func (e *examination) waitsFor(pod *corev1.Pod) wait {
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		of := wait{container: c.Name}
		for _, ended := range []*corev1.ContainerStateTerminated{c.LastTerminationState.Terminated, c.State.Terminated} {
			running := c.State.Running
			lately := running == nil || e.Now.Sub(running.StartedAt.Time) < rollout
			if ended != nil && ended.ExitCode != 0 && !c.Ready && lately {
				of.failed, of.before = true, c.State.Terminated == nil
				of.why = fmt.Sprintf("container %s has ended with exit code %d (%s), %s", c.Name, ended.ExitCode, ended.Reason, explain.Number(int(c.RestartCount), "restart"))
			}
		}
		switch w := c.State.Waiting; {
		case of.failed:
			return of
		case w != nil && w.Reason != "PodInitializing":
			of.why = strings.TrimSuffix(fmt.Sprintf("container %s is waiting: %s: %s", c.Name, w.Reason, w.Message), ": ")
			of.container = "" // it has no log
			return of
		}
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			return wait{why: c.Message}
		}
	}
	of := wait{}
	if len(pod.Spec.Containers) > 0 {
		of.container = pod.Spec.Containers[0].Name // the agent
	}
	return of
}

// action returns how to see more of what a pod waits for.
func (w wait) action(pod *corev1.Pod) string {
	of := " -n " + pod.Namespace + " " + pod.Name
	switch {
	case w.container == "":
		return "read the pod's events: kubectl describe pod" + of
	case w.before:
		return "read the log of its last run: kubectl logs --previous" + of + " -c " + w.container
	default:
		return "read the agent's log: kubectl logs" + of + " -c " + w.container
	}
}
