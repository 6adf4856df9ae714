#!/usr/bin/env bash
# Runs the tests of packages with the race detector: hack/unit.sh PACKAGE... Without an argument, those of all packages but test/e2e, which
# needs clusters, those that boot an API server, which make test runs as parts of their own, and the chart, which verify.sh tests, as it does
# vet. $TEST_RESULTS is a file for the events.
set -euo pipefail
cd "$(dirname "$0")/.."
# Tests make and remove many files, which takes a multiple on ext4. Where root may, each test program has a tmpfs, which ends with it. The
# program itself stays on disk: pages of a program on a tmpfs would count as shared memory.
run=()
if [ $# -eq 0 ] && [ "$(id -u)" -eq 0 ]; then
	readonly tmp=/var/tmp/unit
	mkdir -p "$tmp"
	run=(-exec "unshare --mount --propagation private sh -c 'mount -t tmpfs -o mode=1777 unit $tmp && TMPDIR=$tmp exec \"\$0\" \"\$@\"'")
fi
GOWORK=off go -C hack/tools build -o ../../bin/tools/ gotest.tools/gotestsum
# go test begins packages in this order. The slowest come first: the last would run alone, on one core.
packages=${*:-$(go list ./test/simulation ./pkg/webhook ./pkg/nvml ./test/... ./hack/... ./cli/... ./... | grep -v -E '/test/(e2e|contract|facts|intruder)$|/deployments/helm')}
# shellcheck disable=SC2086
exec bin/tools/gotestsum --format pkgname ${TEST_RESULTS:+--jsonfile "$TEST_RESULTS"} -- \
	"${run[@]}" -race -vet=off -count=1 -parallel 16 -timeout 1h $packages
