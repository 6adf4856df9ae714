#!/usr/bin/env bash
# Says what is missing where there is no Go, or one that is too old to fetch the one that go.mod asks for.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=$(awk '$1 == "go" { print $2 }' go.mod)
if ! command -v go >/dev/null; then
	echo "Go $wanted is not installed (neither in PATH nor in /usr/local/go/bin): see https://go.dev/doc/install" >&2
	exit 1
fi
if ! found=$(go env GOVERSION 2>&1); then
	echo "Go $wanted is needed: $found" >&2
	exit 1
fi
