#!/usr/bin/env bash
# Runs every check and says at the end which ones failed; `make update` mends what can be mended.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

failed=()
check() {
	local name=$1 start=$SECONDS
	shift
	echo "verify: $name"
	if "$@"; then
		echo "verify: $name ok ($((SECONDS - start)) s)"
	else
		echo "verify: $name FAILED ($((SECONDS - start)) s)"
		failed+=("$name")
	fi
}

formatting() {
	local files
	files=$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l)
	[ -z "$files" ] || { echo "not formatted: $files"; return 1; }
}

tidy() { go mod tidy -diff && go -C hack/tools mod tidy -diff; }

# generated files must be what their generators make of the sources now.
generated() {
	local before after
	before=$(git ls-files -m | xargs -r sha256sum)
	go generate ./api/... ./pkg/... || return 1
	after=$(git ls-files -m | xargs -r sha256sum)
	[ "$before" = "$after" ] || { git diff --stat; return 1; }
}

scripts() { git ls-files -co --exclude-standard '*.sh' .ci/run | xargs shellcheck; }

check formatting formatting
check tidy tidy
check vet go vet ./...
check staticcheck go tool -modfile=hack/tools/go.mod staticcheck ./...
check generated generated
check scripts scripts
check chart go test -count=1 ./deployments/...

if [ ${#failed[@]} -gt 0 ]; then
	echo "verify: failed: ${failed[*]}"
	exit 1
fi
echo "verify: all checks passed"
