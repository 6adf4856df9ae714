// SPDX-License-Identifier: Apache-2.0

package device

import "testing"

func TestByDeviceID(t *testing.T) {
	const (
		gpu0, gpu1, lost  = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b", "GPU-00000000-0000-0000-0000-00000000000c"
		mig, shared, gone = "MIG-00000000-0000-0000-0000-000000000001", "MIG-00000000-0000-0000-0000-000000000002", "MIG-00000000-0000-0000-0000-000000000003"
	)
	place := Ref{GPU: gpu1, Placement: Placement{Start: 2, Size: 1}}
	inv := Inventory{GPUs: []GPU{
		{UUID: gpu0, Minor: 0},
		{UUID: gpu1, Minor: 3, Partitions: []Partition{
			{UUID: mig, Ref: place, GPUInstance: 9},
			{UUID: shared, Ref: Ref{GPU: gpu1, Placement: Placement{Start: 4, Size: 4}, Compute: Placement{Size: 1}}, GPUInstance: 2},
		}},
		{UUID: "GPU-x", Minor: 7}, {UUID: "GPU-y", Minor: 7},
	}}
	for id, want := range map[string]struct {
		ref                         Ref
		missing, unknown, unClaimed bool
	}{
		gpu0:                   {ref: Ref{GPU: gpu0}},
		gpu0 + "::7":           {ref: Ref{GPU: gpu0}},
		mig:                    {ref: place},
		mig + "::0":            {ref: place},
		"MIG-" + gpu1 + "/9/0": {ref: Ref{GPU: gpu1}},
		lost:                   {ref: Ref{GPU: lost}, missing: true, unClaimed: true},
		lost + "::1":           {ref: Ref{GPU: lost}, missing: true, unClaimed: true},
		gone:                   {missing: true, unClaimed: true},
		"nvidia0":              {ref: Ref{GPU: gpu0}},
		"nvidia0/vgpu3":        {ref: Ref{GPU: gpu0}},
		"nvidia3":              {ref: Ref{GPU: gpu1}},
		"nvidia3/gi9":          {ref: place},
		"nvidia3/gi9/vgpu1":    {ref: place},
		// The GPU instance has several partitions, or is not there.
		"nvidia3/gi2": {ref: Ref{GPU: gpu1}},
		"nvidia3/gi5": {ref: Ref{GPU: gpu1}},
		// No GPU, or two, have the minor.
		"nvidia1": {unknown: true, unClaimed: true},
		"nvidia7": {unknown: true, unClaimed: true},
		// The plugin chose the GPU by an annotation.
		gpu0 + "-3":       {unknown: true},
		gpu0 + "-_-12":    {unknown: true},
		gpu0 + "[0-1]":    {unknown: true},
		lost + "-3":       {unknown: true, unClaimed: true},
		"nvidiactl":       {unknown: true, unClaimed: true},
		"nvidia0/gi1/ci0": {unknown: true, unClaimed: true},
		"xnvidia0":        {unknown: true, unClaimed: true},
		"0":               {unknown: true, unClaimed: true},
		"":                {unknown: true, unClaimed: true},
	} {
		ref, missing, unknown := inv.ByDeviceID(id)
		if ref != want.ref || missing != want.missing || unknown != want.unknown {
			t.Errorf("ByDeviceID(%q) = %v, missing %v, unknown %v; want %+v", id, ref, missing, unknown, want)
		}
		if claimed := inv.Claimed(id); claimed == want.unClaimed {
			t.Errorf("Claimed(%q) = %v", id, claimed)
		}
	}
	for id, want := range map[string]bool{lost: true, gone + "::2": true, gpu0 + "-3": false, "nvidia0": false, "GPU-1": false} {
		if HasUUID(id) != want {
			t.Errorf("HasUUID(%q) = %v", id, !want)
		}
	}
}
