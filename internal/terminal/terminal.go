// SPDX-License-Identifier: Apache-2.0

// Package terminal makes text harmless before it is printed. Names, reasons and errors come from the cluster, where tenants write some of them.
package terminal

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/runes"
	"golang.org/x/text/transform"
)

// Plain replaces characters that control a terminal or the direction of text, line breaks among them, and bytes that are not UTF-8. With
// ascii it also replaces what ASCII does not have.
func Plain(text string, ascii bool) string { return strings.Map(replacing(ascii, ""), text) }

// lineBreaks stay in texts of several lines.
const lineBreaks = "\n\t"

// Lines is Plain for several lines: line breaks and tabs stay.
func Lines(text string, ascii bool) string { return strings.Map(replacing(ascii, lineBreaks), text) }

// replacing keeps the characters of kept, which are harmful to Plain.
func replacing(ascii bool, kept string) func(rune) rune {
	return func(r rune) rune {
		if strings.ContainsRune(kept, r) || harmless(r) && !(ascii && r > unicode.MaxASCII) {
			return r
		}
		return '?'
	}
}

// JSON escapes in a JSON text what Plain would replace. The text keeps its meaning, because JSON has these characters in strings only.
func JSON(text string) string { return escape(text, true) }

// JSONForYAML is JSON for a parser of YAML, which has no surrogates: characters above U+FFFF stay.
func JSONForYAML(text string) string { return escape(text, false) }

func escape(text string, surrogates bool) string {
	var b strings.Builder
	for _, r := range text {
		switch {
		case r == '\n' || harmless(r) || r > 0xffff && !surrogates:
			b.WriteRune(r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// harmless reports whether a terminal shows the character and does nothing else. Letters and marks are harmless. Control characters (C0, C1),
// controls of the direction and other invisible ones are not.
func harmless(r rune) bool { return unicode.IsPrint(r) && r != utf8.RuneError }

// Writer returns a writer that passes Lines of what it gets on to w. Bytes of a character that never becomes complete are lost.
func Writer(w io.Writer, ascii bool) io.Writer {
	return transform.NewWriter(w, runes.Map(replacing(ascii, lineBreaks)))
}
