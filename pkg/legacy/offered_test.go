// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"context"
	"math"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// TestOffered: a GPU that is not for limits is listed only where a limit of before has it, and is healthy as long.
func TestOffered(t *testing.T) {
	inv := device.Inventory{GPUs: []device.GPU{{UUID: "GPU-a", Minor: 0}, {UUID: "GPU-b", Minor: 1}, {UUID: "GPU-c", Minor: 2}}}
	before := fixedLedger{holds: []ledger.Hold{
		{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-c"}, State: ledger.StateHeld, Device: device.Ref{GPU: "GPU-c"}, Resource: whole.GPU},
	}}
	f := listsOf(inv.GPUs...)
	f.Offered = func(gpu device.GPU) bool { return gpu.UUID == "GPU-a" }
	all := &deviceTable{}
	var c *resourceDevices
	for _, step := range []struct {
		ledger Ledger
		want   []state
	}{
		{before, []state{stateHealthy, stateHealthy}},
		{fixedLedger{}, []state{stateHealthy, stateWithdrawn}},
	} {
		o := usageOf(step.ledger, noAllocations)
		all = f.build(o, all, time.Now())
		c = all.of[whole.GPU]
		if got := c.states(o); len(c.items) != 2 || c.items[1].id != "GPU-c" || !slices.Equal(got, step.want) {
			t.Errorf("lists %v as %v, want GPU-a and GPU-c as %v", c.items, got, step.want)
		}
	}
	o := usageOf(before, noAllocations)
	f.Offered, f.Retiring = func(device.GPU) bool { return false }, true
	retiring := f.build(o, &deviceTable{}, time.Now()).of[whole.GPU]
	if got := retiring.states(o); len(retiring.items) != 1 || got[0] != stateWithdrawn {
		t.Errorf("a plugin that retires lists %v as %v", retiring.items, got)
	}
	// Kubelet may still think that it can give GPU-c away, and what must be included is the pod's already.
	request := &pluginapi.ContainerPreferredAllocationRequest{AvailableDeviceIDs: []string{"GPU-a", "GPU-c"}, AllocationSize: 1}
	if got := c.prefer(request, usage{outOfService: allInService}); !slices.Equal(got, []string{"GPU-a"}) {
		t.Errorf("prefers %v", got)
	}
	request.MustIncludeDeviceIDs = []string{"GPU-c"}
	if got := c.prefer(request, usage{outOfService: allInService}); !slices.Equal(got, []string{"GPU-c"}) {
		t.Errorf("prefers %v where GPU-c must be included", got)
	}
}

// TestPreferredAvoidsWhatALimitHas: kubelet offers such a device where it forgot an Allocate in flight or lost its checkpoint.
func TestPreferredAvoidsWhatALimitHas(t *testing.T) {
	gpus := []device.GPU{{UUID: "GPU-a", Minor: 0}, {UUID: "GPU-b", Minor: 1}, {UUID: "GPU-c", Minor: 2}}
	c := devicesOf(gpus...)
	o := usageOf(fixedLedger{
		holds: []ledger.Hold{
			{Holder: ledger.Holder{Kind: ledger.KindPod, ID: "GPU-c"}, State: ledger.StateHeld, Device: device.Ref{GPU: "GPU-c"}, Resource: whole.GPU},
		},
		conflicts: []ledger.Conflict{{Devices: []device.Ref{{GPU: "GPU-b"}}}},
	}, noAllocations)
	for size, want := range map[int32][]string{1: {"GPU-a"}, 2: {"GPU-a", "GPU-b"}, 3: {"GPU-a", "GPU-b", "GPU-c"}} {
		request := &pluginapi.ContainerPreferredAllocationRequest{AvailableDeviceIDs: []string{"GPU-a", "GPU-b", "GPU-c"}, AllocationSize: size}
		if got := c.prefer(request, o); !slices.Equal(got, want) {
			t.Errorf("%d: %q, want %q", size, got, want)
		}
	}
}

// TestPreferredStartsWhereClaimsEnd: the slices list GPUs of little memory first, so pods with limits get the others first.
func TestPreferredStartsWhereClaimsEnd(t *testing.T) {
	c := devicesOf(device.GPU{UUID: "GPU-a", Minor: 0, MemoryBytes: 80 << 30}, device.GPU{UUID: "GPU-b", Minor: 1, MemoryBytes: 80 << 30},
		device.GPU{UUID: "GPU-c", Minor: 2, MemoryBytes: 24 << 30})
	for size, want := range map[int32][]string{1: {"GPU-b"}, 2: {"GPU-b", "GPU-a"}} {
		request := &pluginapi.ContainerPreferredAllocationRequest{AvailableDeviceIDs: []string{"GPU-a", "GPU-b", "GPU-c"}, AllocationSize: size}
		if got := c.prefer(request, usageOf(fixedLedger{}, noAllocations)); !slices.Equal(got, want) {
			t.Errorf("%d: %q, want %q", size, got, want)
		}
	}
}

// TestHeldOnly: what a pod has is healthy, so that its containers restart, and nothing is given to another pod.
func TestHeldOnly(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	if err := f.ledger.ReservePod([]ledger.PodRequest{{ID: uuid(1), Resource: kubeletGPU, Device: device.Ref{GPU: uuid(1)}}}); err != nil {
		t.Fatal(err)
	}
	f.ledger.claim("claim", 2)
	f.config.HeldOnly = errTest
	p, stop := f.start()
	state := f.await("the GPU of the pod", healthyCount(1))
	if got := state.Healthy(); !slices.Equal(got, []string{uuid(1)}) || len(state.Devices) != 8 {
		t.Errorf("healthy are %v of %d", got, len(state.Devices))
	}
	plugin, err := f.kubelet.Plugin()
	if err != nil {
		t.Fatal(err)
	}
	for gpu := range 3 {
		request := &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{uuid(gpu)}}}}
		if _, err := plugin.Allocate(t.Context(), request); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), errTest.Error()) {
			t.Errorf("allocate GPU %d: %v", gpu, err)
		}
	}
	f.awaitReady(p, "")
	stop()
	f.config.HeldOnly = nil
	f.start()
	f.await("all GPUs but that of the claim", healthyCount(7))
}

// TestRunAgain: the plugin of a node that serves limits no more runs each time a pod has a device.
func TestRunAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	f.startKubelet()
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		f.await("the list", healthyCount(8))
		f.awaitReady(p, "")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		f.await("the end", func(s kubeletState) bool { return len(s.Connected) == 0 })
	}
}

// An agent that stops answers an Allocate in flight, which may wait for the watch of pods: an error would fail the pod.
func TestStopAnswersASlowAllocate(t *testing.T) {
	f := newFixture(t, release137)
	f.startKubelet()
	_, stop := f.start()
	f.await("the list", healthyCount(8))
	plugin, err := f.kubelet.Plugin()
	if err != nil {
		t.Fatal(err)
	}
	allocate := func() error {
		_, err := plugin.Allocate(t.Context(), &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{uuid(1)}}}})
		return err
	}
	if err := allocate(); err != nil {
		t.Fatal(err)
	}
	f.ledger.asking, f.ledger.slow = make(chan struct{}), 2*defaultTimes.drain
	answer := make(chan error, 1)
	go func() { answer <- allocate() }()
	<-f.ledger.asking
	stop()
	if err := <-answer; err != nil {
		t.Error(err)
	}
}

// slowAnswers holds up each answer until it is released.
type slowAnswers struct{ written, release chan struct{} }

func (slowAnswers) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (slowAnswers) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (slowAnswers) HandleConn(context.Context, stats.ConnStats)                       {}
func (s slowAnswers) HandleRPC(_ context.Context, event stats.RPCStats) {
	if _, answer := event.(*stats.OutPayload); answer {
		close(s.written)
		<-s.release
	}
}

// A call counts until gRPC has queued its answer, not only until its handler returns.
func TestACallCountsUntilItsAnswerIsQueued(t *testing.T) {
	t.Parallel()
	f := newFixture(t, release137)
	p, err := New(f.config)
	if err != nil {
		t.Fatal(err)
	}
	calls := semaphore.NewWeighted(math.MaxInt64)
	answers := slowAnswers{make(chan struct{}), make(chan struct{})}
	server := grpc.NewServer(grpc.StatsHandler(callCounter{calls}), grpc.StatsHandler(answers))
	pluginapi.RegisterDevicePluginServer(server, &service{registrar: &registrar{Plugin: p}})
	path := filepath.Join(f.config.Directory, "s")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	conn, err := dial(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	answer := make(chan error, 1)
	go func() {
		_, err := pluginapi.NewDevicePluginClient(conn).GetDevicePluginOptions(t.Context(), &pluginapi.Empty{})
		answer <- err
	}()
	<-answers.written
	if calls.TryAcquire(math.MaxInt64) {
		calls.Release(math.MaxInt64)
		t.Error("the call does not count any more")
	}
	close(answers.release)
	if err := <-answer; err != nil {
		t.Error(err)
	}
	if err := calls.Acquire(t.Context(), math.MaxInt64); err != nil {
		t.Error(err)
	}
}
