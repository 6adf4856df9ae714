// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/pkg/device"
	"github.com/tandem-gpu/tandem/pkg/ledger"
)

// Only GPUs for claims are published. A claim that has another GPU from before is still prepared.
func TestOnlyOfferedGPUsArePublished(t *testing.T) {
	t.Parallel()
	forClaims := func(gpu device.GPU) bool { return gpu.Minor >= 2 }
	r := newRig(t, machine(4), func(c *Config) {
		c.OfferedToClaims = forClaims
		c.OfferedToPods = func(gpu device.GPU) bool { return !forClaims(gpu) }
	}).run()
	r.ready()
	r.awaitPublished("gpu-2 gpu-3")
	r.takeByPod(0, nil)
	r.takeByPod(3, nil)
	r.awaitPublished("gpu-2 gpu-3!held-by-pod")
	if n := r.metric("tandem_claim_withdrawals_total"); n != 1 {
		t.Error("withdrawals:", n)
	}
	c := r.claim("a", "gpu-1")
	if results, err := r.driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c}); err != nil || results[c.UID].Err != nil {
		t.Error(results[c.UID].Err)
	}
	if got, want := r.driver.podSlots(machine(4))["nvidia.com/gpu"], []ledger.Slot{{Device: refOf(0)}, {Device: refOf(1)}}; !slices.Equal(got, want) {
		t.Errorf("pods may use %v, want %v", got, want)
	}
}

// PublishNothing removes existing slices and serves claims that were allocated from them.
func TestPublishNothing(t *testing.T) {
	t.Parallel()
	for name, gpus := range map[string]func() device.Inventory{
		"whole GPUs": func() device.Inventory { return machine(3) },
		"on demand":  threeGPUs,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, gpus()).run()
			r.ready()
			if err := r.stop(); err != nil {
				t.Fatal(err)
			}
			next := newRig(t, gpus(), func(c *Config) { c.KubeClient, c.PublishNothing = r.api.client(t), true })
			next.run()
			startKubelet(t, next.dir, "gpu.nvidia.com")
			eventually(t, "no slices", func() error {
				if left := r.api.slices(); len(left) > 0 {
					return fmt.Errorf("%d slices, of %q", len(left), r.published())
				}
				return nil
			})
			eventually(t, "Ready", next.driver.Ready)
			c := next.claim("a", "gpu-1")
			if results, err := next.driver.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{c}); err != nil || results[c.UID].Err != nil {
				t.Error(results[c.UID].Err)
			}
		})
	}
}

// An API server without claims is reported once, and waited for.
func TestServerWithoutClaims(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(4))
	r.api.serve("resourceslices", false)
	r.run()
	eventually(t, "the reason", func() error {
		if err := r.driver.Ready(); !errors.Is(err, ErrNoAPI) {
			return err
		}
		return nil
	})
	r.api.serve("resourceslices", true)
	r.ready()
	if reported := strings.Count(r.events.all(), "NoClaimsAPI"); reported != 1 {
		t.Errorf("reported %d times: %s", reported, r.events.all())
	}
}

// An agent that starts while the API server is away unprepares claims, and publishes once the API server is back.
func TestServesWithoutAPIServer(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(1))
	claim := r.claim("a", "gpu-0")
	r.api.set(func() { r.api.failAll = apierrors.NewServiceUnavailable("away") })
	r.run()
	k := startKubelet(t, r.dir, "gpu.nvidia.com")
	if errs, err := k.unprepare("v1", claim); err != nil || len(errs) > 0 {
		t.Error(err, errs)
	}
	if r.driver.Ready() == nil {
		t.Error("Ready without an API server")
	}
	r.api.set(func() { r.api.failAll = nil })
	eventually(t, "Ready", r.driver.Ready)
	r.awaitPublished("gpu-0")
}

// TestHeldOnly: claims are unprepared, and what earlier agents published stays as it is, also once the API server answers.
func TestHeldOnly(t *testing.T) {
	t.Parallel()
	r := newRig(t, machine(2), func(c *Config) { c.HeldOnly = errors.New("too early") })
	r.api.put("resourceslices", &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "before"},
		Spec:       resourceapi.ResourceSliceSpec{Driver: "gpu.nvidia.com", NodeName: ptr.To(testNode), Pool: resourceapi.ResourcePool{Name: testNode, ResourceSliceCount: 1}},
	})
	held, free := r.claim("a", "gpu-0"), r.claim("b", "gpu-1")
	request := ledger.ClaimRequest{UID: string(held.UID), Namespace: held.Namespace, Name: held.Name, Devices: []device.Ref{{GPU: uuidOf(0)}}}
	if _, err := r.ledger.ReserveClaim(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	r.run()
	k := startKubelet(t, r.dir, "gpu.nvidia.com")
	for _, claim := range []*resourceapi.ResourceClaim{held, free} {
		if _, _, err := k.prepare("v1", claim); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "too early") {
			t.Errorf("prepare %s: %v", claim.Name, err)
		}
	}
	if got := r.holders(); got != "gpu-0: claim uid-a held" {
		t.Error("held:", got)
	}
	if errs, err := k.unprepare("v1", held); err != nil || len(errs) > 0 {
		t.Error(err, errs)
	}
	if got := r.holders(); got != "" {
		t.Error("held:", got)
	}
	if r.driver.Ready() == nil {
		t.Error("ready")
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
	r.api.mu.Lock()
	defer r.api.mu.Unlock()
	if r.api.writes > 0 || len(r.api.objects["resourceslices"]) != 1 {
		t.Errorf("%d writes, slices %v", r.api.writes, r.api.objects["resourceslices"])
	}
}
