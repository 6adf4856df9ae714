// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/tandem-gpu/tandem/internal/broadcast"
)

const (
	// callPatience bounds one call to the API server, which may be frozen; opPatience all tries of it.
	callPatience = 5 * time.Second
	opPatience   = 2 * time.Minute
	retryPause   = 200 * time.Millisecond
)

// user does what users do, in one namespace, and tries again while the API server is away.
type user struct {
	client    kubernetes.Interface
	namespace string
}

// persist calls until the API server answers. What is there already, or gone already, is done.
func persist(ctx context.Context, what string, call func(context.Context) error) error {
	deadline := time.Now().Add(opPatience)
	for {
		once, cancel := context.WithTimeout(ctx, callPatience)
		err := call(once)
		cancel()
		switch {
		case err == nil || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err):
			return nil
		case apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || time.Now().After(deadline):
			return fmt.Errorf("%s: %w", what, err)
		}
		if !broadcast.Sleep(ctx, retryPause) {
			return ctx.Err()
		}
	}
}

// settle makes the namespace and what all workloads in it refer to.
func (u user) settle(ctx context.Context) error {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: u.namespace}}
	namespace.Labels = map[string]string{namespaceLabel: "true"}
	err := persist(ctx, "create namespace", func(ctx context.Context) error {
		_, err := u.client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return err
	}
	for _, template := range templates() {
		err := persist(ctx, "create ResourceClaimTemplate", func(ctx context.Context) error {
			_, err := u.client.ResourceV1().ResourceClaimTemplates(u.namespace).Create(ctx, template, metav1.CreateOptions{})
			return err
		})
		if err != nil {
			return err
		}
	}
	// Pods cannot be created before the namespace has its account.
	return persist(ctx, "await service account", func(ctx context.Context) error {
		_, err := u.client.CoreV1().ServiceAccounts(u.namespace).Get(ctx, "default", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return fmt.Errorf("not there yet: %s", err) //nolint:errorlint // NotFound would count as done
		}
		return err
	})
}

// do carries out what is no fault.
func (u user) do(ctx context.Context, op Op) error {
	switch op.Kind {
	case Create, Burst:
		for _, w := range op.Workloads {
			if err := u.create(ctx, w); err != nil {
				return err
			}
		}
	case Scale:
		patch := fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, op.Replicas)
		return persist(ctx, "scale", func(ctx context.Context) error {
			_, err := u.client.AppsV1().Deployments(u.namespace).Patch(ctx, op.Target, types.MergePatchType, patch, metav1.PatchOptions{})
			return err
		})
	case Join:
		return u.createPod(ctx, barePod(op.Joined, op.Pick))
	case DeletePod:
		return u.deletePod(ctx, op)
	case Delete:
		return u.delete(ctx, op)
	}
	return nil
}

func (u user) create(ctx context.Context, w Workload) error {
	if w.Budget {
		err := persist(ctx, "create PodDisruptionBudget", func(ctx context.Context) error {
			_, err := u.client.PolicyV1().PodDisruptionBudgets(u.namespace).Create(ctx, budget(w), metav1.CreateOptions{})
			return err
		})
		if err != nil {
			return err
		}
	}
	if w.sharing() && w.Shape != Shared {
		// These are too many to be created before they are needed.
		err := persist(ctx, "create ResourceClaimTemplate", func(ctx context.Context) error {
			_, err := u.client.ResourceV1().ResourceClaimTemplates(u.namespace).Create(ctx, template(w), metav1.CreateOptions{})
			return err
		})
		if err != nil {
			return err
		}
	}
	switch w.Shape {
	case Deployment:
		return persist(ctx, "create Deployment", func(ctx context.Context) error {
			_, err := u.client.AppsV1().Deployments(u.namespace).Create(ctx, deployment(w), metav1.CreateOptions{})
			return err
		})
	case Job:
		return persist(ctx, "create Job", func(ctx context.Context) error {
			_, err := u.client.BatchV1().Jobs(u.namespace).Create(ctx, job(w), metav1.CreateOptions{})
			return err
		})
	case Shared:
		err := persist(ctx, "create ResourceClaim", func(ctx context.Context) error {
			_, err := u.client.ResourceV1().ResourceClaims(u.namespace).Create(ctx, sharedClaim(w), metav1.CreateOptions{})
			return err
		})
		if err != nil {
			return err
		}
	}
	var owner *corev1.ConfigMap
	if w.Shape == Workflow {
		var err error
		if owner, err = u.createWorkflow(ctx, w); err != nil {
			return err
		}
	}
	for i := range w.Replicas {
		pod := barePod(w, i)
		if owner != nil {
			pod = ownedBy(owner, pod)
		}
		if err := u.createPod(ctx, pod); err != nil {
			return err
		}
	}
	return nil
}

// createWorkflow returns the owner as the API server has it.
func (u user) createWorkflow(ctx context.Context, w Workload) (owner *corev1.ConfigMap, err error) {
	owners := u.client.CoreV1().ConfigMaps(u.namespace)
	err = persist(ctx, "create owner of a workflow", func(ctx context.Context) error {
		_, err := owners.Create(ctx, workflow(w), metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return nil, err
	}
	return owner, persist(ctx, "get owner of a workflow", func(ctx context.Context) error {
		owner, err = owners.Get(ctx, w.Name, metav1.GetOptions{})
		return err
	})
}

func (u user) createPod(ctx context.Context, pod *corev1.Pod) error {
	return persist(ctx, "create pod", func(ctx context.Context) error {
		_, err := u.client.CoreV1().Pods(u.namespace).Create(ctx, pod, metav1.CreateOptions{})
		return err
	})
}

func (u user) deletePod(ctx context.Context, op Op) error {
	return persist(ctx, "delete pod", func(ctx context.Context) error {
		pods, err := u.podsOf(ctx, op.Target)
		if err != nil || len(pods) == 0 {
			return err
		}
		pod := pods[op.Pick%len(pods)]
		options := withGrace(op.Grace)
		options.Preconditions = metav1.NewUIDPreconditions(string(pod.UID))
		return unlessConflict(u.client.CoreV1().Pods(u.namespace).Delete(ctx, pod.Name, options))
	})
}

// unlessConflict is no error where the object has another UID by now.
func unlessConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// podsOf lists a workload's pods in the order of their creation, those that are being deleted last.
func (u user) podsOf(ctx context.Context, workload string) ([]corev1.Pod, error) {
	list, err := u.client.CoreV1().Pods(u.namespace).List(ctx, metav1.ListOptions{LabelSelector: workloadLabel + "=" + workload})
	if err != nil {
		return nil, err
	}
	rank := func(p corev1.Pod) int {
		if p.DeletionTimestamp != nil {
			return 1
		}
		return 0
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int {
		return cmp.Or(rank(a)-rank(b), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return list.Items, nil
}

// delete removes all of a workload: an owner that replaces pods first, then its pods with the grace wanted.
func (u user) delete(ctx context.Context, op Op) error {
	orphan := metav1.DeletePropagationBackground
	owner := metav1.DeleteOptions{PropagationPolicy: &orphan}
	all := metav1.ListOptions{LabelSelector: workloadLabel + "=" + op.Target}
	for _, step := range []struct {
		what string
		call func(context.Context) error
	}{
		{"delete Deployment", func(ctx context.Context) error {
			return u.client.AppsV1().Deployments(u.namespace).Delete(ctx, op.Target, owner)
		}},
		{"delete Job", func(ctx context.Context) error {
			return u.client.BatchV1().Jobs(u.namespace).Delete(ctx, op.Target, owner)
		}},
		{"delete pods", func(ctx context.Context) error {
			return u.client.CoreV1().Pods(u.namespace).DeleteCollection(ctx, withGrace(op.Grace), all)
		}},
		{"delete owner of a workflow", func(ctx context.Context) error {
			return u.client.CoreV1().ConfigMaps(u.namespace).Delete(ctx, op.Target, metav1.DeleteOptions{})
		}},
		{"delete ResourceClaim", func(ctx context.Context) error {
			return u.client.ResourceV1().ResourceClaims(u.namespace).Delete(ctx, op.Target, metav1.DeleteOptions{})
		}},
	} {
		if err := persist(ctx, step.what, step.call); err != nil {
			return err
		}
	}
	return nil
}

// clear removes everything, and the namespace with it.
func (u user) clear(ctx context.Context, grace int64) error {
	if err := persist(ctx, "delete Deployments", func(ctx context.Context) error {
		return u.client.AppsV1().Deployments(u.namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	}); err != nil {
		return err
	}
	if err := persist(ctx, "delete pods", func(ctx context.Context) error {
		return u.client.CoreV1().Pods(u.namespace).DeleteCollection(ctx, withGrace(grace), metav1.ListOptions{})
	}); err != nil {
		return err
	}
	return persist(ctx, "delete namespace", func(ctx context.Context) error {
		return u.client.CoreV1().Namespaces().Delete(ctx, u.namespace, metav1.DeleteOptions{})
	})
}

func withGrace(grace int64) metav1.DeleteOptions {
	if grace == PodsOwn {
		return metav1.DeleteOptions{}
	}
	return metav1.DeleteOptions{GracePeriodSeconds: &grace}
}
