// SPDX-License-Identifier: Apache-2.0

package regarding

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestSome(t *testing.T) {
	for want, names := range map[string][]string{
		"":                      nil,
		"a":                     {"a"},
		"a, b, c, d":            {"a", "b", "c", "d"},
		"a, b, c, d and 1 more": {"a", "b", "c", "d", "e"},
		"a, b, c, d and 2 more": {"a", "b", "c", "d", "e", "f"},
	} {
		if got := Some(names); got != want {
			t.Errorf("%v: %q, want %q", names, got, want)
		}
	}
}

func TestShorten(t *testing.T) {
	if got := Shorten("short", 1024); got != "short" {
		t.Errorf("%q", got)
	}
	for shift := range 4 {
		got := Shorten(strings.Repeat("x", shift)+strings.Repeat("ü", 1024), 1024)
		if len(got) > 1024 || len(got) < 1023 || !utf8.ValidString(got) || !strings.HasSuffix(got, "ü …") {
			t.Errorf("%d bytes, valid %t, ends in %q", len(got), utf8.ValidString(got), got[len(got)-8:])
		}
	}
}
