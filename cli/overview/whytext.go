// SPDX-License-Identifier: Apache-2.0

package overview

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/cli/explain"
)

// fits have the colours of states.
var fits = map[explain.Fit]State{
	explain.FitRoom: Free, explain.FitFull: Claim, explain.FitUnknown: Excluded, explain.FitAgent: Unhealthy, explain.FitNever: Excluded,
	explain.FitFails: Unhealthy,
}

// Why returns why a pod waits or failed as text.
func (s Style) Why(a explain.Answer) string {
	var b strings.Builder
	b.WriteString(wrap("", s.plain(fmt.Sprintf("Pod %s/%s %s.", a.Namespace, a.Name, a.Summary))))
	section := func(title string, lines ...string) {
		if len(lines) == 0 || len(lines) == 1 && lines[0] == "" {
			return
		}
		fmt.Fprintf(&b, "\n%s\n", title)
		for _, line := range lines {
			b.WriteString(wrap("  ", s.plain(line)))
		}
	}
	section("It requests", a.Requests...)
	if a.Cause != explain.CauseRunning {
		section("It has", a.Has...)
	}
	section("The scheduler says", a.Scheduler)
	if len(a.Nodes) > 0 {
		b.WriteString("\nNodes\n")
	}
	for _, n := range a.Nodes {
		words := n.Fit.Words()
		line := wrap("  ", s.plain(fmt.Sprintf("%s: %s: %s", n.Which(), words, n.Reason)))
		b.WriteString(strings.Replace(line, ": "+words+":", ": "+s.paint(words, fits[n.Fit])+":", 1))
		for _, holder := range n.Holders {
			fmt.Fprintf(&b, "      %s\n", s.plain(holder))
		}
	}
	section(a.FreesTitle(), a.Frees...)
	section("Quota", a.Quotas...)
	section("Events, the newest first", a.Events...)
	var notRead []string
	for _, n := range a.NotRead {
		notRead = append(notRead, fmt.Sprintf("%s: %s", n.Kind, n.Error))
	}
	section("What you may not read", notRead...)
	return b.String()
}

// textWidth is where lines are broken, between words.
const textWidth = 100

// wrap breaks a line into several, with more indent from the second on.
func wrap(indent, line string) string {
	var b strings.Builder
	at := 0
	for i, word := range strings.Split(line, " ") {
		width := utf8.RuneCountInString(word)
		switch {
		case i == 0:
			b.WriteString(indent)
			at = len(indent)
		case at+1+width > textWidth:
			b.WriteString("\n" + indent + "  ")
			at = len(indent) + 2
		default:
			b.WriteString(" ")
			at++
		}
		b.WriteString(word)
		at += width
	}
	return b.String() + "\n"
}
