// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"os"
	"path/filepath"
	"testing"
)

// A directory that a container's runtime has made in the place of the link, and its client has written to, keeps no daemon from starting.
func TestALinkThatIsADirectory(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, ShmLink)
	if err := os.Mkdir(link, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(link, "psm_1234"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := (Daemon{Dir: dir, Shm: "/pods/uid/shm"}).linkShm(); err != nil {
			t.Fatal(err)
		}
		if to, err := os.Readlink(link); err != nil || to != "/pods/uid/shm" {
			t.Errorf("links to %q: %v", to, err)
		}
	}
}
