// SPDX-License-Identifier: Apache-2.0

package bench

import "testing"

func TestParseMemory(t *testing.T) {
	got, err := parseMemory("Name:\tx\nVmRSS:\t   51200 kB\nRssAnon:\t   20480 kB\nRssFile:\t   30720 kB\n")
	if want := (memory{50, 20, 30}); err != nil || got != want {
		t.Errorf("got %v, %v", got, err)
	}
	for _, broken := range []string{"", "VmRSS: 1 kB\nRssAnon: 1 kB\n", "VmRSS: many kB\nRssAnon: 1 kB\nRssFile: 1 kB\n"} {
		if _, err := parseMemory(broken); err == nil {
			t.Errorf("no error from %q", broken)
		}
	}
}
