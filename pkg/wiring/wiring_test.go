// SPDX-License-Identifier: Apache-2.0

package wiring

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
	"github.com/tandem-gpu/tandem/pkg/legacy"
	"github.com/tandem-gpu/tandem/pkg/partition"
)

// hardware counts the readings of settings.
type hardware struct {
	Hardware
	gpus []device.GPU
	read *int
}

func (hardware) DriverRoot() string                                             { return "/" }
func (h hardware) Inventory() device.Inventory                                  { return device.Inventory{GPUs: h.gpus} }
func (hardware) Changed() <-chan struct{}                                       { return nil }
func (hardware) Partitions(context.Context, string) ([]device.Partition, error) { return nil, nil }
func (h hardware) Settings(context.Context, string) (device.Settings, error) {
	*h.read++
	return device.Settings{GraphicsClock: 1000}, nil
}

// connected are the parts of a node with these GPUs, by default one without partitions.
func connected(t testing.TB, c config.Config, gpus ...device.GPU) (p *Parts, settingsRead *int) {
	t.Helper()
	if gpus == nil {
		profile := device.Profile{ID: 19, Name: "1g.10gb", Placements: []device.Placement{{Size: 1}}, Instances: 7}
		gpus = []device.GPU{{UUID: "GPU-a", MIGCapable: true, Profiles: []device.Profile{profile}}}
	}
	c.KubeletDir, c.RunDir, c.CgroupRoot = t.TempDir(), t.TempDir(), t.TempDir()
	settingsRead = new(int)
	p, err := New(Options{Config: c, BootID: "boot", Hardware: hardware{gpus: gpus, read: settingsRead}, Registerer: prometheus.NewRegistry(), Recorder: &record.FakeRecorder{}})
	if err != nil {
		t.Fatal(err)
	}
	if problems, err := p.Open(t.Context()); err != nil || len(problems) > 0 {
		t.Fatal(problems, err)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.Ledger.Close(), p.Resources.Close()); err != nil {
			t.Error(err)
		}
	})
	p.Connect(c)
	return p, settingsRead
}

// displayed is the hardware of a host with a process that may be its display server.
type displayed struct {
	hardware
	compute, graphics []int
}

func (d displayed) Processes(context.Context, string) (compute, graphics []int, err error) {
	return d.compute, d.graphics, nil
}

func (displayed) Reset(context.Context, string) error { return nil }

// A display server of the host does not keep a GPU from being handed over; a CUDA program on the host does.
func TestDisplayServerOfTheHostMayStay(t *testing.T) {
	c := config.Defaults()
	c.ProcRoot = t.TempDir()
	if err := os.Mkdir(filepath.Join(c.ProcRoot, "7"), 0o755); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{"cgroup": "0::/user.slice/session-1.scope\n", "stat": "7 (Xorg) S 1"} {
		if err := os.WriteFile(filepath.Join(c.ProcRoot, "7", file), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p, _ := connected(t, c, device.GPU{UUID: "GPU-a"})
	for _, test := range []struct {
		compute, graphics []int
		may               bool
	}{{graphics: []int{7}, may: true}, {compute: []int{7}}} {
		p.Hardware = displayed{compute: test.compute, graphics: test.graphics}
		if done, err := p.newCleaner().ResetIdle(t.Context(), "GPU-a"); done != test.may || (err == nil) != test.may {
			t.Errorf("%+v: reset %v, %v", test, done, err)
		}
	}
}

// A hold whose partition is still recorded is not released for another holder: the reconciler destroys the partition first.
func TestPartitionsEndBeforeTheirHolds(t *testing.T) {
	p, _ := connected(t, config.Defaults())
	made := device.Ref{GPU: "GPU-a", Placement: device.Placement{Size: 1}}
	unprepared := errors.New("unprepared after the record")
	request := partition.Request{Partition: device.Partition{Ref: made, ProfileID: 19}, Reserved: func() error { return unprepared }}
	if _, err := p.Partitions.Create(t.Context(), request); !errors.Is(err, unprepared) {
		t.Fatal(err)
	}
	for ref, want := range map[device.Ref]bool{made: true, {GPU: "GPU-a"}: false} {
		if got := p.cleanupPending(ledger.Hold{Device: ref, Holder: ledger.Holder{Kind: ledger.KindClaim}}); got != want {
			t.Errorf("cleanup of %s is pending: %t, want %t", ref, got, want)
		}
	}
}

// The driver hands a GPU over before it prepares a claim: the settings are known that the holder may change.
func TestClaimsAreHandedOver(t *testing.T) {
	p, read := connected(t, config.Defaults())
	if _, err := p.Ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "c1", Namespace: "apps", Name: "one", Devices: []device.Ref{{GPU: "GPU-a"}}}); err != nil {
		t.Fatal(err)
	}
	if err := p.claimsConfig(Serving{Config: p.Config}).HandOver(t.Context(), "GPU-a"); err != nil || *read != 1 {
		t.Errorf("handed over: %v, after %d readings of the settings, want 1", err, *read)
	}
}

// The configuration reaches the device plugin.
func TestPluginConfig(t *testing.T) {
	c := config.Config{
		NodeName: "node-1", Mode: config.ModeDual,
		ResourceName: "nvidia.com/gpu", MIGStrategy: device.MIGStrategyMixed, AllocationPolicy: "packed",
		DeviceListStrategies: []string{"envvar", "volume-mounts"}, DeviceIDStrategy: "index",
		CDIAnnotationPrefix: "cdi.example.com/", PassDeviceSpecs: true,
	}
	p, _ := connected(t, c)
	got := p.limitsConfig(Serving{Config: p.Config})
	for what, passed := range map[string]bool{
		"NodeName":         got.NodeName == "node-1",
		"Directory":        got.Directory == filepath.Join(p.Config.KubeletDir, "device-plugins"),
		"Resources":        got.Resources == device.Resources{GPU: "nvidia.com/gpu", Strategy: device.MIGStrategyMixed},
		"Packed":           got.Packed,
		"Strategies":       slices.Equal(got.Strategies, []legacy.Strategy{legacy.StrategyEnvVar, legacy.StrategyVolumeMounts}),
		"IndexIDs":         got.IndexIDs,
		"AnnotationPrefix": got.AnnotationPrefix == "cdi.example.com/",
		"PassDeviceSpecs":  got.PassDeviceSpecs,
		"Retiring":         !got.Retiring,
	} {
		if !passed {
			t.Errorf("%s is not as configured: %+v", what, got)
		}
	}
}

// The namespace of the configuration counts only if the agent runs in a pod. Otherwise it is only assumed.
func TestMonitorNamespaces(t *testing.T) {
	c := config.Defaults()
	c.MonitorNamespaces, c.ExemptNamespaces = []string{"monitoring"}, []string{"gpu-operator"}
	if got, want := monitorNamespaces(c), []string{"kube-system", "gpu-operator", "monitoring"}; !slices.Equal(got, want) {
		t.Errorf("outside a pod: %q, want %q", got, want)
	}
	c.PodUID, c.Namespace = "own", "tandem-system"
	if got, want := monitorNamespaces(c), []string{"kube-system", "gpu-operator", "monitoring", "tandem-system"}; !slices.Equal(got, want) {
		t.Errorf("in a pod: %q, want %q", got, want)
	}
}

// BenchmarkInventory computes the last view of eight GPUs with seven static partitions each.
func BenchmarkInventory(b *testing.B) {
	var gpus []device.GPU
	for i := range 8 {
		gpu := device.GPU{UUID: fmt.Sprintf("GPU-%d", i), Minor: i, MIGCapable: true, MIGEnabled: true}
		for at := range 7 {
			ref := device.Ref{GPU: gpu.UUID, Placement: device.Placement{Start: at, Size: 1}}
			gpu.Partitions = append(gpu.Partitions, device.Partition{Ref: ref, UUID: fmt.Sprintf("MIG-%d-%d", i, at), ProfileID: 19})
		}
		gpus = append(gpus, gpu)
	}
	p, _ := connected(b, config.Config{}, gpus...)
	for b.Loop() {
		p.Views.Offered.Inventory()
	}
}

// The driver tells the GPUNode in which pools the GPUs are.
func TestPoolsReachTheGPUNode(t *testing.T) {
	c := config.Defaults()
	c.NodeName = "node-1"
	p, _ := connected(t, c)
	p.REST, c.KubeletDir = &rest.Config{Host: "127.0.0.1:1"}, "/kubelet" // a short path
	apis, err := p.NewAPIs(Serving{Config: c, Registerer: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	changed := apis.GPUNode.Changed()
	apis.Claims.Placed(map[string]string{"GPU-a": "node-1/gpu-00"})
	select {
	case <-changed:
	default:
		t.Error("the GPUNode does not know")
	}
}

// TestNothingIsLostWithoutADriver: an agent that cannot read any GPU does not know that one which is held has gone.
func TestNothingIsLostWithoutADriver(t *testing.T) {
	c := config.Defaults()
	p, _ := connected(t, c)
	unread := true
	config := p.gpuNodeConfig(Serving{Config: c, Unread: func() bool { return unread }})
	if !config.Unread() {
		t.Error("without a driver GPUs count as read")
	}
	if unread = false; config.Unread() {
		t.Error("with a driver that finds no GPU, GPUs count as not read")
	}
}

// A reset ends all GPU instances: a dynamic GPU with a partition of the administrator must not be reset.
func TestResetOfADynamicGPUWithStaticPartitions(t *testing.T) {
	ref := device.Ref{GPU: "GPU-a", Placement: device.Placement{Start: 0, Size: 4}}
	gpu := device.GPU{
		UUID: "GPU-a", MIGCapable: true, MIGEnabled: true, ComputeCapability: "9.0",
		Profiles:   []device.Profile{{ID: 9, Name: "3g.40gb", Placements: []device.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}, Instances: 2}},
		Partitions: []device.Partition{{UUID: "MIG-admin", Ref: ref, Profile: "3g.40gb", ProfileID: 9}},
	}
	p, _ := connected(t, config.Defaults(), gpu)
	p.GPUs = &partition.Policy{
		Dynamic: func(device.GPU) bool { return true },
		Sharing: func(device.GPU) device.Sharing { return device.Sharing{} },
	}
	p.Registerer = nil
	// Only the maker has to be made again, with a policy by which the GPU is dynamic.
	p.Partitions = partition.NewMaker(p.records.Partitions, p.Hardware, *p.GPUs)
	p.Views.Configured = p.Partitions
	if got := p.Views.Configured.Inventory().GPUs[0]; !got.Dynamic || got.Partitions[0].Made {
		t.Fatalf("unexpected inventory: %+v", got)
	}
	if err := p.resettable("GPU-a"); err == nil {
		t.Error("a GPU with a partition that Tandem did not create may be reset, which destroys the partition")
	}
}
