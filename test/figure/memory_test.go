// SPDX-License-Identifier: Apache-2.0

package figure

import (
	"os"
	"testing"
)

func TestParseMemory(t *testing.T) {
	got, err := parseMemory("Name:\tx\nVmHWM:\t   61440 kB\nVmRSS:\t   51200 kB\nRssAnon:\t   20480 kB\nRssFile:\t   30720 kB\n")
	if want := (Memory{50, 60, 20, 30}); err != nil || got != want {
		t.Errorf("got %v, %v", got, err)
	}
	for _, broken := range []string{
		"", "VmHWM: 1 kB\nVmRSS: 1 kB\nRssAnon: 1 kB\n", "VmHWM: 1 kB\nVmRSS: many kB\nRssAnon: 1 kB\nRssFile: 1 kB\n",
	} {
		if _, err := parseMemory(broken); err == nil {
			t.Errorf("no error from %q", broken)
		}
	}
}

func TestReadMemory(t *testing.T) {
	if m, err := ReadMemory(os.Getpid()); err != nil || m.Resident <= 0 || m.Peak < m.Resident {
		t.Errorf("got %v, %v", m, err)
	}
}
