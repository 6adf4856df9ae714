// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/tandem-gpu/tandem/api/gpunode/v1alpha1"
	"github.com/tandem-gpu/tandem/hack/install"
	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/oracle"
)

// ruleLabel is a label of all DeviceTaintRules of a run.
const ruleLabel = "torture/rule"

// taintGPU taints a GPU by a DeviceTaintRule for a while, as an administrator does.
func (s *injector) taintGPU(ctx context.Context, op Op) (done, error) {
	gpu, held := op.GPU, ""
	if op.Answer == noExecute {
		gpu, held = s.held(ctx, gpu)
	}
	selector, err := s.selector(ctx, gpu, held)
	if err != nil || selector == nil {
		return done{skipped: "the slices do not have the GPU"}, err
	}
	rules := s.client.ResourceV1().DeviceTaintRules()
	rule := &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("torture-%05d", op.Index), Labels: map[string]string{ruleLabel: "true"}},
		Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: selector,
			Taint:          resourceapi.DeviceTaint{Key: ruleLabel, Effect: resourceapi.DeviceTaintEffect(op.Answer)},
		},
	}
	// Of a GPU with static partitions the rule selects one partition. The run accepts evictions from the other partitions as well.
	if rule.Spec.Taint.Effect == resourceapi.DeviceTaintEffectNoExecute {
		s.evicting(gpu, true)
		defer s.evicting(gpu, false)
	}
	served := true
	err = persist(ctx, "create DeviceTaintRule", func(ctx context.Context) error {
		_, err := rules.Create(ctx, rule, metav1.CreateOptions{})
		served = !apierrors.IsNotFound(err)
		return err
	})
	if err != nil || !served {
		return done{skipped: "the API server does not serve DeviceTaintRules"}, err
	}
	broadcast.Sleep(ctx, op.Pause)
	err = persist(ctx, "delete DeviceTaintRule", func(ctx context.Context) error {
		return rules.Delete(ctx, rule.Name, metav1.DeleteOptions{})
	})
	return done{}, errors.Join(err, s.forgotten(ctx, rule.Name))
}

// forgotten waits until no GPUNode has a taint of a rule any more.
func (s *injector) forgotten(ctx context.Context, rule string) error {
	return persist(ctx, "wait until the GPUNode has lost the rule", func(ctx context.Context) error {
		node, err := s.auditor.dynamic.Resource(gpuNodes).Get(ctx, s.node.Name(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		taints, _, err := unstructured.NestedSlice(node.Object, "spec", "taints")
		if slices.ContainsFunc(taints, func(taint any) bool {
			fields, _ := taint.(map[string]any)
			return fields["rule"] == rule
		}) {
			err = errors.New("it has the rule")
		}
		return err
	})
}

// held returns a GPU that a pod has by limits, with the name of the device: the first one from a GPU on. If there is none, or it is not known, it
// returns that GPU without a name. Kubernetes evicts pods with claims, and Tandem those with limits.
func (s *injector) held(ctx context.Context, gpu int) (of int, name string) {
	node, err := s.auditor.dynamic.Resource(gpuNodes).Get(ctx, s.node.Name(), metav1.GetOptions{})
	if err != nil {
		return gpu, ""
	}
	devices, _, _ := unstructured.NestedSlice(node.Object, "status", "devices") //nolint:errcheck // the CRD says that it is a list
	next := gpusANode
	for _, device := range devices {
		fields, _ := device.(map[string]any)
		holders, _ := fields["holders"].([]any)
		text, _ := fields["name"].(string)
		at, ok := placeNamed(text)
		byLimits := slices.ContainsFunc(holders, func(holder any) bool {
			fields, _ := holder.(map[string]any)
			return fields["kind"] == string(v1alpha1.HolderPod)
		})
		if after := (at.gpu - gpu + gpusANode) % gpusANode; ok && byLimits && after < next {
			next, name = after, text
		}
	}
	return (gpu + next) % gpusANode, name
}

// selector returns what selects a GPU: all devices in the pool of a dynamic GPU, another whole GPU by pool and name, or one partition of a GPU with
// static partitions, the named one if there is such a one. It is nil for a GPU that the slices do not have.
func (s *injector) selector(ctx context.Context, gpu int, named string) (selector *resourceapi.DeviceTaintSelector, err error) {
	var list *resourceapi.ResourceSliceList
	err = persist(ctx, "list ResourceSlices", func(ctx context.Context) (err error) {
		list, err = s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + s.node.Name()})
		return err
	})
	if err != nil {
		return nil, err
	}
	driver := install.DriverName
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			at, ok := placeNamed(d.Name)
			if !ok || at.gpu != gpu || slice.Spec.Driver != driver {
				continue
			}
			if selector != nil && d.Name != named {
				continue
			}
			selector = &resourceapi.DeviceTaintSelector{Driver: &driver, Pool: &slice.Spec.Pool.Name}
			if slice.Spec.Pool.Name == s.node.Name() {
				selector.Device = &d.Name
			}
		}
	}
	return selector, nil
}

// maintainGPU takes a GPU out of service for a while by an entry in the GPUNode's spec.
func (s *injector) maintainGPU(ctx context.Context, op Op) (done, error) {
	root, err := s.node.Root()
	if err != nil {
		return done{skipped: "the node is down"}, nil //nolint:nilerr // it reboots
	}
	gpus, err := oracle.GPUs(root)
	if err != nil || gpus[op.GPU].UUID == "" {
		return done{skipped: "the node does not have the GPU"}, nil //nolint:nilerr // it has just booted
	}
	uuid := gpus[op.GPU].UUID
	isIt := func(entry string) bool { return entry == uuid }
	if err := s.maintain(ctx, isIt, uuid); err != nil {
		return done{}, err
	}
	broadcast.Sleep(ctx, op.Pause)
	return done{}, s.maintain(ctx, isIt)
}

// maintain removes entries and adds one for each of more. A node without a GPUNode has none.
func (s *injector) maintain(ctx context.Context, ended func(uuid string) bool, more ...string) error {
	nodes := s.auditor.dynamic.Resource(gpuNodes)
	return persist(ctx, "change maintenance", func(ctx context.Context) error {
		node, err := nodes.Get(ctx, s.node.Name(), metav1.GetOptions{})
		if err != nil {
			return err
		}
		entries, _, err := unstructured.NestedSlice(node.Object, "spec", "maintenance")
		if err != nil {
			return err
		}
		entries = slices.DeleteFunc(entries, func(entry any) bool {
			fields, _ := entry.(map[string]any)
			uuid, _ := fields["uuid"].(string)
			return ended(uuid)
		})
		for _, uuid := range more {
			entries = append(entries, map[string]any{"uuid": uuid, "reason": "torture"})
		}
		if err := unstructured.SetNestedSlice(node.Object, entries, "spec", "maintenance"); err != nil {
			return err
		}
		_, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
		return err
	})
}

// serve puts all GPUs into service: it deletes the run's rules and all maintenance. Idempotent.
func (s *injector) serve(ctx context.Context) error {
	err := persist(ctx, "delete DeviceTaintRules", func(ctx context.Context) error {
		return s.client.ResourceV1().DeviceTaintRules().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: ruleLabel})
	})
	return errors.Join(err, s.maintain(ctx, func(string) bool { return true }))
}

// deleteNode deletes the Node while kubelet is down. kubelet then registers a new one.
func (s *injector) deleteNode(ctx context.Context, op Op) (done, error) {
	kubelet := s.component(kubeletName)
	if err := kubelet.Kill(ctx); err != nil {
		return done{}, err
	}
	err := persist(ctx, "delete Node", func(ctx context.Context) error {
		return s.client.CoreV1().Nodes().Delete(ctx, s.node.Name(), metav1.DeleteOptions{})
	})
	broadcast.Sleep(ctx, op.Pause)
	return done{kills: 1}, errors.Join(err, restart(ctx, kubelet.Start))
}
