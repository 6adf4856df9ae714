#!/usr/bin/env bash
# Runs every check and lists the failed ones at the end. `make update` repairs formatting, generated files and modules. With an argument,
# `hack/verify.sh linters`, it runs golangci-lint and nothing else.
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

# The product, its command line, the tools and the tests are modules; hack/tools pins the programs that verify runs.
modules=(. cli hack test)
packages=(./... ./cli/... ./hack/... ./test/...)

tidy() {
	local module
	for module in "${modules[@]}" hack/tools hack/tools/golangci; do
		go -C "$module" mod tidy -diff || return 1
	done
}

# The versions of the programs are independent of the product's: GOWORK=off.
tools() { GOWORK=off go -C hack/tools build -o ../../bin/tools/ tool; }

# generated files must be what their generators make of the sources now.
generated() {
	local before after
	before=$(git ls-files -m | xargs -r sha256sum)
	go generate ./api/... ./pkg/... ./hack/... || return 1
	after=$(git ls-files -m | xargs -r sha256sum)
	[ "$before" = "$after" ] || { git diff --stat; return 1; }
}

# race has a program read packages that are compiled with the race detector. The tests need them too, so each is compiled once.
race() { GOFLAGS="${GOFLAGS:-} -race" "$@"; }

scripts() { git ls-files -co --exclude-standard '*.sh' .ci/run | xargs shellcheck; }

# Commits before this one have longer subjects.
subjects() {
	git cat-file -e 0c70f3d 2>/dev/null || { echo "no history here: nothing to check"; return 0; }
	local long
	long=$(git log --format='%h %s' 0c70f3d..HEAD | awk 'length($0) - length($1) - 1 > 72')
	[ -z "$long" ] || { echo "longer than 72 characters:"; echo "$long"; return 1; }
}

# golangci-lint has many dependencies, so a module of its own pins it.
linters() {
	GOWORK=off go -C hack/tools/golangci build -o ../../../bin/tools/ tool &&
		bin/tools/golangci-lint run --allow-serial-runners "${packages[@]}"
}

case "$*" in
"")
	check formatting formatting
	check subjects subjects
	check tidy tidy
	check vet race go vet "${packages[@]}"
	check tools tools
	check staticcheck race bin/tools/staticcheck "${packages[@]}"
	check generated generated
	check scripts scripts
	check chart go test -count=1 ./deployments/...
	check rules go test -count=1 .
	;;
linters) check linters linters ;;
*)
	echo "verify: unknown argument: $*" >&2
	exit 2
	;;
esac

if [ ${#failed[@]} -gt 0 ]; then
	echo "verify: failed: ${failed[*]}"
	exit 1
fi
echo "verify: all checks passed"
