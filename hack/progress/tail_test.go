// SPDX-License-Identifier: Apache-2.0

package progress

import "testing"

func TestTailKeepsTheEnd(t *testing.T) {
	var output Tail
	for range 1000 {
		_, _ = output.Write([]byte("a line of the usual length, more or less\n"))
	}
	_, _ = output.Write([]byte("the end\n"))
	if output.Last() != "the end" || len(output.String()) > kept || output.Lines() != 1001 {
		t.Errorf("last %q, %d bytes, %d lines", output.Last(), len(output.String()), output.Lines())
	}
}
