// SPDX-License-Identifier: Apache-2.0

package regarding

import "testing"

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
