// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/controller"
	"github.com/tandem-gpu/tandem/test/figure"
)

// taintRules is how often a GPU is tainted.
const taintRules = 50

// measureTaintRules measures how soon a GPU leaves kubelet's list after the creation of a DeviceTaintRule, and how soon it is back. The
// controller runs in this process.
func (r *run) measureTaintRules(ctx context.Context) error {
	r.say("tainting a GPU by %d rules", taintRules)
	rest, err := r.node.cluster.RESTConfig()
	if err != nil {
		return err
	}
	control, err := controller.New(controller.Config{
		REST: rest, DriverName: driverName, ResourceName: resourceName, Namespace: namespace, LeaseName: "bench", Identity: "bench",
		Registerer: prometheus.NewRegistry(),
	})
	if err != nil {
		return err
	}
	// Those of former figures are allocated all GPUs: the controller would withdraw them from limits.
	if err := r.client.ResourceV1().ResourceClaims(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		return fmt.Errorf("delete the claims of former figures: %w", err)
	}
	return r.on(ctx, small, config.ModeDual, nil, func(ctx context.Context, s *subject) (err error) {
		ctx, cancel := context.WithCancel(ctx)
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		ended := make(chan error, 1)
		running.Go(func() {
			err := control.Run(ctx)
			ended <- err
			if err != nil {
				cancel()
			}
		})
		if err = r.add(s.taintRules(ctx)); err != nil {
			cancel()
			err = errors.Join(err, <-ended)
		}
		return err
	})
}

func (s *subject) taintRules(ctx context.Context) ([]figure.Figure, error) {
	ctx, cancel := context.WithCancel(ctx)
	var seen seenHealth
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { s.followList(ctx, &seen) })
	rules := s.client.ResourceV1().DeviceTaintRules()
	change := func(into *figure.Samples, withdrawn bool, request func() error) error {
		limited, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		began := time.Now()
		if err := request(); err != nil {
			return fmt.Errorf("change a DeviceTaintRule: %w", err)
		}
		if !broadcast.Await(limited, seen.Changed, func() bool {
			seen.mu.Lock()
			defer seen.mu.Unlock()
			return seen.list == withdrawn
		}) {
			return fmt.Errorf("the GPU is not withdrawn from kubelet's list: %t: %w", withdrawn, context.Cause(limited))
		}
		*into = append(*into, time.Since(began))
		return nil
	}
	var withdrawn, recovered figure.Samples
	for i := range 1 + taintRules {
		rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("bench-", i)}, Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To(driverName), Pool: ptr.To(nodeName), Device: ptr.To(fmt.Sprintf("gpu-%d", brokenGPU))},
			Taint:          resourceapi.DeviceTaint{Key: "example.com/repair", Effect: resourceapi.DeviceTaintEffectNoSchedule},
		}}
		err := change(&withdrawn, true, func() error {
			_, err := rules.Create(ctx, rule, metav1.CreateOptions{})
			return err
		})
		if err != nil {
			return nil, err
		}
		// The agent writes its status once a second on average. A change while it has one to write would measure that.
		if !pause(ctx, 500*time.Millisecond) {
			return nil, context.Cause(ctx)
		}
		if err := change(&recovered, false, func() error { return rules.Delete(ctx, rule.Name, metav1.DeleteOptions{}) }); err != nil {
			return nil, err
		}
		if i == 0 { // the controller had yet to start
			withdrawn, recovered = nil, nil
		}
		if !pause(ctx, 500*time.Millisecond) {
			return nil, context.Cause(ctx)
		}
	}
	return []figure.Figure{
		withdrawn.Figure("taintrule_allocatable_p99", 99).Within(seenWithin),
		recovered.Figure("taintrule_recovered_p99", 99).Within(recoveredWithin),
	}, nil
}
