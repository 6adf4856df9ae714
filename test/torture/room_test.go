// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"testing"

	"github.com/tandem-gpu/tandem/test/oracle"
)

// machineWithMIG is the room of h100x8-mig after a boot.
func machineWithMIG() room {
	r := room{mig: true, enabled: map[int]bool{3: true, 4: true, 5: true}}
	for _, p := range []struct {
		gpu, start int
		profile    string
	}{
		{3, 4, "3g.40gb"}, {4, 0, "3g.40gb"}, {4, 4, "2g.20gb"},
		{5, 0, "1g.10gb"}, {5, 1, "1g.10gb"}, {5, 2, "1g.20gb"}, {5, 4, "3g.40gb"},
	} {
		named := profileNamed(p.profile)
		r.standing = append(r.standing, oracle.Instance{GPU: p.gpu, Profile: named.id, Start: p.start, Size: named.size, UUID: p.profile})
	}
	return r
}

func TestRoom(t *testing.T) {
	claim := func(n int, profile string) ask { return ask{api: oracle.Claim, gpus: n, profile: profile} }
	limits := func(n int, profile string) ask { return ask{api: oracle.Limits, gpus: n, profile: profile} }
	together := func(profile string) ask { return ask{api: oracle.Claim, gpus: 2, profile: profile, together: true} }
	wholes := []place{{gpu: 0}, {gpu: 1}, {gpu: 2}}
	for name, test := range map[string]struct {
		ask   ask
		taken []place
		want  bool
	}{
		"all whole GPUs":                        {limits(wholeGPUs, ""), nil, true},
		"one more":                              {limits(wholeGPUs+1, ""), nil, false},
		"a GPU of which a holder has a part":    {limits(wholeGPUs, ""), []place{{0, 6, 1}}, false},
		"claims: made and standing":             {claim(3*7+4+2, "1g.10gb"), nil, true},
		"claims: one more":                      {claim(3*7+4+2+1, "1g.10gb"), nil, false},
		"claims: standing only":                 {claim(4, "3g.40gb"), wholes, true},
		"limits: standing only":                 {limits(2, "1g.10gb"), nil, true},
		"limits: what could be made is not":     {limits(3, "1g.10gb"), nil, false},
		"limits: what a claim has is not":       {limits(2, "1g.10gb"), []place{{5, 1, 1}}, false},
		"two of one GPU":                        {together("3g.40gb"), nil, true},
		"two, one made and one standing":        {together("3g.40gb"), wholes, true},
		"two, but not of one":                   {together("3g.40gb"), append(wholes, place{3, 0, 1}), false},
		"what is in the way is in the way":      {claim(1, "4g.40gb"), append(wholes, place{3, 3, 1}), false},
		"beside what is taken":                  {claim(1, "4g.40gb"), append(wholes, place{3, 4, 4}), true},
		"nothing is made on an administrator's": {claim(1, "7g.80gb"), wholes, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := machineWithMIG().fits(test.ask, test.taken); got != test.want {
				t.Errorf("fits: %t", got)
			}
		})
	}
}

func TestPlaces(t *testing.T) {
	for name, want := range map[string]place{
		"gpu-7": {gpu: 7}, "gpu-12-mig-3g40gb-9-4": {12, 4, 4}, "gpu-0-mig-1g10gb-19-6": {0, 6, 1},
	} {
		if got, ok := placeNamed(name); !ok || got != want {
			t.Errorf("%s is %v, %t", name, got, ok)
		}
	}
	for _, name := range []string{"gpu-", "gpu-0-mig-9g1gb-19-6", "gpu-0-mig-1g10gb-19", "net-1"} {
		if got, ok := placeNamed(name); ok {
			t.Errorf("%s is %v", name, got)
		}
	}
	if (place{0, 4, 4}).overlaps(place{0, 3, 1}) || (place{0, 4, 4}).overlaps(place{1, 4, 4}) || !(place{0, 4, 4}).overlaps(place{gpu: 0}) ||
		!(place{0, 4, 2}).overlaps(place{0, 5, 1}) {
		t.Error("overlaps")
	}
}

func TestServed(t *testing.T) {
	if (ask{gpus: 1, profile: "3g.40gb"}).isServedBy([]place{{0, 4, 2}}) || (ask{gpus: 1}).isServedBy([]place{{0, 4, 2}}) ||
		!(ask{gpus: 2, profile: "3g.40gb"}).isServedBy([]place{{0, 0, 4}, {0, 4, 4}}) {
		t.Error("served")
	}
}
