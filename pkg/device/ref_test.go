// SPDX-License-Identifier: Apache-2.0

package device

import "testing"

func TestRefText(t *testing.T) {
	for _, ref := range []Ref{
		{GPU: "GPU-1"},
		{GPU: "GPU-1", Placement: Placement{Start: 4, Size: 4}},
		{GPU: "GPU-1", Placement: Placement{Size: 4}, Compute: Placement{Start: 1, Size: 2}},
	} {
		got, err := ParseRef(ref.String())
		if err != nil || got != ref {
			t.Errorf("ParseRef(%q) = %v, %v", ref.String(), got, err)
		}
	}
	for _, bad := range []string{
		"", "@0+1", "GPU-1@", "GPU-1@0", "GPU-1@0+0", "GPU-1@-1+1", "GPU-1@0+1.", "GPU-1@0+1.0+0", "GPU-1@0+1.x+1",
		"GPU-1@1+0", "GPU-1@0+1.-1+2", "GPU-1@0+1.0+1 ", "GPU-1@00+1",
	} {
		if ref, err := ParseRef(bad); err == nil {
			t.Errorf("ParseRef(%q) = %v, want an error", bad, ref)
		}
	}
}

func TestRefOverlaps(t *testing.T) {
	ref := func(s string) Ref {
		r, err := ParseRef(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for _, tt := range []struct {
		a, b string
		want bool
	}{
		{"A", "A", true},
		{"A", "B", false},
		{"A", "A@0+1", true},
		{"A", "A@0+4.0+1", true},
		{"A@0+4", "A@4+4", false},
		{"A@0+4", "A@3+1", true},
		{"A@0+4", "A@0+4.1+1", true},
		{"A@0+4.0+1", "A@0+4.1+1", false},
		{"A@0+4.0+2", "A@0+4.1+1", true},
		// Compute slices count within one GPU instance: two instances that overlap conflict whatever is in them.
		{"A@0+4.0+1", "A@2+4.1+1", true},
		{"A@0+1", "B@0+1", false},
	} {
		a, b := ref(tt.a), ref(tt.b)
		if a.Overlaps(b) != tt.want || b.Overlaps(a) != tt.want {
			t.Errorf("%s and %s overlap: %v and %v, want %v", a, b, a.Overlaps(b), b.Overlaps(a), tt.want)
		}
	}
}

func TestPartitionName(t *testing.T) {
	for profile, want := range map[string]string{
		"1g.10gb":    "gpu-3-mig-1g10gb-19-2",
		"1g.10gb+me": "gpu-3-mig-1g10gb-me-19-2",
	} {
		if got := PartitionName(3, profile, 19, Placement{Start: 2, Size: 1}); got != want {
			t.Errorf("name of %s is %s, want %s", profile, got, want)
		}
	}
	p := Partition{Parent: 1, Profile: "1c.3g.40gb", ProfileID: 9, Ref: Ref{GPU: "A", Placement: Placement{Size: 4}, Compute: Placement{Start: 2, Size: 1}}}
	if got, want := p.Name(), "gpu-1-mig-1c3g40gb-9-0-2"; got != want {
		t.Errorf("name is %s, want %s", got, want)
	}
}
