// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	resourceapi "k8s.io/api/resource/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	"github.com/tandem-gpu/tandem/test/figure"
	"github.com/tandem-gpu/tandem/test/gpufaults"
)

// Goals of the health figures in milliseconds: from the fault until it is seen, and from its end until the GPU is offered again.
const (
	seenWithin      = 2000
	recoveredWithin = 4000
)

// brokenGPU is the GPU that gets the faults.
const brokenGPU = 3

// seenHealth is what each API says of the GPU that gets the faults.
type seenHealth struct {
	broadcast.Signal
	mu                    sync.Mutex
	slice, list, reported bool // unhealthy
}

func (h *seenHealth) set(of *bool, unhealthy bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if *of != unhealthy {
		*of = unhealthy
		h.Notify()
	}
}

// await returns how long after began each API says that the GPU is unhealthy, or healthy: the slice, kubelet's list, the report for
// kubelet's pod status.
func (h *seenHealth) await(ctx context.Context, began time.Time, unhealthy bool) (took [3]time.Duration, err error) {
	done := broadcast.Await(ctx, h.Changed, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		all := true
		for i, now := range []bool{h.slice, h.list, h.reported} {
			if now == unhealthy && took[i] == 0 {
				took[i] = time.Since(began)
			}
			all = all && took[i] != 0
		}
		return all
	})
	if !done {
		return took, fmt.Errorf("unhealthy: %v in all of slice, list, report; seen after %v: %w", unhealthy, took, context.Cause(ctx))
	}
	return took, nil
}

// measureHealth breaks a GPU in each way, and measures how soon it is seen and how soon its end.
func (r *run) measureHealth(ctx context.Context) error {
	r.say("breaking a GPU in %d ways", len(gpufaults.All))
	return r.with(ctx, small, func(ctx context.Context, s *subject) error { return r.add(s.health(ctx)) })
}

func (s *subject) health(ctx context.Context) (figures []figure.Figure, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var seen seenHealth
	var watchers sync.WaitGroup
	defer watchers.Wait()
	defer cancel()
	for _, follow := range []func(context.Context, *seenHealth) error{s.followSlices, s.followReports} {
		failed := make(chan error, 1)
		watchers.Go(func() {
			if err := follow(ctx, &seen); err != nil && ctx.Err() == nil {
				failed <- err
				cancel()
			}
		})
		defer func() {
			select {
			case broke := <-failed:
				err = errors.Join(err, broke)
			default:
			}
		}()
	}
	watchers.Go(func() { s.followList(ctx, &seen) })
	dir := s.node.path(small.profile)
	defer func() { err = errors.Join(err, gpufaults.Clear(dir)) }()

	var slices, lists, reports, recovered figure.Samples
	for _, fault := range gpufaults.All {
		limited, cancel := context.WithTimeoutCause(ctx, 15*time.Second, fmt.Errorf("fault %q", fault.Name))
		began := time.Now()
		err := fault.Raise(dir, brokenGPU)
		var took [3]time.Duration
		if err == nil {
			took, err = seen.await(limited, began, true)
		}
		if err != nil {
			cancel()
			return nil, err
		}
		slices, lists, reports = append(slices, took[0]), append(lists, took[1]), append(reports, took[2])
		// A fault that lasts only until the next scan is not one whose end can be measured.
		if !pause(limited, 500*time.Millisecond) {
			cancel()
			return nil, context.Cause(limited)
		}
		began = time.Now()
		if err = gpufaults.Clear(dir); err == nil {
			took, err = seen.await(limited, began, false)
		}
		cancel()
		if err != nil {
			return nil, err
		}
		recovered = append(recovered, max(took[0], took[1], took[2]))
	}
	return []figure.Figure{
		slices.Figure("health_slice_p99", 99).Within(seenWithin),
		lists.Figure("health_allocatable_p99", 99).Within(seenWithin),
		reports.Figure("health_pod_status_p99", 99).Within(seenWithin),
		recovered.Figure("health_recovered_p99", 99).Within(recoveredWithin),
	}, nil
}

// followSlices follows the taints of the GPU in its slice.
func (s *subject) followSlices(ctx context.Context, seen *seenHealth) error {
	watcher, err := s.client.ResourceV1().ResourceSlices().Watch(ctx, metav1.ListOptions{FieldSelector: ofNode(s.node.name)})
	if err != nil {
		return fmt.Errorf("watch slices: %w", err)
	}
	defer watcher.Stop()
	for event := range watcher.ResultChan() {
		slice, ok := event.Object.(*resourceapi.ResourceSlice)
		if !ok || event.Type == watch.Deleted {
			continue
		}
		for _, d := range slice.Spec.Devices {
			if d.Name == fmt.Sprintf("gpu-%d", brokenGPU) {
				seen.set(&seen.slice, len(d.Taints) > 0)
			}
		}
	}
	return errors.New("the watch of slices ended")
}

// followReports follows the health that kubelet writes to the status of pods with claims.
func (s *subject) followReports(ctx context.Context, seen *seenHealth) error {
	stream, err := drahealth.NewDRAResourceHealthClient(s.driver.Conn).NodeWatchResources(ctx, &drahealth.NodeWatchResourcesRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("watch the health of devices: %w", err)
	}
	for {
		report, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("receive the health of devices: %w", err)
		}
		for _, d := range report.GetDevices() {
			if d.GetDevice().GetDeviceName() == fmt.Sprintf("gpu-%d", brokenGPU) && d.GetDevice().GetPoolName() == nodeName {
				seen.set(&seen.reported, d.GetHealth() == drahealth.HealthStatus_UNHEALTHY)
			}
		}
	}
}

// followList follows the list that kubelet copies to the node's allocatable and to the status of pods with limits.
func (s *subject) followList(ctx context.Context, seen *seenHealth) {
	broken := s.ids[brokenGPU]
	for pause(ctx, time.Millisecond) {
		unhealthy := false
		plugin, _ := s.kubelet.DevicePlugin(resourceName)
		for _, d := range plugin.Devices {
			unhealthy = unhealthy || d.GetID() == broken && d.GetHealth() != pluginapi.Healthy
		}
		seen.set(&seen.list, unhealthy)
	}
}
