// SPDX-License-Identifier: Apache-2.0

package version

import "testing"

func TestPage(t *testing.T) {
	for release, revision := range map[string]string{"": "main", "dev": "main", "0.2.0": "v0.2.0"} {
		if got, want := Page(release, "docs/a.md#b"), "https://github.com/tandem-gpu/tandem/blob/"+revision+"/docs/a.md#b"; got != want {
			t.Errorf("the page of %q is at %s, want %s", release, got, want)
		}
	}
}
