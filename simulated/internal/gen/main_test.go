// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"testing"
)

// The file beside the package is what the generator makes of the go-nvml version in go.mod.
func TestGeneratedFileIsCurrent(t *testing.T) {
	want, err := Source("../..")
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../zz_generated.gates.go")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("zz_generated.gates.go differs from what the generator writes; run: go generate ./simulated")
	}
}
