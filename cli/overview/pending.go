// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
)

// Pending are the pods that wait for GPUs, in the form for scripts.
type Pending struct {
	Version string    `json:"version"`
	Groups  []Waiting `json:"groups"`
}

// Waiting are pods of one owner that wait for the same, with their names.
type Waiting struct {
	Namespace string      `json:"namespace"`
	Kind      string      `json:"kind"`
	Name      string      `json:"name"`
	Pods      []string    `json:"pods"`
	Since     metav1.Time `json:"since"`
	Requests  []string    `json:"requests"`
	Reason    string      `json:"reason"`
	// OtherReasons is how many of the pods wait for another reason.
	OtherReasons int `json:"otherReasons,omitempty"`

	owner string
}

// Pending returns the pods of a namespace that wait for GPUs, or those of all if it is empty, by their owners.
func (c Cluster) Pending(ctx context.Context, namespace string) (Pending, []string, error) {
	p := Pending{Version: Version, Groups: []Waiting{}}
	pods, err := c.pendingPods(ctx, namespace)
	if err != nil {
		return p, nil, err
	}
	var notes []string
	var nodes []v1alpha1.GPUNode
	if _, err := c.EachGPUNode(ctx, func(n v1alpha1.GPUNode) { nodes = append(nodes, n) }); err != nil {
		notes = append(notes, fmt.Sprintf("the reasons are only the scheduler's, because GPUNodes could not be read: %v", withoutRule(err)))
	}
	queue := explain.NewQueue(nodes)
	queue.Know(NewObjects(c).Of(ctx, pods))
	for _, g := range queue.Groups(pods) {
		w := Waiting{
			Namespace: g.Namespace, Kind: g.Kind, Name: g.Name, Since: g.Since(), Requests: g.Requests, Reason: g.Reason, OtherReasons: g.Others, owner: g.Owner(),
		}
		for _, pod := range g.Pods {
			w.Pods = append(w.Pods, pod.Name)
		}
		p.Groups = append(p.Groups, w)
	}
	return p, notes, nil
}

func (c Cluster) pendingPods(ctx context.Context, namespace string) (pods []*corev1.Pod, err error) {
	selector := fields.OneTermEqualSelector("status.phase", string(corev1.PodPending)).String()
	err = each(ctx, "pods", metav1.ListOptions{FieldSelector: selector}, c.Client.CoreV1().Pods(namespace).List, func(pod *corev1.Pod) {
		if pod.Status.Phase == corev1.PodPending {
			pods = append(pods, pod)
		}
	})
	if apierrors.IsForbidden(err) {
		err = &DeniedError{"list", "", "pods", err}
	}
	return pods, err
}

// mostRequests bounds the requests of a row, in characters.
const mostRequests = 32

// Pending returns waiting pods as a table. wide adds the name of the oldest pod of each group, and all of its requests.
func (s Style) Pending(p Pending, now time.Time, wide bool) string {
	if len(p.Groups) == 0 {
		return s.Line("no pod waits for a GPU")
	}
	row := func(owner, pods, age, pod, requests, reason string) []cell {
		if !wide {
			return cellsOf(owner, pods, age, requests, reason)
		}
		return cellsOf(owner, pods, age, pod, requests, reason)
	}
	rows, pods := [][]cell{row("OWNER", "PODS", "AGE", "OLDEST POD", "REQUESTS", "REASON")}, 0
	for _, w := range p.Groups {
		reason := w.Reason
		if w.OtherReasons > 0 {
			reason += fmt.Sprintf(" (%d for other reasons)", w.OtherReasons)
		}
		age := "-"
		if !w.Since.IsZero() {
			age = duration.HumanDuration(now.Sub(w.Since.Time))
		}
		pods += len(w.Pods)
		requests := strings.Join(w.Requests, ", ")
		if !wide {
			requests = explain.Bounded(requests, mostRequests)
		}
		rows = append(rows, row(w.owner, fmt.Sprint(len(w.Pods)), age, w.Pods[0], requests, reason))
	}
	return s.columns("", 3, rows) + s.Line(explain.Number(pods, "pod")+" of "+explain.Number(len(p.Groups), "owner")+": kubectl gpu why POD says more about each")
}
