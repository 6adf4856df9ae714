// SPDX-License-Identifier: Apache-2.0

// Package version says which build this is. hack/image sets it at link time; it decides
// nothing.
package version

var (
	// Version is the release, without a leading v, or "dev".
	Version = "dev"
	// Commit is the git commit the binary was built from, with "-dirty" where the tree had changes; empty when unknown.
	Commit = ""
)

// String is what --version prints and metrics and the user agent carry: "dev", or "0.1.0 (1a2b3c4d5e6f)".
func String() string {
	if Commit == "" {
		return Version
	}
	return Version + " (" + Commit + ")"
}
