// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

const otherDriver = "nvidia-dra.example.com"

// published is a slice of another driver with one device.
func published(driver, attribute, value string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "other"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: ptr.To(testNode), Pool: resourceapi.ResourcePool{Name: testNode, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-7", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				resourceapi.QualifiedName(attribute): {StringValue: &value},
			}}},
		},
	}
}

func (r *rig) awaitForeign(want bool) (found *ForeignDriverError) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("withheld for another driver: %v", want), func() error {
		withheld := r.ledger.Withheld()
		var is bool
		if found, is = errors.AsType[*ForeignDriverError](withheld); is != want {
			return fmt.Errorf("withheld: %v", withheld)
		}
		return nil
	})
	return found
}

// Another DRA driver publishes a GPU of this node under its own name.
func TestDriverOfAnotherName(t *testing.T) {
	t.Parallel()
	inventory := machine(2)
	inventory.GPUs[1].PCIBusID = "0000:1b:00.0"
	inventory.GPUs[1].Partitions = []device.Partition{{UUID: "MIG-1"}}
	for _, test := range []struct {
		name, driver, attribute, value string
		ours                           bool
	}{
		{"NVIDIA's driver by another name", otherDriver, "uuid", inventory.GPUs[0].UUID, true},
		{"an attribute of a domain", otherDriver, "gpu.example.com/gpuUUID", inventory.GPUs[0].UUID, true},
		{"a partition", otherDriver, "uuid", "MIG-1", true},
		{"a PCI address", otherDriver, "resource.kubernetes.io/pciBusID", "0000:1b:00.0", true},
		{"a network card", otherDriver, "resource.kubernetes.io/pciBusID", "0000:2c:00.0", false},
		{"another node's GPU", otherDriver, "uuid", "GPU-of-another-node", false},
		{"another attribute", otherDriver, "sibling", inventory.GPUs[0].UUID, false},
		{"our own slice", "gpu.nvidia.com", "uuid", inventory.GPUs[0].UUID, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, inventory)
			r.api.put("resourceslices", published(test.driver, test.attribute, test.value))
			r.driver.FindConflicting(t.Context())
			found, foreign := errors.AsType[*ForeignDriverError](r.ledger.Withheld())
			if foreign != test.ours {
				t.Fatalf("withheld: %v", r.ledger.Withheld())
			}
			if foreign && (found.DriverName != otherDriver || found.Value != test.value || !strings.Contains(found.Error(), "uninstall it")) {
				t.Errorf("says %v", found)
			}
		})
	}
}

func TestDriverOfAnotherNameForExcludedGPUs(t *testing.T) {
	t.Parallel()
	inventory := machine(2)
	mine := func(gpu device.GPU) bool { return gpu.UUID == inventory.GPUs[0].UUID }
	none := func(device.GPU) bool { return false }
	r := newRig(t, inventory, func(c *Config) { c.OfferedToClaims, c.OfferedToPods = none, mine })
	r.api.put("resourceslices", published(otherDriver, "uuid", inventory.GPUs[1].UUID))
	r.driver.FindConflicting(t.Context())
	if err := r.ledger.Withheld(); err != nil {
		t.Errorf("withheld for a GPU that Tandem does not manage: %v", err)
	}
	r.api.put("resourceslices", published(otherDriver, "uuid", inventory.GPUs[0].UUID))
	r.driver.FindConflicting(t.Context())
	r.awaitForeign(true)
}

// It comes while claims are served, and goes again. Devices stay withheld while pods use claims that it prepared.
func TestDriverOfAnotherNameComesAndGoes(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1), func(c *Config) { c.CheckInterval = 10 * time.Millisecond })
	r.run()
	r.ready()
	r.api.put("resourceslices", published(otherDriver, "uuid", r.driver.Inventory.Inventory().GPUs[0].UUID))
	r.awaitForeign(true)
	if r.driver.Ready() == nil {
		t.Error("ready beside another driver")
	}
	eventually(t, "the event", func() error {
		if all := r.events.all(); !strings.Contains(all, "ConflictingDriver: DRA driver "+otherDriver) {
			return fmt.Errorf("events: %s", all)
		}
		return nil
	})
	r.writeClaimState(t, otherDriver, "gpu-7")
	r.api.remove("resourceslices", "other")
	eventually(t, "the claim of the driver that is gone", func() error {
		if found := r.awaitForeign(true); found.Claim != "apps/one" {
			return found
		}
		return nil
	})
	r.pods.ended.Store(true)
	r.awaitForeign(false)
	r.ready()
}

// An API server that does not answer may have slices of another driver.
func TestDriverOfAnotherNameIsNotKnown(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1))
	r.api.set(func() { r.api.failAll = apierrors.NewServiceUnavailable("away") })
	r.driver.FindConflicting(t.Context())
	if r.ledger.Withheld() == nil {
		t.Error("serves without knowing whether another driver does")
	}
	r.run()
	eventually(t, "an event", func() error {
		if all := r.events.all(); !strings.Contains(all, "look for other DRA drivers of this node's GPUs") {
			return fmt.Errorf("events: %s", all)
		}
		return nil
	})
	r.api.set(func() { r.api.failAll = nil })
	r.ready()
}

func TestDriverOfAnotherNameWithoutDRA(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1))
	r.api.serve("resourceslices", false)
	r.driver.FindConflicting(t.Context())
	if err := r.ledger.Withheld(); err != nil {
		t.Errorf("withheld where there is no DRA API: %v", err)
	}
}

// A GPU that the inventory lacked when the other driver published it.
func TestDriverOfAnotherNameForAGPUThatComesLate(t *testing.T) {
	t.Parallel()
	both := machine(2)
	r := newRig(t, device.Inventory{GPUs: both.GPUs[:1]})
	r.api.put("resourceslices", published(otherDriver, "uuid", both.GPUs[1].UUID))
	r.run()
	r.ready()
	r.inventory.set(both)
	r.awaitForeign(true)
}

// Two drivers: the pods of one that is gone keep the devices withheld, whichever goes first.
func TestTwoDriversOfOtherNames(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1), func(c *Config) { c.CheckInterval = 10 * time.Millisecond })
	uuid := r.driver.Inventory.Inventory().GPUs[0].UUID
	second := published("second.example.com", "uuid", uuid)
	second.Name = "second"
	r.api.put("resourceslices", published(otherDriver, "uuid", uuid))
	r.api.put("resourceslices", second)
	r.writeClaimState(t, otherDriver, "gpu-7")
	r.run()
	r.awaitForeign(true)
	r.api.remove("resourceslices", "other")
	r.api.remove("resourceslices", "second")
	eventually(t, "the claim of the first driver", func() error {
		if found := r.awaitForeign(true); found.Claim != "apps/one" {
			return found
		}
		return nil
	})
	// Tandem itself, under another name.
	_, err := r.ledger.ReserveClaim(t.Context(), ledger.ClaimRequest{UID: "c1", Namespace: "apps", Name: "one", Devices: []device.Ref{{GPU: "GPU-x"}}})
	if _, withheld := errors.AsType[*ledger.WithheldError](err); !withheld {
		t.Errorf("reserved beside another driver: %v", err)
	}
	if err := r.ledger.Expect(ledger.Hold{Holder: ledger.Holder{Kind: ledger.KindClaim, ID: "c1"}, Device: device.Ref{GPU: uuid}}); err != nil {
		t.Fatal(err)
	}
	r.awaitForeign(false)
}

// writeClaimState makes kubelet name a claim of a pod that a driver has prepared.
func (r *rig) writeClaimState(t *testing.T, driver, device string) {
	t.Helper()
	inner := fmt.Sprintf(`{"ClaimInfoStateList":[{"ClaimUID":"c1","ClaimName":"one","Namespace":"apps","PodUIDs":{"p1":{}},
		"DriverState":{%q:{"Devices":[{"PoolName":%q,"DeviceName":%q}]}}}]}`, driver, testNode, device)
	state := fmt.Sprintf(`{"Data":%q,"Checksum":%d}`, inner, crc32.ChecksumIEEE([]byte(inner)))
	if err := os.WriteFile(filepath.Join(r.dir, "dra_manager_state"), []byte(state), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The other driver keeps other devices: its claims of these do not count.
func TestDriverOfAnotherNameKeepsOtherDevices(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1))
	r.writeClaimState(t, otherDriver, "gpu-8")
	r.api.put("resourceslices", published(otherDriver, "uuid", r.driver.Inventory.Inventory().GPUs[0].UUID))
	r.run()
	r.awaitForeign(true)
	r.api.put("resourceslices", published(otherDriver, "uuid", "GPU-of-another-node"))
	r.awaitForeign(false)
}
