// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// The copy is the same program, and no file is overwritten.
func TestUnpack(t *testing.T) {
	want := bytes.Repeat([]byte("a program\n"), 10_000)
	from, to := filepath.Join(t.TempDir(), "program"), filepath.Join(t.TempDir(), "copy")
	if err := os.WriteFile(from, want, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Unpack(from, to); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(to)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("the copy has %d bytes, want %d (%v)", len(got), len(want), err)
	}
	if info, err := os.Stat(to); err != nil || info.Mode().Perm()&0o111 == 0 {
		t.Errorf("the copy cannot be executed: %v, %v", info.Mode(), err)
	}
	if err := Unpack(from, to); err == nil {
		t.Error("an existing file was overwritten")
	}
}
