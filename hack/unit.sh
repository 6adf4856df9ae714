#!/usr/bin/env bash
# Runs the tests of packages with the race detector: hack/unit.sh PACKAGE... Without an argument, those of all packages but test/e2e, which
# needs clusters, those that boot an API server, which make test runs as parts of their own, and the chart, which verify.sh tests, as it does
# vet. $TEST_RESULTS is a file for the events.
set -euo pipefail
cd "$(dirname "$0")/.."
# Tests make and remove many files, which takes a multiple on ext4. Where root may, they have a tmpfs, whose mount ends with the last process.
# The go command keeps its own directory: the pages of a test program on a tmpfs would count as shared memory.
readonly tmp=/var/tmp/unit
run=()
if [ $# -eq 0 ] && [ "$(id -u)" -eq 0 ]; then
	if [ -z "${UNIT_MOUNTS:-}" ]; then
		mkdir -p "$tmp"
		UNIT_MOUNTS=1 exec unshare --mount --propagation private "$0"
	fi
	mount -t tmpfs -o mode=1777 tandem-unit "$tmp"
	run=(-exec "env TMPDIR=$tmp")
fi
GOWORK=off go -C hack/tools build -o ../../bin/tools/ gotest.tools/gotestsum
packages=${*:-$(go list ./... ./hack/... ./test/... | grep -v -E '/test/(e2e|contract|facts|intruder)$|/deployments/helm')}
# shellcheck disable=SC2086
exec bin/tools/gotestsum --format pkgname ${TEST_RESULTS:+--jsonfile "$TEST_RESULTS"} -- \
	"${run[@]}" -race -vet=off -count=1 -parallel 16 -timeout 1h $packages
