// SPDX-License-Identifier: Apache-2.0

package restarts

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/pkg/cdi"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/pkg/partition"
	"github.com/tandem-gpu/tandem/simulated"
)

var loadCycles = flag.Int("load", 30, "partitions to make, and to destroy again, on each GPU beside one that fails; 1000 for a long run")

// gpuCalls are the calls about one GPU of an agent with MIG, driverCalls those about none.
var (
	gpuCalls = []string{
		"DeviceGetHandleByIndex", "DeviceGetHandleByPciBusId", "DeviceGetHandleByUUID", "GetUUID", "GetName", "GetMinorNumber", "GetPciInfo",
		"GetMemoryInfo", "GetEccMode", "GetPersistenceMode", "GetBrand", "GetArchitecture", "GetCudaComputeCapability", "GetNvLinkState",
		"GetTopologyCommonAncestor", "GetMigMode", "SetMigMode", "GetMaxMigDeviceCount", "GetMigDeviceHandleByIndex",
		"GetGpuInstanceProfileInfo", "GetGpuInstancePossiblePlacements", "GetGpuInstances", "GetGpuInstanceById",
		"CreateGpuInstanceWithPlacement", "GpuInstance.GetInfo", "GpuInstance.Destroy", "GpuInstance.GetComputeInstanceProfileInfo",
		"GpuInstance.CreateComputeInstance", "GpuInstance.GetComputeInstances", "GpuInstance.GetComputeInstanceById",
		"ComputeInstance.GetInfo", "ComputeInstance.Destroy", "MigDevice.GetUUID", "MigDevice.GetIndex", "MigDevice.GetGpuInstanceId",
		"MigDevice.GetComputeInstanceId", "MigDevice.GetAttributes", "IsMigDeviceHandle",
	}
	driverCalls = []string{"Init", "SystemGetDriverVersion", "SystemGetCudaDriverVersion", "DeviceGetCount"}
)

// node is an agent's part that makes partitions: it runs in this process, with scans and CDI specs.
type node struct {
	*testing.T
	host  string
	cdi   string
	nvml  *nvml.Node
	maker *partition.Maker
	specs *cdi.Specs

	mu    sync.Mutex
	times []time.Duration
}

func newNode(t *testing.T, host string) *node {
	t.Helper()
	n := &node{T: t, host: host, cdi: filepath.Join(host, "cdi")}
	var err error
	n.nvml, err = open(t.Context(), host)
	check(t, err)
	records := partition.NewRecords(filepath.Join(host, "records"), "boot")
	_, err = records.Load()
	check(t, err)
	n.maker = partition.NewMaker(records, n.nvml, partition.Policy{
		Dynamic: func(device.GPU) bool { return true },
		Sharing: func(device.GPU) device.Sharing { return device.Sharing{} },
	})
	n.specs = cdi.New(cdi.Options{Dir: n.cdi, Source: n.nvml, Interval: 50 * time.Millisecond})
	return n
}

// prepare makes a partition and its CDI device, as Prepare does.
func (n *node) prepare(ctx context.Context, want device.Partition) error {
	_, err := n.maker.Create(ctx, partition.Request{Partition: want, Reserved: func() error { return nil }, Publish: n.specs.Add})
	return err
}

// cycle makes a partition of a GPU and destroys it, each until it succeeds. measured: how long it took to make is recorded.
func (n *node) cycle(ctx context.Context, random *rand.Rand, index int, measured bool) error {
	gpu := n.maker.Inventory().GPUs[index]
	possible := gpu.Possible()
	if len(possible) == 0 {
		return fmt.Errorf("GPU %d has no profiles", index)
	}
	want := possible[random.IntN(len(possible))]
	began := time.Now()
	for {
		err := n.prepare(ctx, want)
		if err == nil {
			break
		}
		if measured || ctx.Err() != nil || time.Since(began) > time.Minute {
			return fmt.Errorf("make %s on GPU %d: %w", want.Name(), index, err)
		}
	}
	if measured {
		n.mu.Lock()
		n.times = append(n.times, time.Since(began))
		n.mu.Unlock()
	}
	if made, ok := n.maker.Inventory().ByRef(want.Ref); ok && measured {
		if _, err := os.Stat(filepath.Join(n.cdi, "tandem-k8s.gpu.nvidia.com-gpu-"+made.UUID()+".json")); err != nil && !n.specs.Has(made.UUID()) {
			return fmt.Errorf("partition %s was answered and has no CDI device: %w", made.UUID(), err)
		}
	}
	for destroy(ctx, n.maker, want.Ref) != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// load makes and destroys partitions on GPUs 1 and 2 until do ends, at least cycles times each.
func (n *node) load(ctx context.Context, measured bool, do func(context.Context) error) error {
	done := make(chan struct{})
	group, ctx := errgroup.WithContext(ctx)
	for index := 1; index <= 2; index++ {
		group.Go(func() error {
			random := rand.New(rand.NewPCG(*seed, uint64(index)))
			for i := 0; ; i++ {
				select {
				case <-done:
					if i >= *loadCycles {
						return nil
					}
				default:
				}
				if err := n.cycle(ctx, random, index, measured); err != nil {
					return err
				}
			}
		})
	}
	group.Go(func() error {
		defer close(done)
		return do(ctx)
	})
	return group.Wait()
}

// prepared returns the p99 and the longest of the times since the last call.
func (n *node) prepared() (p99, longest time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	slices.Sort(n.times)
	p99, longest = n.times[len(n.times)*99/100], n.times[len(n.times)-1]
	n.times = nil
	return p99, longest
}

func (n *node) fault(faults simulated.Faults) {
	check(n.T, simulated.WriteFaults(machineDir(n.host), faults))
}

// knows returns once a scan has seen that MIG mode of GPU 3, which an administrator switches, is on or off.
func (n *node) knows(ctx context.Context, admin *nvml.Node, on bool) error {
	uuid := admin.Inventory().GPUs[3].UUID
	set := admin.DisableMIG
	if on {
		set = admin.EnableMIG
	}
	if err := set(ctx, uuid); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for n.nvml.Inventory().GPUs[3].MIGEnabled != on {
		// Another scan may be under way that began before.
		if err := n.nvml.Scan(limited); err != nil && !errors.Is(err, nvml.ErrNoDriver) {
			return err
		}
		if limited.Err() != nil {
			return errors.New("the inventory is frozen")
		}
	}
	return nil
}

// hangs is the call for the failing GPU that takes longer than others are delayed, and hang how long.
const hangs, hang = "CreateGpuInstanceWithPlacement", 20 * time.Second

// One GPU fails at every call in turn, while partitions come and go on all GPUs. The others notice nothing: no operation on them fails or
// waits for the one that hangs, and scans go on. In the end no partition, no record and no CDI device is left.
func TestFaultAtEveryCallUnderLoad(t *testing.T) {
	if *seed == 0 {
		*seed = rand.Uint64N(1 << 31)
	}
	profile, err := simulated.Load("h100x8")
	check(t, err)
	profile.GPUs, profile.NVLink = profile.GPUs[:4], nil
	host := t.TempDir()
	check(t, simulated.Materialize(machineDir(host), profile, simulated.MaterializeOptions{}))
	n := newNode(t, host)
	admin, err := open(t.Context(), host)
	check(t, err)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	running, runCtx := errgroup.WithContext(ctx)
	running.Go(func() error { return n.nvml.Run(runCtx) })
	running.Go(func() error { return n.specs.Run(runCtx) })

	random := rand.New(rand.NewPCG(*seed, 0))
	// The failing GPU is used in both phases, so that only the faults differ.
	victim := func(ctx context.Context) error { return n.cycle(ctx, random, 0, false) }
	check(t, n.load(ctx, true, func(ctx context.Context) error {
		for range *loadCycles {
			if err := victim(ctx); err != nil {
				return err
			}
		}
		return nil
	}))
	before, longestBefore := n.prepared()
	faults := 0
	check(t, n.load(ctx, true, func(ctx context.Context) error {
		on := false
		for _, call := range gpuCalls {
			delay := 100 * time.Millisecond
			if call == hangs {
				delay = hang
			}
			for _, fault := range []simulated.CallFault{
				{Return: "ERROR_UNKNOWN", Times: 1}, {Return: "ERROR_UNKNOWN", Skip: 1, Times: 2}, {Return: "ERROR_GPU_IS_LOST", Times: 1},
				{Delay: simulated.Duration(delay), Times: 1},
			} {
				n.fault(simulated.Faults{GPUs: []simulated.GPUFaults{{GPU: "0", Calls: map[string]simulated.CallFault{call: fault}}}})
				faults++
				began := time.Now()
				if err := victim(ctx); err != nil {
					return fmt.Errorf("%s %+v: %w", call, fault, err)
				}
				if took := time.Since(began); time.Duration(fault.Delay) == hang && took < hang {
					return fmt.Errorf("%s did not hang: %s", call, took)
				}
			}
			on = !on
			if err := n.knows(ctx, admin, on); err != nil {
				return fmt.Errorf("%s: %w", call, err)
			}
		}
		n.fault(simulated.Faults{})
		return nil
	}))
	under, longest := n.prepared()
	check(t, n.load(ctx, false, func(ctx context.Context) error {
		for _, call := range driverCalls {
			n.fault(simulated.Faults{Calls: map[string]simulated.CallFault{call: {Return: "ERROR_UNKNOWN", Times: 3}}})
			faults++
			if err := victim(ctx); err != nil {
				return fmt.Errorf("%s: %w", call, err)
			}
		}
		n.fault(simulated.Faults{})
		return nil
	}))
	t.Logf("load: seed=%d faults=%d prepare_p99=%s prepare_p99_under_faults=%s", *seed, faults, before, under)
	// Load of other programs comes and goes between the phases, so only a Prepare that waits for the failing GPU is longer than this.
	if most := min(3*longestBefore, hang/4) + hang/2; longest > most {
		t.Errorf("with a failing GPU Prepare of the others takes up to %s, without up to %s", longest, longestBefore)
	}
	check(t, n.nvml.Scan(ctx))
	for i, gpu := range n.nvml.Inventory().GPUs {
		if left, err := admin.Partitions(ctx, gpu.UUID); err != nil || len(left) > 0 || len(gpu.Partitions) > 0 {
			t.Errorf("GPU %d: left behind %v, known %v, %v", i, left, gpu.Partitions, err)
		}
	}
	if records, err := os.ReadDir(filepath.Join(host, "records")); err != nil || len(records) > 0 {
		t.Errorf("records left behind: %v, %v", records, err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left, err := filepath.Glob(filepath.Join(n.cdi, "*MIG-*.json"))
		check(t, err)
		if len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("CDI devices left behind: %v", left)
		}
	}
	stop()
	check(t, running.Wait())
}
