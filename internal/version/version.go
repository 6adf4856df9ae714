// SPDX-License-Identifier: Apache-2.0

// Package version has the version of this build. hack/image sets it at link time.
package version

var (
	// Version is the release, without a leading v, or "dev".
	Version = "dev"
	// Commit is the git commit the binary was built from, with "-dirty" if the tree had changes; empty if unknown.
	Commit = ""
)

// String returns the text for --version, metrics and the user agent: "dev", or "0.1.0 (1a2b3c4d5e6f)".
func String() string {
	if Commit == "" {
		return Version
	}
	return Version + " (" + Commit + ")"
}

// Page returns the address of a page of the documentation, a path in the repository, for a release. Other builds get the newest page.
func Page(release, path string) string {
	revision := "main"
	if release != "" && release != "dev" {
		revision = "v" + release
	}
	return "https://github.com/tandem-gpu/tandem/blob/" + revision + "/" + path
}
