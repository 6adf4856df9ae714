// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/cli/explain"
)

// Why reads what cli/explain needs of a pod, and returns its answer.
func (c Cluster) Why(ctx context.Context, namespace, name string) (explain.Answer, error) {
	pod, err := c.Client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return explain.Answer{}, fmt.Errorf("get pod %s/%s: %w", namespace, name, err)
	}
	f := explain.Facts{
		Driver: c.DriverName, Pod: pod, Claims: map[string]*resourceapi.ResourceClaim{}, Templates: map[string]*resourceapi.ResourceClaimTemplate{},
	}
	unread := func(kind explain.Kind, err error) {
		if err != nil {
			f.NotRead = append(f.NotRead, explain.NotRead{Kind: kind, Error: explain.OneLine(withoutRule(err).Error())})
		}
	}
	c.readClaims(ctx, &f, unread)
	unread(explain.KindEvents, c.readEvents(ctx, &f))
	classes, err := c.Client.ResourceV1().DeviceClasses().List(ctx, metav1.ListOptions{})
	unread(explain.KindClasses, err)
	if err == nil {
		f.Classes = classes.Items
	}
	if slices.ContainsFunc(f.Events, explain.RefusedByQuota) {
		unread(explain.KindQuotaUsers, c.readQuotaUsers(ctx, &f))
	}
	quotas, err := c.Client.CoreV1().ResourceQuotas(namespace).List(ctx, metav1.ListOptions{})
	unread(explain.KindQuotas, err)
	if err == nil {
		f.Quotas = quotas.Items
	}
	if pod.Spec.NodeName != "" {
		node, err := c.gpuNode(ctx, pod.Spec.NodeName)
		switch {
		case err == nil:
			f.GPUNodes = append(f.GPUNodes, node)
		case !apierrors.IsNotFound(err): // a node without an agent has none
			unread(explain.KindGPUNodes, err)
		}
	} else {
		_, err = c.EachGPUNode(ctx, func(n v1alpha1.GPUNode) { f.GPUNodes = append(f.GPUNodes, n) })
		unread(explain.KindGPUNodes, err)
		unread(explain.KindNodes, c.eachNode(ctx, "", func(n *corev1.Node) { f.Nodes = append(f.Nodes, *n) }))
		unread(explain.KindSlices, c.EachSlice(ctx, func(s resourceapi.ResourceSlice) { f.Slices = append(f.Slices, s) }))
	}
	rights := NewRights(c, namespace)
	f.MayName = func(of string) bool { return rights.MayName(ctx, []string{of})(of) }
	return explain.Why(ctx, f)
}

// mostEvents bounds the events of one object that are read.
const mostEvents = 500

// mostQuotaUsers bounds the pods, and the claims, that are read to tell who uses a quota.
const mostQuotaUsers = 500

// readQuotaUsers reads who may use the namespace's quotas, as far as it can.
func (c Cluster) readQuotaUsers(ctx context.Context, f *explain.Facts) error {
	some := metav1.ListOptions{Limit: mostQuotaUsers}
	pods, errPods := c.Client.CoreV1().Pods(f.Pod.Namespace).List(ctx, some)
	if errPods == nil {
		f.QuotaPods, f.QuotaPartly = pods.Items, pods.Continue != ""
	}
	claims, errClaims := c.Client.ResourceV1().ResourceClaims(f.Pod.Namespace).List(ctx, some)
	if errClaims == nil {
		f.QuotaClaims, f.QuotaPartly = claims.Items, f.QuotaPartly || claims.Continue != ""
	}
	return errors.Join(errPods, errClaims)
}

// readClaims reads the claims of the pod that Why evaluates, and the templates of those that do not exist yet. One that is missing is no
// error.
func (c Cluster) readClaims(ctx context.Context, f *explain.Facts, unread func(explain.Kind, error)) {
	api, namespace := c.Client.ResourceV1(), f.Pod.Namespace
	for i := range f.Pod.Spec.ResourceClaims[:min(explain.MostClaims, len(f.Pod.Spec.ResourceClaims))] {
		ref := &f.Pod.Spec.ResourceClaims[i]
		name, _, err := resourceclaim.Name(f.Pod, ref)
		if err == nil && name != nil {
			claim, err := api.ResourceClaims(namespace).Get(ctx, *name, metav1.GetOptions{})
			if err == nil {
				f.Claims[*name] = claim
			} else if !apierrors.IsNotFound(err) {
				unread(explain.KindClaims, err)
			}
			continue
		}
		if template := ref.ResourceClaimTemplateName; err != nil && template != nil {
			of, err := api.ResourceClaimTemplates(namespace).Get(ctx, *template, metav1.GetOptions{})
			if err == nil {
				f.Templates[*template] = of
			} else if !apierrors.IsNotFound(err) {
				unread(explain.KindTemplates, err)
			}
		}
	}
}

// readEvents reads the events of the pod and of its claims, by UID: a pod of the same name may have had others.
func (c Cluster) readEvents(ctx context.Context, f *explain.Facts) error {
	of := map[types.UID]bool{f.Pod.UID: true}
	for _, claim := range f.Claims {
		of[claim.UID] = true
	}
	for uid := range of {
		list, err := c.Client.CoreV1().Events(f.Pod.Namespace).List(ctx, metav1.ListOptions{
			Limit: mostEvents, FieldSelector: fields.OneTermEqualSelector("involvedObject.uid", string(uid)).String(),
		})
		if err != nil {
			return fmt.Errorf("list events: %w", err)
		}
		for _, e := range list.Items {
			if e.InvolvedObject.UID == uid {
				f.Events = append(f.Events, e)
			}
		}
	}
	return nil
}
