// SPDX-License-Identifier: Apache-2.0

package figure

import (
	"math"
	"strings"
	"testing"
	"time"
)

func TestPercentile(t *testing.T) {
	var hundred Samples
	for i := 100; i > 0; i-- {
		hundred = append(hundred, time.Duration(i)*time.Millisecond)
	}
	for _, test := range []struct {
		samples Samples
		p, want float64
	}{
		{hundred, 50, 50}, {hundred, 99, 99}, {hundred, 100, 100}, {hundred, 0, 1},
		{Samples{3 * time.Millisecond}, 99, 3},
		{Samples{2 * time.Millisecond, time.Millisecond, 4 * time.Millisecond}, 50, 2},
	} {
		if got := test.samples.Percentile(test.p); got != test.want {
			t.Errorf("p%v of %d samples is %v, want %v", test.p, len(test.samples), got, test.want)
		}
	}
	if got := (Samples{}).Percentile(50); !math.IsNaN(got) {
		t.Errorf("percentile of nothing is %v", got)
	}
}

func TestGoals(t *testing.T) {
	floor := Figure{Name: "floor", Value: 2}
	for name, test := range map[string]struct {
		figure Figure
		met    bool
	}{
		"no goal":          {Figure{Value: 1000}, true},
		"absolute, met":    {Figure{Value: 50}.Within(50), true},
		"absolute, missed": {Figure{Value: 50.1}.Within(50), false},
		"nothing, missed":  {Figure{Value: 1}.Within(0), false},
		"factor, met":      {Figure{Value: 2.6}.Over(floor, Goal{Factor: 1.3}), true},
		"factor, missed":   {Figure{Value: 2.7}.Over(floor, Goal{Factor: 1.3}), false},
		"margin, met":      {Figure{Value: 3}.Over(floor, Goal{Factor: 1, Margin: 1}), true},
		"margin, missed":   {Figure{Value: 3.1}.Over(floor, Goal{Factor: 1, Margin: 1}), false},
		"least, met":       {Figure{Value: 1.1}.AtLeast(1), true},
		"least, missed":    {Figure{Value: 0.9}.AtLeast(1), false},
	} {
		if got := test.figure.Met(); got != test.met {
			t.Errorf("%s: met is %t", name, got)
		}
	}
}

func TestOutput(t *testing.T) {
	figures := []Figure{
		{Name: "rss_idle", Value: 48.12345, Unit: "MiB", N: 5},
		Figure{Name: "allocate_p50", Value: 0.5, Unit: "ms", N: 200}.Over(Figure{Value: 0.25}, Goal{Factor: 1.3}),
	}
	var table, lines strings.Builder
	if err := WriteTable(&table, figures); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"48.12", "<= 0.33", "no"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, table.String())
		}
	}
	if err := WriteJSON(&lines, figures); err != nil {
		t.Fatal(err)
	}
	want := `{"figure":"rss_idle","value":48.123,"unit":"MiB","n":5}` + "\n" + `{"figure":"allocate_p50","value":0.5,"unit":"ms","n":200}` + "\n"
	if lines.String() != want {
		t.Errorf("got %s, want %s", lines.String(), want)
	}
}
