// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"
)

// Figure is one measured number.
type Figure struct {
	Name  string  `json:"figure"`
	Value float64 `json:"value"`
	// Unit is ms, MiB, bytes, % or ratio.
	Unit string `json:"unit"`
	// N is how many measurements Value sums up.
	N int `json:"n"`

	// floor is what the machine alone costs, measured in turns with the figure; nil where there is none.
	floor *Figure
	goal  goal
}

// goal bounds a figure: at most factor × floor + margin. The zero value is no goal.
type goal struct{ factor, margin float64 }

func (g goal) none() bool { return g == goal{} }

func (f Figure) bound() float64 {
	bound := f.goal.margin
	if f.floor != nil {
		bound += f.goal.factor * f.floor.Value
	}
	return bound
}

// Met reports whether the figure reaches its goal; one without a goal does.
func (f Figure) Met() bool { return f.goal.none() || f.Value <= f.bound() }

// samples are durations of one kind of call.
type samples []time.Duration

// percentile is the nearest-rank percentile in milliseconds; NaN without samples.
func (s samples) percentile(p float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return milliseconds(sorted[max(rank, 1)-1])
}

func (s samples) figure(name string, p float64) Figure {
	return Figure{Name: name, Value: s.percentile(p), Unit: "ms", N: len(s)}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// over sets what the figure is compared with.
func (f Figure) over(floor Figure, g goal) Figure {
	f.floor, f.goal = &floor, g
	return f
}

// within sets an absolute bound.
func (f Figure) within(bound float64) Figure {
	f.goal = goal{margin: bound}
	return f
}

// WriteTable writes the figures for people.
func WriteTable(w io.Writer, figures []Figure) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "figure\tvalue\tunit\tn\tfloor\tgoal\tmet\t")
	for _, f := range figures {
		floor, bound, met := "", "", ""
		if f.floor != nil {
			floor = number(f.floor.Value)
		}
		if !f.goal.none() {
			bound, met = "<= "+number(f.bound()), "no"
			if f.Met() {
				met = "yes"
			}
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t\n", f.Name, number(f.Value), f.Unit, f.N, floor, bound, met)
	}
	return table.Flush()
}

// WriteJSON writes one line a figure for machines.
func WriteJSON(w io.Writer, figures []Figure) error {
	encoder := json.NewEncoder(w)
	for _, f := range figures {
		f.Value = math.Round(f.Value*1000) / 1000
		if err := encoder.Encode(f); err != nil {
			return fmt.Errorf("write figure %s: %w", f.Name, err)
		}
	}
	return nil
}

func number(value float64) string { return strconv.FormatFloat(value, 'f', 2, 64) }
