// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const smaps = `00400000-00411000 r--p 00000000 fe:00 123 /usr/bin/kubelet-plugin
Size:                 68 kB
Anonymous:             0 kB
Swap:                  0 kB
VmFlags: rd mr mw me
00411000-01761000 r-xp 00011000 fe:00 123 /usr/bin/kubelet-plugin
Rss:               16956 kB
Anonymous:             0 kB
Swap:                  0 kB
02d20000-02d21000 r--p 02920000 fe:00 123 /usr/bin/kubelet-plugin
Anonymous:             4 kB
Swap:                  0 kB
02d1f000-02d20000 r--p 0291f000 fe:00 123 /usr/bin/kubelet-plugin
Anonymous:             0 kB
Swap:                  4 kB
02d21000-02dbf000 rw-p 02921000 fe:00 123 /usr/bin/kubelet-plugin
Anonymous:             0 kB
Swap:                  0 kB
7f0000000000-7f0000001000 r-xp 00000000 fe:00 456 /usr/lib/libc.so.6
Anonymous:             0 kB
Swap:                  0 kB
7f0000002000-7f0000003000 r--p 00000000 00:00 0
Anonymous:             0 kB
Swap:                  0 kB
`

// Pages that are writable, or were written to, must stay mapped. The dynamic linker writes to pages that are read-only afterwards, and they
// may be swapped out.
func TestUnchanged(t *testing.T) {
	got, err := unchanged(strings.NewReader(smaps), "/usr/bin/kubelet-plugin")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]pageRange{{0x400000, 0x411000}, {0x411000, 0x1761000}}, got, cmp.AllowUnexported(pageRange{})); diff != "" {
		t.Error(diff)
	}
	if _, err := unchanged(strings.NewReader("x-y r--p 0 0 0 /p\nAnonymous: 0 kB\nSwap: 0 kB\n"), "/p"); err == nil {
		t.Error("a mapping without addresses is accepted")
	}
}

func TestUnmapProgram(t *testing.T) {
	before := programMemory(t)
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	after := programMemory(t)
	t.Logf("%d KiB of files in memory, then %d KiB", before, after)
	if after >= before {
		t.Errorf("%d KiB of files in memory, and %d KiB before", after, before)
	}
}

// programMemory returns how much memory of this process is mapped from files, in KiB.
func programMemory(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	match := regexp.MustCompile(`RssFile:\s*(\d+) kB`).FindSubmatch(status)
	if match == nil {
		t.Fatalf("no RssFile in %s", bytes.TrimSpace(status))
	}
	n, err := strconv.Atoi(string(match[1]))
	if err != nil {
		t.Fatal(err)
	}
	return n
}
