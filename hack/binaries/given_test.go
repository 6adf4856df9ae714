// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestGivenPrograms(t *testing.T) {
	const script, candidate = "#!/bin/sh\necho tiny version v1.2.3\n", "#!/bin/sh\necho tiny version v1.2.3-rc.1\n"
	sumsOf := func(script string) string { return fmt.Sprintf("%x  tiny\n", sha256.Sum256([]byte(script))) }
	sums, found := sumsOf(script), func(string) {}
	for name, c := range map[string]struct {
		version, sums, problem string
		script                 string
		found                  func(string)
	}{
		"taken":          {version: "v1.2.3", sums: sums, found: found},
		"another":        {version: "v1.2.30", sums: sums, problem: `tiny is not of version v1.2.30: it says "tiny version v1.2.3"`, found: found},
		"older":          {version: "v1.2", sums: sums, problem: "tiny is not of version v1.2:", found: found},
		"a candidate":    {version: "v1.2.3", sums: sumsOf(candidate), script: candidate, problem: `it says "tiny version v1.2.3-rc.1"`, found: found},
		"a tool":         {version: "v1.2.3", sums: sums, problem: "build tiny v1.2.3"},
		"changed":        {version: "v1.2.3", sums: strings.Repeat("0", 64) + "  tiny\n", problem: "has the hash", found: found},
		"without a hash": {version: "v1.2.3", sums: "", problem: `but SHA256SUMS says ""`, found: found},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, content := range map[string]string{"tiny": cmp.Or(c.script, script), "SHA256SUMS": c.sums} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(content), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv(givenVariable, dir)
			t.Setenv("PATH", "/usr/bin:/bin") // no go: a build would fail
			b, _ := testBuilder(t)
			wanted := component{name: "tiny", version: c.version, module: "example.com/tiny", packages: []program{{".", []string{"tiny"}}}, found: c.found}
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
