// SPDX-License-Identifier: Apache-2.0

package newer

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// TestTheNewerLedgerCompiles: what is changed is still in the sources, and the ledger compiles with it.
func TestTheNewerLedgerCompiles(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	file, err := overlay(root, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-overlay", file, "./pkg/ledger")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
