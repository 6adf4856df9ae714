// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestGivenPrograms(t *testing.T) {
	const script = "#!/bin/sh\necho tiny version v1.2.3\n"
	sums := fmt.Sprintf("%x  tiny\n", sha256.Sum256([]byte(script)))
	for name, c := range map[string]struct{ version, sums, problem string }{
		"taken":          {version: "v1.2.3", sums: sums},
		"another":        {version: "v1.2.30", sums: sums, problem: `tiny is not of version v1.2.30: it says "tiny version v1.2.3"`},
		"older":          {version: "v1.2", sums: sums, problem: "tiny is not of version v1.2:"},
		"changed":        {version: "v1.2.3", sums: strings.Repeat("0", 64) + "  tiny\n", problem: "has the hash"},
		"without a hash": {version: "v1.2.3", sums: "", problem: `but SHA256SUMS says ""`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, content := range map[string]string{"tiny": script, "SHA256SUMS": c.sums} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv(givenVariable, dir)
			t.Setenv("PATH", "/usr/bin:/bin") // no go: a build would fail
			b, _ := testBuilder(t)
			wanted := component{name: "tiny", version: c.version, module: "example.com/tiny", packages: []program{{".", []string{"tiny"}}}}
			got, err := b.ensure(t.Context(), wanted, "")
			if c.problem != "" {
				if err == nil || !strings.Contains(err.Error(), c.problem) {
					t.Errorf("error is %v, want %s", err, c.problem)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if data, err := os.ReadFile(filepath.Join(got, "tiny")); err != nil || string(data) != script {
				t.Errorf("took %q: %v", data, err)
			}
		})
	}
}
