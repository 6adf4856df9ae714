// SPDX-License-Identifier: Apache-2.0

package regarding

import (
	"fmt"
	"strings"
)

// named is how many objects an event names.
const named = 4

// Some returns names for the text of an event: "gpu-0, gpu-1, gpu-2, gpu-3 and 12 more". Pure.
func Some(names []string) string { return First(names, named) }

// First is Some with the first n names.
func First(names []string, n int) string {
	text := strings.Join(names[:min(len(names), n)], ", ")
	if more := len(names) - n; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// Shorten returns at most so many bytes of a text for an event or a status. Pure.
func Shorten(text string, limit int) string {
	const more = " …"
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit-len(more)], "") + more
}
