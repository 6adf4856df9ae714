// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"strings"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/terminal"
)

// Style is what the reader of a text can show.
type Style struct {
	// Colour allows ANSI colours, UTF8 characters beyond ASCII.
	Colour, UTF8 bool
}

// colours of the states (ECMA-48, SGR).
var colours = map[State]string{
	Free: "32", Claim: "36", Pod: "34", Allocated: "33", Draining: "33", Unhealthy: "31", Maintenance: "35", Tainted: "35", Excluded: "90", Unserved: "90",
}

// paint returns the text in the colour of a state.
func (s Style) paint(text string, state State) string {
	if code := colours[state]; s.Colour && code != "" && text != "" {
		return "\x1b[" + code + "m" + text + "\x1b[0m"
	}
	return text
}

// plain replaces what the reader cannot show, and what is harmful on a terminal.
func (s Style) plain(text string) string { return terminal.Plain(text, !s.UTF8) }

// Line returns a line of text.
func (s Style) Line(text string) string { return s.plain(text) + "\n" }

// Paragraph returns a text in lines of a width that can be read. It is indented like the text.
func (s Style) Paragraph(text string) string {
	indent := text[:len(text)-len(strings.TrimLeft(text, " "))]
	return wrap(indent, s.plain(text[len(indent):]))
}

// cell is a text in a table, in the colour of a state.
type cell struct {
	text  string
	state State
}

func cellsOf(texts ...string) (cells []cell) {
	for _, text := range texts {
		cells = append(cells, cell{text: text})
	}
	return cells
}

// columns aligns rows. The last cell of a row has no padding.
func (s Style) columns(indent string, gap int, rows [][]cell) string {
	return s.aligned(indent, gap, rows, widths(rows))
}

func widths(rows [][]cell) (w []int) {
	for _, row := range rows {
		for i, c := range row {
			if i == len(w) {
				w = append(w, 0)
			}
			w[i] = max(w[i], utf8.RuneCountInString(c.text))
		}
	}
	return w
}

func (s Style) aligned(indent string, gap int, rows [][]cell, widths []int) string {
	var b strings.Builder
	for _, row := range rows {
		for len(row) > 0 && row[len(row)-1].text == "" {
			row = row[:len(row)-1]
		}
		b.WriteString(indent)
		for i, c := range row {
			b.WriteString(s.paint(s.plain(c.text), c.state))
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(c.text))+gap))
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}
