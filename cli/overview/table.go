// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/cli/explain"
)

// mostHolders bounds the holders of a device in a row. The JSON form has all.
const mostHolders = 3

// Row is a line of the table of devices.
type Row struct {
	// Key is the node and the device: a row with the same key is a newer state of the same device.
	Key     string
	cells   []cell
	metrics *Metrics
}

// View says which columns a table has, and in which order its rows are.
type View struct {
	// Wide adds UUIDs, extended resources and why a device gets no holder. Metrics adds what dcgm-exporter measures.
	Wide, Metrics bool
	// SortBy is one of SortKeys: rows with the largest values come first, rows without a value last. If it is empty, rows are in the order of
	// nodes and devices.
	SortBy string
}

// SortKeys are the values of View.SortBy.
var SortKeys = []string{"util", "memory"}

// The headers of a row. HOLDERS comes after all of them, because it is long.
var (
	header        = []string{"NODE", "DEVICE", "MODEL", "STATE", "SHARE"}
	metricsHeader = []string{"UTIL", "MEMORY", "POWER", "TEMP"}
	wideHeader    = []string{"UUID", "RESOURCE", "RESOURCE STATE"}
)

// stateColumn is the column of the state.
const stateColumn = 3

// Rows returns the rows of a node: one of each device, or one that says why it has none.
func (s Style) Rows(n Node, v View) (rows []Row) {
	add := func(device string, metrics *Metrics, usual, wide []string, holders, reason string) {
		row := Row{n.Name + " " + device, v.cells(usual, metrics.cells(), wide, holders, reason), metrics}
		row.cells[stateColumn].state = State(usual[stateColumn])
		rows = append(rows, row)
	}
	if problem := n.Problem; problem != "" || len(n.Devices) == 0 {
		add("", nil, []string{n.Name, "-", "-", "-", ""}, []string{"-", "-", "-"}, cmp.Or(problem, "no GPU"), "")
	}
	for _, d := range n.Devices {
		name, model := d.Name, d.Model
		if d.Parent != "" {
			name, model = "  "+d.Name, d.Profile
		}
		holders, share := d.Describe(n)
		add(d.Name, d.Metrics, []string{n.Name, name, cmp.Or(model, "-"), string(d.State), share},
			[]string{cmp.Or(d.UUID, "-"), cmp.Or(d.ExtendedResource, "-"), cmp.Or(d.ExtendedResourceState, "-")}, cmp.Or(holders, "-"), d.WhyOut())
	}
	return rows
}

// cells returns the cells of a row that the view has.
func (v View) cells(usual, metrics, wide []string, holders, reason string) []cell {
	if v.Metrics {
		usual = append(usual, metrics...)
	}
	if !v.Wide {
		return cellsOf(append(usual, holders)...)
	}
	return cellsOf(append(append(usual, wide...), holders, reason)...)
}

// Describe returns the holders of a device of node n and their shares for users, a few of many. A GPU without a holder whose partitions
// have some says so. It is pure. Views call it.
func (d Device) Describe(n Node) (holders, shares string) {
	var texts, parts []string
	for i, h := range d.Holders {
		if i == mostHolders {
			texts = append(texts, fmt.Sprintf("and %d more", len(d.Holders)-i))
			break
		}
		text := h.text
		if h.State == "Draining" && d.State != Draining {
			text += ", draining"
		}
		if h.WaitsFor != "" {
			text += ", waits for " + h.WaitsFor
		}
		texts = append(texts, text)
		parts = append(parts, cmp.Or(h.share, "all"))
	}
	for _, c := range d.Allocated {
		texts = append(texts, c.String()+", not prepared yet")
	}
	inPartitions := slices.ContainsFunc(n.Devices, func(p Device) bool { return p.Parent == d.Name && len(p.Holders)+len(p.Allocated) > 0 })
	if d.Parent == "" && len(texts) == 0 && (d.State == Claim || d.State == Pod || d.State == Draining || d.State == Allocated ||
		(d.State == Maintenance || d.State == Tainted) && inPartitions) {
		texts = append(texts, "in its partitions")
	}
	if d.Sharing == nil || len(parts) == 0 {
		return strings.Join(texts, "; "), ""
	}
	of := explain.Mebibytes(d.Sharing.MemoryBytes)
	if d.Sharing.Shares > 0 {
		of = fmt.Sprintf("%d shares, %s", d.Sharing.Shares, of)
	}
	return strings.Join(texts, "; "), strings.Join(parts, "; ") + " of " + of
}

// Table returns the overview as a table. A line with counts follows it, and in a view with metrics a line that says where they come from. A
// column that no row fills is left out.
func (s Style) Table(o Overview, v View) string {
	if len(o.Nodes) == 0 {
		return o.Summary() + "\n"
	}
	var rows []Row
	for _, n := range o.Nodes {
		rows = append(rows, s.Rows(n, v)...)
	}
	if v.SortBy != "" {
		slices.SortStableFunc(rows, func(a, b Row) int { return cmp.Compare(b.metrics.key(v.SortBy), a.metrics.key(v.SortBy)) })
	}
	cells := [][]cell{HeaderRow(v).cells}
	for _, row := range rows {
		cells = append(cells, row.cells)
	}
	text := s.columns("", 3, withoutEmptyColumns(cells)) + o.Summary() + "\n"
	if v.Metrics {
		text += s.Line(o.exporters())
	}
	return text
}

// Changed returns rows as a watch prints them: with fixed widths where they fit.
func (s Style) Changed(rows []Row) string {
	var cells [][]cell
	for _, row := range rows {
		cells = append(cells, row.cells)
	}
	return s.aligned("", 3, cells, []int{12, 22, 22, 11, 12, 40, 22, 14, 40})
}

// HeaderRow is the first row of a watch.
func HeaderRow(v View) Row {
	return Row{cells: v.cells(slices.Clone(header), metricsHeader, wideHeader, "HOLDERS", "REASON")}
}

// Changes returns the rows that differ from those of an earlier state of the node, and a row for each device that is gone.
func Changes(before, now []Row) (changed []Row) {
	byKey := make(map[string]Row, len(before))
	for _, row := range before {
		byKey[row.Key] = row
	}
	for _, row := range now {
		if last, known := byKey[row.Key]; !known || !slices.Equal(last.cells, row.cells) {
			changed = append(changed, row)
		}
		delete(byKey, row.Key)
	}
	for _, row := range before {
		if _, gone := byKey[row.Key]; gone {
			cells := slices.Clone(row.cells)
			cells[stateColumn] = cell{text: "Gone"}
			changed = append(changed, Row{Key: row.Key, cells: cells[:stateColumn+1]})
		}
	}
	return changed
}

func withoutEmptyColumns(rows [][]cell) [][]cell {
	filled := make([]bool, len(rows[0]))
	for _, row := range rows[1:] {
		for i, c := range row {
			filled[i] = filled[i] || c.text != ""
		}
	}
	kept := make([][]cell, len(rows))
	for r, row := range rows {
		for i, c := range row {
			if filled[i] {
				kept[r] = append(kept[r], c)
			}
		}
	}
	return kept
}

// Summary counts the devices, in one line.
func (o Overview) Summary() string {
	text := fmt.Sprintf("%s on %s", explain.Number(o.GPUs.Total, "GPU"), explain.Number(len(o.Nodes), "node"))
	if o.GPUs.Total > 0 {
		text += ": " + o.GPUs.String()
	}
	if partitions := o.Partitions.Of("partition"); partitions != "" {
		text += "; " + partitions
	}
	problems, conflicts := 0, 0
	for _, n := range o.Nodes {
		problems += explain.Count(n.Problem != "")
		conflicts += len(n.Conflicts)
	}
	if problems > 0 {
		text += fmt.Sprintf("; %s without a serving agent", explain.Number(problems, "node"))
	}
	if conflicts > 0 {
		text += fmt.Sprintf("; %s in conflict", explain.Number(conflicts, "claim"))
	}
	return text
}
