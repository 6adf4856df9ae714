// SPDX-License-Identifier: Apache-2.0

package oracle

import "testing"

func TestOverlaps(t *testing.T) {
	gpu := func(minor uint32) Device { return Device{Number: Number{nvidiaMajor, minor}, GPU: GPU{UUID: "GPU-1"}} }
	part := func(minor, right uint32, instance string, start, size int) Device {
		return Device{Number: Number{235, right}, Partition: Partition{
			Instance: instance, GPU: Number{nvidiaMajor, minor}, UUID: "MIG-1", Start: start, Size: size, Published: [2]string{"-9-4", "-9-4-0"},
		}}
	}
	first := part(1, 10, "gi1/ci0", 0, 4)
	for name, test := range map[string]struct {
		a, b Device
		want bool
	}{
		"a GPU and itself":                         {gpu(1), gpu(1), true},
		"two GPUs":                                 {gpu(1), gpu(2), false},
		"a GPU and its part":                       {gpu(1), first, true},
		"a GPU and another's part":                 {gpu(2), first, false},
		"two parts side by side":                   {first, part(1, 20, "gi2/ci0", 4, 4), false},
		"the same right":                           {first, part(1, 10, "gi1/ci0", 0, 4), true},
		"two compute instances of a GPU instance":  {first, part(1, 11, "gi1/ci1", 0, 4), false},
		"what was there before what is there now":  {first, part(1, 30, "gi3/ci0", 2, 2), true},
		"the same slices of another GPU":           {first, part(2, 40, "gi1/ci0", 0, 4), false},
		"a part that the machine does not know":    {first, part(1, 50, "gi5/ci0", 0, 0), false},
		"an unknown partition, and its GPU":        {gpu(1), part(1, 50, "gi5/ci0", 0, 0), true},
		"the same right, though the place differs": {first, part(1, 10, "gi1/ci0", 4, 4), true},
	} {
		t.Run(name, func(t *testing.T) {
			if test.a.Overlaps(test.b) != test.want || test.b.Overlaps(test.a) != test.want {
				t.Errorf("overlaps: %t", !test.want)
			}
		})
	}
	for _, name := range []string{"MIG-1", "gpu-1-mig-3g40gb-9-4", "gpu-1-mig-1c3g40gb-9-4-0"} {
		if !first.Is(name) || gpu(1).Is(name) {
			t.Errorf("%s is something else", name)
		}
	}
	for _, name := range []string{"gpu-1", "GPU-1"} {
		if !gpu(1).Is(name) || first.Is(name) {
			t.Errorf("%s is something else", name)
		}
	}
}
