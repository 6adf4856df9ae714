// SPDX-License-Identifier: Apache-2.0

package release

import (
	"fmt"
	"strings"
)

// releaseNotes is what the page of the release says: how to install and to check it, and the changes of CHANGELOG.md.
func (b build) releaseNotes(d Description) string {
	var text strings.Builder
	fmt.Fprintf(&text, "# Tandem %s\n\n", d.Version)
	fmt.Fprintf(&text, "```\nhelm install tandem oci://%s --version %s --namespace %s --create-namespace\n```\n\n", d.Chart, d.Version, namespace)
	fmt.Fprintf(&text, "The chart names the image `%s@%s`, for linux/amd64 and linux/arm64. It is built from commit `%s`.\n\n", d.Image, d.ImageDigest, d.Commit)
	fmt.Fprintf(&text, "docs/user/install.md says how to verify the signatures, and how to install without a registry on the internet, with\n"+
		"`tandem-%s-airgap.tar`.\n\n", d.Version)
	if !d.Pinned {
		fmt.Fprint(&text, "This release was built with another toolchain than releases are made with: it is for tests only.\n\n")
	}
	return text.String() + b.source.changes + "\n"
}
