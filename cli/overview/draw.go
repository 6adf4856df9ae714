// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"cmp"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/cli/explain"
)

// sliceWidth is the width of a memory slice in a bar, with its right border.
const sliceWidth = 8

// strokes are the characters of a bar, and that which ends a profile that does not fit.
type strokes struct{ horizontal, vertical, topLeft, topRight, bottomLeft, bottomRight, down, up, cut string }

var (
	asciiStrokes = strokes{"-", "|", "+", "+", "+", "+", "+", "+", "~"}
	lineStrokes  = strokes{"─", "│", "┌", "┐", "└", "┘", "┬", "┴", "…"}
)

// Draw returns the picture of a node as text.
func (s Style) Draw(p Picture) string {
	var b strings.Builder
	o := New([]Node{p.Node})
	title := p.Node.Name
	for _, more := range []string{p.Node.Mode, o.GPUs.Of("GPU"), o.Partitions.Of("partition")} {
		if more != "" {
			title += "   " + more
		}
	}
	fmt.Fprintln(&b, s.plain(title))
	if p.Node.Problem != "" {
		fmt.Fprintf(&b, "%s\n", s.paint(s.plain(p.Node.Problem), Unhealthy))
	}
	var all [][]cell
	for _, g := range p.Groups {
		for _, gpu := range g.GPUs {
			all = append(all, s.gpuCells(p.Node, gpu))
		}
	}
	w := widths(all)
	for _, g := range p.Groups {
		fmt.Fprintf(&b, "\n%s\n", g.Title())
		for _, gpu := range g.GPUs {
			b.WriteString(s.aligned("  ", 2, [][]cell{s.gpuCells(p.Node, gpu)}, w))
			b.WriteString(s.shares(gpu))
			b.WriteString(s.bar(p.Node, gpu))
		}
	}
	if links := s.links(p); links != "" {
		b.WriteString("\n" + links)
	}
	for _, c := range p.Node.Conflicts {
		fmt.Fprintf(&b, "\n%s\n", s.plain("Conflict: "+c.String()))
	}
	return b.String()
}

func (s Style) gpuCells(n Node, gpu GPU) []cell {
	holders, share := gpu.Describe(n)
	if share != "" {
		holders = explain.Mebibytes(gpu.Sharing.MemoryBytes) + ", shared"
	}
	for _, more := range []string{gpu.WhyOut(), gpu.Slowdown} {
		if more != "" {
			holders = strings.TrimPrefix(holders+"; "+more, "; ")
		}
	}
	link := ""
	if gpu.NVLink != "" {
		link = "NVLink " + gpu.NVLink
	}
	return []cell{
		{text: gpu.Name}, {text: cmp.Or(gpu.Model, "-")}, {text: link},
		{text: s.Mark(gpu.State), state: gpu.State}, {text: holders},
	}
}

// signs distinguish the states without colour. The others have the first one.
var signs = map[State]struct{ utf8, ascii string }{
	"": {"●", "*"}, Free: {"○", "."}, Unhealthy: {"✗", "!"}, Maintenance: {"◇", "#"}, Tainted: {"◆", "%"}, Excluded: {"–", "-"}, Unserved: {"–", "-"},
}

// Mark returns a state with its sign.
func (s Style) Mark(state State) string {
	sign, known := signs[state]
	if !known {
		sign = signs[""]
	}
	if s.UTF8 {
		return sign.utf8 + " " + string(state)
	}
	return sign.ascii + " " + string(state)
}

// indent is that of what belongs to a GPU.
const indent = "         "

// mostSharers bounds the shares of a device that are listed.
const mostSharers = 8

// shares lists the shares of a shared GPU and what is left.
func (s Style) shares(gpu GPU) string {
	if gpu.Sharing == nil || len(gpu.Holders) == 0 {
		return ""
	}
	var rows [][]cell
	left, leftShares := gpu.Sharing.MemoryBytes, gpu.Sharing.Shares
	for i, h := range gpu.Holders {
		left, leftShares = left-h.MemoryBytes, leftShares-h.Shares
		switch {
		case i < mostSharers:
			rows = append(rows, []cell{{text: cmp.Or(h.share, "all")}, {text: h.text}})
		case i == mostSharers:
			rows = append(rows, []cell{{text: fmt.Sprintf("and %d more", len(gpu.Holders)-i)}})
		}
		if !h.Shared && h.Shares == 0 {
			left, leftShares = 0, 0
		}
	}
	amount := explain.Mebibytes(left)
	if gpu.Sharing.Shares > 0 {
		left, amount = leftShares, explain.Number(int(leftShares), "share")
	}
	if left > 0 && gpu.WhyOut() == "" {
		rows = append(rows, []cell{{text: amount}, {text: "free"}})
	}
	return s.columns(indent, 2, rows)
}

// bar draws the partitions of a GPU to scale, and lists them.
func (s Style) bar(n Node, gpu GPU) string {
	if gpu.Slices == 0 {
		return ""
	}
	line := asciiStrokes
	if s.UTF8 {
		line = lineStrokes
	}
	var top, middle, bottom strings.Builder
	var rows [][]cell
	for i, part := range gpu.Parts {
		width := part.Size*sliceWidth - 1
		topJoin, bottomJoin := line.down, line.up
		if i == 0 {
			topJoin, bottomJoin = line.topLeft, line.bottomLeft
		}
		label, state := "", Free
		what, holder := "free", ""
		if d := part.Partition; d != nil {
			label, state, what = d.Profile, d.State, d.Profile
			holders, share := d.Describe(n)
			if share != "" {
				holders += " [" + share + "]"
			}
			holder = strings.TrimSuffix(strings.TrimPrefix(holders+"; "+d.WhyOut(), "; "), "; ")
		}
		label = s.plain(label)
		if utf8.RuneCountInString(label) > width {
			label = string([]rune(label)[:width-1]) + line.cut
		}
		top.WriteString(topJoin + strings.Repeat(line.horizontal, width))
		bottom.WriteString(bottomJoin + strings.Repeat(line.horizontal, width))
		middle.WriteString(line.vertical + s.paint(label, state) + strings.Repeat(" ", width-utf8.RuneCountInString(label)))
		row := []cell{{text: part.Slices()}, {text: what}}
		if part.Partition != nil {
			row = append(row, cell{text: s.Mark(state), state: state}, cell{text: holder})
		}
		rows = append(rows, row)
	}
	return indent + top.String() + line.topRight + "\n" + indent + middle.String() + line.vertical + "\n" +
		indent + bottom.String() + line.bottomRight + "\n" + s.columns(indent, 2, rows)
}

// links lists the GPUs of each NVLink group.
func (s Style) links(p Picture) string {
	var order []string
	groups, cliques := map[string][]string{}, map[string]string{}
	for _, g := range p.Groups {
		for _, gpu := range g.GPUs {
			if gpu.NVLink == "" {
				continue
			}
			if groups[gpu.NVLink] == nil {
				order = append(order, gpu.NVLink)
			}
			groups[gpu.NVLink] = append(groups[gpu.NVLink], gpu.Name)
			cliques[gpu.NVLink] = cmp.Or(cliques[gpu.NVLink], gpu.Clique)
		}
	}
	var b strings.Builder
	for _, link := range order {
		b.WriteString(s.plain(fmt.Sprintf("NVLink %s: %s", link, strings.Join(groups[link], " "))))
		if clique := cliques[link]; clique != "" {
			fmt.Fprintf(&b, " (fabric clique %s)", s.plain(clique))
		}
		b.WriteString("\n")
	}
	return b.String()
}
