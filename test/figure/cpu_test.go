// SPDX-License-Identifier: Apache-2.0

package figure

import (
	"os"
	"testing"
	"time"
)

func TestParseCPU(t *testing.T) {
	const stat = "4242 (a b) c) S 1 4242 4242 0 -1 4194560 2183 0 3 0 123 45 7 8 20 0 9 0 8151 1266524160 11264 18446744073709551615"
	if used, err := parseCPU(stat); err != nil || used != 1680*time.Millisecond {
		t.Errorf("%s, %v", used, err)
	}
	for _, wrong := range []string{"", "4242 (a) S 1 4242 4242 0 -1 4194560 2183 0 3 0 123", "4242 (a) S 1 4242 4242 0 -1 4194560 2183 0 3 0 123 x"} {
		if used, err := parseCPU(wrong); err == nil {
			t.Errorf("%q: %s", wrong, used)
		}
	}
}

func TestReadCPU(t *testing.T) {
	before, err := ReadCPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for after := before; after == before; {
		if after, err = ReadCPU(os.Getpid()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ReadCPU(-1); err == nil {
		t.Error("a process without a number has CPU time")
	}
}
