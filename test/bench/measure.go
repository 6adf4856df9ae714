// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/test/figure"
	"github.com/tandem-gpu/tandem/test/kubelet"
)

// subject is a running agent with everything that a measurement needs of its surroundings.
type subject struct {
	client  kubernetes.Interface
	node    *node
	kubelet *kubelet.Kubelet
	agent   *agent
	driver  kubelet.Driver
	plugin  kubelet.DevicePlugin
	ids     []string
	claims  []*resourceapi.ResourceClaim
}

// timed measures one call.
func timed(into *figure.Samples, call func() error) error {
	start := time.Now()
	err := call()
	*into = append(*into, time.Since(start))
	return err
}

// inTurns makes every call n times, each time in another order, so that none always follows the same other one.
func inTurns(ctx context.Context, n int, calls ...func(i int) error) error {
	for i := range n {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		for j := range calls {
			if err := calls[(i+j)%len(calls)](i); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *subject) getClaim(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	_, err := s.client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	return err
}

func reference(claim *resourceapi.ResourceClaim) []*drapb.Claim {
	return []*drapb.Claim{{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}}
}

func (s *subject) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	response, err := s.driver.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: reference(claim)})
	if err != nil {
		return fmt.Errorf("prepare %s: %w", claim.Name, err)
	}
	answer := response.GetClaims()[string(claim.UID)]
	if answer.GetError() != "" || len(answer.GetDevices()) != 1 {
		return fmt.Errorf("prepare %s: %d devices, error %q", claim.Name, len(answer.GetDevices()), answer.GetError())
	}
	return nil
}

func (s *subject) unprepare(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	response, err := s.driver.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: reference(claim)})
	if err != nil {
		return fmt.Errorf("unprepare %s: %w", claim.Name, err)
	}
	if answer := response.GetClaims()[string(claim.UID)]; answer == nil || answer.GetError() != "" {
		return fmt.Errorf("unprepare %s: %q", claim.Name, answer.GetError())
	}
	return nil
}

func (s *subject) empty(ctx context.Context) error {
	_, err := s.plugin.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	return err
}

// serialClaims prepares and unprepares one claim at a time, n of them.
func (s *subject) serialClaims(ctx context.Context, n int) ([]figure.Figure, error) {
	gets, prepares, unprepares, err := s.prepareOneByOne(ctx, n)
	floor := gets.Figure("claim_get_p50", 50)
	return []figure.Figure{
		floor,
		prepares.Figure("prepare_serial_p50", 50).Over(floor, figure.Goal{Factor: 1, Margin: 0.3}),
		prepares.Figure("prepare_serial_p99", 99).Over(gets.Figure("", 99), figure.Goal{}),
		unprepares.Figure("unprepare_serial_p50", 50),
	}, err
}

// prepareOneByOne prepares and unprepares one claim at a time, n of them, in turns with GETs.
func (s *subject) prepareOneByOne(ctx context.Context, n int) (gets, prepares, unprepares figure.Samples, err error) {
	err = inTurns(ctx, n,
		func(i int) error {
			return timed(&gets, func() error { return s.getClaim(ctx, s.claims[i%len(s.claims)]) })
		},
		func(i int) error {
			claim := s.claims[i%len(s.claims)]
			if err := timed(&prepares, func() error { return s.prepare(ctx, claim) }); err != nil {
				return err
			}
			if err := timed(&unprepares, func() error { return s.unprepare(ctx, claim) }); err != nil {
				return err
			}
			return s.replacePods(ctx, claim)
		})
	return gets, prepares, unprepares, err
}

// concurrently makes a call for each claim at once and collects how long each took.
func concurrently(into *figure.Samples, claims []*resourceapi.ResourceClaim, call func(*resourceapi.ResourceClaim) error) error {
	var group errgroup.Group
	took := make([]figure.Samples, len(claims))
	start := make(chan struct{})
	for i, claim := range claims {
		group.Go(func() error {
			<-start
			return timed(&took[i], func() error { return call(claim) })
		})
	}
	close(start)
	err := group.Wait()
	for _, t := range took {
		*into = append(*into, t...)
	}
	return err
}

// concurrentClaims prepares width claims at once, until n were prepared, in turns with as many GETs.
func (s *subject) concurrentClaims(ctx context.Context, width, n int) (gets, prepares figure.Samples, err error) {
	claims := s.claims[:width]
	var unprepares figure.Samples
	err = inTurns(ctx, (n+width-1)/width,
		func(int) error {
			return concurrently(&gets, claims, func(c *resourceapi.ResourceClaim) error { return s.getClaim(ctx, c) })
		},
		func(int) error {
			if err := concurrently(&prepares, claims, func(c *resourceapi.ResourceClaim) error { return s.prepare(ctx, c) }); err != nil {
				return err
			}
			if err := concurrently(&unprepares, claims, func(c *resourceapi.ResourceClaim) error { return s.unprepare(ctx, c) }); err != nil {
				return err
			}
			return s.replacePods(ctx, claims...)
		})
	return gets, prepares, err
}

const (
	held    = 200
	atEnds  = 20
	heldFor = 5
)

// heldClaims prepares claims one after the other while all before them stay, several times over.
func (s *subject) heldClaims(ctx context.Context) ([]figure.Figure, error) {
	var first, last figure.Samples
	for range heldFor {
		var prepares figure.Samples
		for _, claim := range s.claims[:held] {
			if err := timed(&prepares, func() error { return s.prepare(ctx, claim) }); err != nil {
				return nil, err
			}
		}
		first, last = append(first, prepares[:atEnds]...), append(last, prepares[held-atEnds:]...)
		for _, claim := range s.claims[:held] {
			if err := s.unprepare(ctx, claim); err != nil {
				return nil, err
			}
		}
		if err := s.replacePods(ctx, s.claims[:held]...); err != nil {
			return nil, err
		}
	}
	ratio := last.Percentile(50) / first.Percentile(50)
	return []figure.Figure{figure.Figure{Name: "prepare_held200_ratio", Value: ratio, Unit: "ratio", N: len(last)}.Within(1.2)}, nil
}

// allocations measures Allocate of one GPU, and of all GPUs of the machine in one call.
func (s *subject) allocations(ctx context.Context, n int) ([]figure.Figure, error) {
	floor, one, err := s.allocate(ctx, "one", 1, n)
	if err != nil {
		return nil, err
	}
	_, all, err := s.allocate(ctx, "all", len(s.ids), n/len(s.ids))
	if err != nil {
		return nil, err
	}
	p50, p99 := floor.Figure("empty_call_p50", 50), floor.Figure("empty_call_p99", 99)
	return []figure.Figure{
		p50, p99, one.Figure("allocate_p50", 50).Over(p50, figure.Goal{Factor: 1.3}), one.Figure("allocate_p99", 99).Over(p99, figure.Goal{Factor: 3}),
		all.Figure(fmt.Sprintf("allocate_%d_p50", len(s.ids)), 50).Over(p50, figure.Goal{Factor: 1.5}),
	}, nil
}

// allocate measures n calls of Allocate for this many GPUs each, in turns with calls that do nothing. The names of its pods start
// with prefix.
func (s *subject) allocate(ctx context.Context, prefix string, gpus, n int) (floor, allocates figure.Samples, err error) {
	for cycle := 0; len(allocates) < n; cycle++ {
		pod, err := createPod(ctx, s.client, s.node.name, fmt.Sprintf("%s-%d", prefix, cycle))
		if err != nil {
			return nil, nil, err
		}
		err = inTurns(ctx, len(s.ids)/gpus,
			func(int) error { return timed(&floor, func() error { return s.empty(ctx) }) },
			func(i int) error {
				ids := s.ids[i*gpus : (i+1)*gpus]
				request := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}}
				return timed(&allocates, func() error { _, err := s.plugin.Allocate(ctx, request); return err })
			})
		if err != nil {
			return nil, nil, fmt.Errorf("allocate: %w", err)
		}
		if err := s.release(ctx, pod); err != nil {
			return nil, nil, err
		}
	}
	return floor, allocates, nil
}

// release writes down, as kubelet does, who got the devices, ends and removes the pod, and waits until the agent has let them go. There
// must be no other holder.
func (s *subject) release(ctx context.Context, pod *corev1.Pod) error {
	_, newest, err := s.node.holds("")
	if err != nil {
		return err
	}
	// The kernel stamps files by a coarse clock; a checkpoint with the stamp of an allocation says nothing about it.
	for !time.Now().After(newest.Add(20 * time.Millisecond)) {
		if !pause(ctx, time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	if err := s.kubelet.Grant(kubelet.Grant{Pod: pod.UID, Container: "main", Resource: resourceName, IDs: s.ids}); err != nil {
		return err
	}
	defer s.kubelet.Release(pod.UID)
	if err := endPod(ctx, s.client, pod); err != nil {
		return err
	}
	if err := deletePod(ctx, s.client, pod.Name); err != nil {
		return err
	}
	return s.awaitEnd(ctx, "") // other builds name the kind otherwise
}

// replacePods ends the pods of claims that were unprepared, as kubelet does after that, waits until the agent has let the devices go, and
// reserves the claims for new pods. No other claim may be prepared.
func (s *subject) replacePods(ctx context.Context, claims ...*resourceapi.ResourceClaim) error {
	var group errgroup.Group
	group.SetLimit(4)
	for _, claim := range claims {
		group.Go(func() error { return replacePod(ctx, s.client, claim) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return s.awaitEnd(ctx, ledger.KindClaim)
}

// awaitEnd waits until the agent has no hold of the kind any more.
func (s *subject) awaitEnd(ctx context.Context, kind ledger.Kind) error {
	const endsWithin = 10 * time.Second
	ctx, cancel := context.WithTimeoutCause(ctx, endsWithin, fmt.Errorf("not within %s", endsWithin))
	defer cancel()
	for {
		left, _, err := s.node.holds(kind)
		if err != nil || left == 0 {
			return err
		}
		if !pause(ctx, time.Millisecond) {
			return fmt.Errorf("await the end of %d holds (%s): %w", left, kind, context.Cause(ctx))
		}
	}
}

// preferences asks for the best of all GPUs, n times for each size.
func (s *subject) preferences(ctx context.Context, n int, sizes ...int) ([]figure.Figure, error) {
	var floor figure.Samples
	took := make([]figure.Samples, len(sizes))
	calls := []func(int) error{func(int) error { return timed(&floor, func() error { return s.empty(ctx) }) }}
	for i, size := range sizes {
		request := &pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: s.ids, AllocationSize: int32(size),
		}}}
		calls = append(calls, func(int) error {
			return timed(&took[i], func() error { return s.prefer(ctx, request, size) })
		})
	}
	if err := inTurns(ctx, n, calls...); err != nil {
		return nil, err
	}
	empty := floor.Figure("empty_call_p50", 50)
	figures := make([]figure.Figure, len(sizes))
	for i, size := range sizes {
		figures[i] = took[i].Figure(fmt.Sprintf("preferred_%d_p50", size), 50).Over(empty, figure.Goal{Factor: 1, Margin: 0.15})
	}
	return figures, nil
}

func (s *subject) prefer(ctx context.Context, request *pluginapi.PreferredAllocationRequest, size int) error {
	response, err := s.plugin.GetPreferredAllocation(ctx, request)
	if err != nil {
		return fmt.Errorf("prefer %d devices: %w", size, err)
	}
	if answers := response.GetContainerResponses(); len(answers) != 1 || len(answers[0].GetDeviceIDs()) != size {
		return fmt.Errorf("prefer %d devices: got %v", size, response)
	}
	return nil
}
