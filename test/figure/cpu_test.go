// SPDX-License-Identifier: Apache-2.0

package figure

import (
	"os"
	"testing"
	"time"
)

func TestReadCPU(t *testing.T) {
	before, err := ReadCPU(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	after := before
	for began := time.Now(); after == before; {
		if after, err = ReadCPU(os.Getpid()); err != nil {
			t.Fatal(err)
		}
		if time.Since(began) > time.Minute {
			t.Fatal("a process that works uses no CPU time")
		}
	}
	if after-before < 9*time.Millisecond || after-before > 10*time.Second {
		t.Errorf("it has used %s", after-before)
	}
	if _, err := ReadCPU(-1); err == nil {
		t.Error("a process without a number has CPU time")
	}
}
