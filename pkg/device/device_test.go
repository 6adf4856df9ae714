// SPDX-License-Identifier: Apache-2.0

package device

import (
	"slices"
	"testing"
)

func TestDevices(t *testing.T) {
	half := Placement{Start: 4, Size: 4}
	small := Placement{Start: 3, Size: 1}
	gpu := GPU{
		UUID: "GPU-1", Minor: 1, Dynamic: true,
		Profiles: []Profile{{ID: 9, Name: "3g.40gb", Placements: []Placement{{Size: 4}, half}}},
		Partitions: []Partition{{
			UUID: "MIG-1", Ref: Ref{GPU: "GPU-1", Placement: half}, Parent: 1, Profile: "3g.40gb", ProfileID: 9, GPUInstance: 2,
		}, {
			// Without a compute instance.
			Ref: Ref{GPU: "GPU-1", Placement: small}, Parent: 1, Profile: "1g.10gb", ProfileID: 19, GPUInstance: 10,
		}},
	}
	fixed := gpu
	fixed.UUID, fixed.Minor, fixed.Dynamic, fixed.Partitions = "GPU-2", 2, false, nil
	inv := Inventory{GPUs: []GPU{gpu, fixed}}
	for name, want := range map[string]struct{ ref, uuid string }{
		"gpu-1":                  {"GPU-1", "GPU-1"},
		"gpu-1-mig-3g40gb-9-0":   {"GPU-1@0+4", ""},
		"gpu-1-mig-3g40gb-9-4":   {"GPU-1@4+4", "MIG-1"},
		"gpu-2":                  {"GPU-2", "GPU-2"},
		"gpu-2-mig-3g40gb-9-0":   {},
		"gpu-1-mig-1g10gb-19-0":  {},
		"gpu-1-mig-1g10gb-19-3":  {"GPU-1@3+1", ""},
		"gpu-1-mig-3g40gb-9-0-1": {},
	} {
		d, ok := inv.ByName(name)
		switch {
		case !ok && want.ref == "":
		case !ok:
			t.Errorf("no device %s", name)
		case want.ref == "" || d.Ref().String() != want.ref || d.UUID() != want.uuid || d.Name() != name:
			t.Errorf("%s is %s (%q, %s), want %q (%q)", name, d.Ref(), d.UUID(), d.Name(), want.ref, want.uuid)
		}
	}
	var names []string
	for _, d := range inv.Devices() {
		names = append(names, d.Name())
	}
	if want := []string{"gpu-1", "gpu-1-mig-3g40gb-9-4", "gpu-1-mig-1g10gb-19-3", "gpu-2"}; !slices.Equal(names, want) {
		t.Errorf("devices are %v, want %v", names, want)
	}
}

func TestHealthOfPartition(t *testing.T) {
	lost, odd := Health{Reason: ReasonLost}, Health{Reason: ReasonUnreachable}
	p := Partition{Ref: Ref{GPU: "GPU-1", Placement: Placement{Size: 1}}, Health: odd}
	if got := (Device{GPU{UUID: "GPU-1"}, p}).Health(); got != odd {
		t.Errorf("health is %v, want its own", got)
	}
	if got := (Device{GPU{UUID: "GPU-1", Health: lost}, p}).Health(); got != lost {
		t.Errorf("health is %v, want its GPU's", got)
	}
	failure, xid := Health{Reason: ReasonRowRemapFailure}, Health{Reason: ReasonXID, XID: 95, Evict: true}
	p.Health = xid
	xid.Needs = RepairReplace // for the row of its GPU
	if got := (Device{GPU{UUID: "GPU-1", Health: failure}, p}).Health(); got != xid {
		t.Errorf("health is %v, want its own, which is worse than its GPU's", got)
	}
	p.Health = Health{Reason: ReasonXID, XID: 94, Evict: true}
	want := Health{Reason: ReasonRowRemapFailure, XID: 94, Evict: true}
	if got := (Device{GPU{UUID: "GPU-1", Health: failure}, p}).Health(); got != want {
		t.Errorf("health is %v, want its GPU's with its own XID and eviction", got)
	}
	p.Health = odd
	for _, reason := range []string{ReasonNotClean, ReasonNotInjectable, ReasonNotRecordable} {
		unusable := Health{Reason: reason}
		if got := (Device{GPU{UUID: "GPU-1", Health: unusable}, p}).HealthForHolder(); got != odd {
			t.Errorf("%s: health is %v for the holder, want its own", reason, got)
		}
		if got := (Device{GPU: GPU{UUID: "GPU-1", Health: unusable}}).HealthForHolder(); !got.Healthy() {
			t.Errorf("%s: health is %v for the holder", reason, got)
		}
	}
	if got := (Device{GPU{UUID: "GPU-1", Health: lost}, p}).HealthForHolder(); got != lost {
		t.Errorf("health is %v for the holder, want its GPU's", got)
	}
}
