// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/broadcast"
	gpu "github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/simulated"
)

// counted knows how many sessions are open.
type counted struct {
	*simulated.Library
	sessions *int
	// persistence is what all GPUs report.
	persistence gonvml.EnableState
}

func (c counted) Init() gonvml.Return {
	*c.sessions++
	return c.Library.Init()
}

func (c counted) Shutdown() gonvml.Return {
	*c.sessions--
	return c.Library.Shutdown()
}

func (c counted) DeviceGetHandleByIndex(index int) (gonvml.Device, gonvml.Return) {
	d, ret := c.Library.DeviceGetHandleByIndex(index)
	return persistent{d, c.persistence}, ret
}

type persistent struct {
	gonvml.Device
	mode gonvml.EnableState
}

func (p persistent) GetPersistenceMode() (gonvml.EnableState, gonvml.Return) {
	return p.mode, gonvml.SUCCESS
}

// The session is let go between scans, so that the driver can be unloaded, unless that would de-initialise a GPU.
func TestSessionBetweenScans(t *testing.T) {
	for name, test := range map[string]struct {
		mode gonvml.EnableState
		open int
	}{
		"persistence mode on":  {gonvml.FEATURE_ENABLED, 0},
		"persistence mode off": {gonvml.FEATURE_DISABLED, 1},
	} {
		t.Run(name, func(t *testing.T) {
			options := fixture(t, "host-rhel")
			library, err := options.OpenLibrary()
			if err != nil {
				t.Fatal(err)
			}
			sessions := 0
			options.OpenLibrary = func() (gonvml.Interface, error) {
				return counted{library.(*simulated.Library), &sessions, test.mode}, nil
			}
			node := mustOpen(t, options)
			if sessions != test.open {
				t.Errorf("%d sessions after a scan, want %d", sessions, test.open)
			}
			if _, err := node.ContainerEdits(t.Context()); err != nil {
				t.Fatal(err)
			}
			if sessions != test.open {
				t.Errorf("%d sessions after container edits, want %d", sessions, test.open)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := node.Run(ctx); err != nil {
				t.Fatal(err)
			}
			if sessions != 0 {
				t.Errorf("%d sessions after Run, want none", sessions)
			}
		})
	}
}

// A call into a broken GPU may never return: the others are served all the same, and so is that one when it does return.
func TestGPUThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.find()
		n.fault(hangs("GetMemoryInfo"))
		began := time.Now()
		for gpus := n.Inventory().GPUs; gpus[1].Health.Healthy(); gpus = n.Inventory().GPUs {
			if err := n.scan(); err != nil {
				t.Fatal(err)
			}
			if !gpus[0].Health.Healthy() || t.Context().Err() != nil {
				t.Fatalf("health %+v and %+v, want only the second unreachable", gpus[0].Health, gpus[1].Health)
			}
		}
		if g := n.Inventory().GPUs[1]; g.Health.Reason != gpu.ReasonUnreachable || time.Since(began) < n.options.patience {
			t.Errorf("health %+v after %v: once late is no failure", g.Health, time.Since(began))
		}
		edits, err := n.ContainerEdits(t.Context())
		if err != nil || len(edits.Devices) != 1 {
			t.Errorf("%d devices with edits (%v), want 1", len(edits.Devices), err)
		}

		n.fault(simulated.GPUFaults{}) // which also ends the call that hangs
		for !n.Inventory().GPUs[1].Health.Healthy() {
			if err := n.scan(); err != nil {
				t.Fatal(err)
			}
			if t.Context().Err() != nil {
				t.Fatal("never recovered")
			}
		}
		if len(n.late)+len(n.slow) != 0 || n.session.users != 0 {
			t.Errorf("%d visits and %d uses of the session left", len(n.late), n.session.users)
		}
	})
}

// The same for a call that only container edits make: no other caller waits for it, neither scans nor the edits of other GPUs,
// and the writer of the CDI spec is notified when the GPU answers.
func TestGPUThatDoesNotAnswerForItsEdits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.find()
		first := n.Inventory().GPUs[0].UUID
		n.faultBoth(hangs("GetIndex"), simulated.GPUFaults{})
		for range 2 {
			edits, err := n.ContainerEdits(t.Context())
			if err != nil || len(edits.Devices) != 1 || !errors.Is(edits.Failed[first], errNoAnswer) {
				t.Fatalf("%d devices with edits (%v), want 1; %s failed with %v", len(edits.Devices), err, first, edits.Failed[first])
			}
			if err := n.scan(); err != nil || !n.Inventory().GPUs[0].Health.Healthy() {
				t.Fatalf("scan: %v, health %+v", err, n.Inventory().GPUs[0].Health)
			}
		}

		changed := n.Changed()
		n.faultBoth(simulated.GPUFaults{}, simulated.GPUFaults{}) // which also ends the call that hangs
		for !broadcast.Happened(changed) {
			if err := n.scan(); err != nil {
				t.Fatal(err)
			}
			if t.Context().Err() != nil {
				t.Fatal("never told")
			}
		}
		if edits, err := n.ContainerEdits(t.Context()); err != nil || len(edits.Devices) != 2 {
			t.Errorf("%d devices with edits (%v), want 2", len(edits.Devices), err)
		}
		if len(n.late) != 0 || n.session.users != 0 {
			t.Errorf("%d calls and %d uses of the session left", len(n.late), n.session.users)
		}
	})
}

// The same of a call that concerns no particular GPU.
func TestDriverThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newHangNode(t)
		n.find()
		for _, call := range []string{"Init", "DeviceGetCount"} {
			if err := simulated.WriteFaults(n.faults, simulated.Faults{Calls: hangs(call).Calls}); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if err := n.scan(); !errors.Is(err, errSilent) {
					t.Fatalf("%s hangs: scan says %v, want errSilent", call, err)
				}
				if h := n.Inventory().GPUs[1].Health; h.Reason != gpu.ReasonUnreachable {
					t.Fatalf("%s hangs: health %+v, want unreachable", call, h)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := n.Run(ctx); err != nil {
				t.Errorf("%s hangs: Run that is to end says %v", call, err)
			}
			if err := simulated.WriteFaults(n.faults, simulated.Faults{}); err != nil {
				t.Fatal(err)
			}
			for n.scan() != nil {
				if t.Context().Err() != nil {
					t.Fatal("never recovered")
				}
			}
			if h := n.Inventory().GPUs[1].Health; !h.Healthy() || n.session.users != 0 {
				t.Errorf("%s returns: health %+v, %d uses of the session left", call, h, n.session.users)
			}
		}
	})
}

// A GPU that was replaced leaves its minor number to another, and must not be published beside it.
func TestReplacedGPU(t *testing.T) {
	options := fixture(t, "host-rhel")
	profile, err := simulated.Load("l4x4")
	if err != nil {
		t.Fatal(err)
	}
	profile.GPUs = profile.GPUs[:2]
	options.OpenLibrary = func() (gonvml.Interface, error) { return simulated.New(profile), nil }
	node := mustOpen(t, options)
	before := node.Inventory()
	changed := simulated.New(profile, simulated.WithSeed("another"))
	node.session.library = &guard{Interface: changed}
	if err := node.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	after := node.Inventory()
	if len(after.GPUs) != 2 || after.GPUs[0].UUID == before.GPUs[0].UUID || !after.GPUs[0].Health.Healthy() {
		t.Errorf("GPUs %+v", after.GPUs)
	}
}

func TestDomainsWithoutSwitch(t *testing.T) {
	// Two pairs with direct links; the second with one end that does not see its link.
	endpoints := []endpoint{
		{uuid: "d", pci: "0000:04:00.0", device: linked{peers: []string{"0000:03:00.0"}}},
		{uuid: "a", pci: "0000:01:00.0", device: linked{peers: []string{"0000:02:00.0", "0000:02:00.0"}}},
		{uuid: "b", pci: "0000:02:00.0", device: linked{peers: []string{"0000:01:00.0", "0000:01:00.0"}}},
		{uuid: "c", pci: "0000:03:00.0", device: linked{}},
	}
	all := func(e endpoint, others []endpoint) (links, bool) { return readLinks(e, others), true }
	got := readTopology(endpoints, topology{}, all)
	for uuid, want := range map[string]string{
		"a": "nvlink-0000:01:00.0", "b": "nvlink-0000:01:00.0", "c": "nvlink-0000:03:00.0", "d": "nvlink-0000:03:00.0",
	} {
		if got.domains[uuid] != want {
			t.Errorf("%s is in %q, want %q", uuid, got.domains[uuid], want)
		}
	}
	if links := got.pairs[keyOf("b", "a")].NVLinks; links != 2 {
		t.Errorf("%d links a-b, want 2", links)
	}
	// Without a and c: what they were connected to is kept.
	again := readTopology(endpoints[:1], got, all)
	if links := again.pairs[keyOf("a", "b")].NVLinks; links != 2 || again.domains["a"] != "nvlink-0000:01:00.0" {
		t.Errorf("GPUs that do not answer lost their connections: %+v", again)
	}
}

// linked has direct NVLinks to PCI addresses.
type linked struct {
	gonvml.Device
	peers []string
}

func (l linked) GetNvLinkState(link int) (gonvml.EnableState, gonvml.Return) {
	if link < len(l.peers) {
		return gonvml.FEATURE_ENABLED, gonvml.SUCCESS
	}
	return gonvml.FEATURE_DISABLED, gonvml.ERROR_NOT_SUPPORTED
}

func (l linked) GetNvLinkRemoteDeviceType(int) (gonvml.IntNvLinkDeviceType, gonvml.Return) {
	return gonvml.NVLINK_DEVICE_TYPE_GPU, gonvml.SUCCESS
}

// GetNvLinkRemotePciInfo writes the domain with eight digits, as NVML does.
func (l linked) GetNvLinkRemotePciInfo(link int) (gonvml.PciInfo, gonvml.Return) {
	var info gonvml.PciInfo
	for i, c := range []byte("0000" + l.peers[link]) {
		info.BusId[i] = int8(c)
	}
	return info, gonvml.SUCCESS
}

func (l linked) GetTopologyCommonAncestor(gonvml.Device) (gonvml.GpuTopologyLevel, gonvml.Return) {
	return gonvml.TOPOLOGY_SYSTEM, gonvml.SUCCESS
}
