// SPDX-License-Identifier: Apache-2.0

// Package figure has the numbers that benchmarks measure: percentiles, goals, the memory of a
// process, and a table and lines of JSON of the figures.
package figure

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
	// Unit is ms, s, MiB, bytes, %, ratio, or what is counted.
	Unit string `json:"unit"`
	// N is how many measurements Value sums up.
	N int `json:"n"`

	// floor is what the machine alone costs, measured in turns with the figure; nil where there is none.
	floor *Figure
	// goal is nil where there is none.
	goal *Goal
}

// Goal bounds a figure: at most Factor × floor + Margin.
type Goal struct {
	// Factor of the floor, and Margin in the figure's unit.
	Factor, Margin float64
	// AtLeast makes the bound the least value instead of the largest.
	AtLeast bool
}

// bound needs a goal.
func (f Figure) bound() float64 {
	bound := f.goal.Margin
	if f.floor != nil {
		bound += f.goal.Factor * f.floor.Value
	}
	return bound
}

// Met reports whether the figure reaches its goal; one without a goal does.
func (f Figure) Met() bool {
	switch {
	case f.goal == nil:
		return true
	case f.goal.AtLeast:
		return f.Value >= f.bound()
	default:
		return f.Value <= f.bound()
	}
}

// Samples are durations of one kind of call.
type Samples []time.Duration

// Percentile is the nearest-rank percentile in milliseconds; NaN without samples.
func (s Samples) Percentile(p float64) float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(s))
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return milliseconds(sorted[max(rank, 1)-1])
}

// Figure is a percentile as a figure.
func (s Samples) Figure(name string, p float64) Figure {
	return Figure{Name: name, Value: s.Percentile(p), Unit: "ms", N: len(s)}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Over sets what the figure is compared with. The zero Goal is none.
func (f Figure) Over(floor Figure, g Goal) Figure {
	f.floor, f.goal = &floor, nil
	if g != (Goal{}) {
		f.goal = &g
	}
	return f
}

// Within sets the largest value that is good.
func (f Figure) Within(bound float64) Figure {
	f.goal = &Goal{Margin: bound}
	return f
}

// AtLeast sets the least value that is good.
func (f Figure) AtLeast(bound float64) Figure {
	f.goal = &Goal{Margin: bound, AtLeast: true}
	return f
}

// Write writes the figures as a table for people and, after an empty line, as JSON for machines.
func Write(w io.Writer, figures []Figure) error {
	if err := WriteTable(w, figures); err != nil {
		return err
	}
	fmt.Fprintln(w)
	return WriteJSON(w, figures)
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
		if f.goal != nil {
			bound, met = "<= "+number(f.bound()), "no"
			if f.goal.AtLeast {
				bound = ">= " + number(f.bound())
			}
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
		if math.IsNaN(f.Value) {
			continue // nothing was measured
		}
		f.Value = math.Round(f.Value*1000) / 1000
		if err := encoder.Encode(f); err != nil {
			return fmt.Errorf("write figure %s: %w", f.Name, err)
		}
	}
	return nil
}

func number(value float64) string { return strconv.FormatFloat(value, 'f', 2, 64) }
