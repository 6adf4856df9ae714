#!/usr/bin/env bash
# Runs the tests of packages with the race detector: hack/unit.sh PACKAGE... Without an argument it runs all packages but some. test/e2e needs
# clusters. make test has parts of its own for packages that boot an API server. verify.sh tests the chart and the repository's rules, and runs
# vet. The tests in "computing" run without the race detector. $TEST_RESULTS is a file for the events.
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
# Another run of this script may be using it.
[ bin/tools/gotestsum -nt hack/tools/go.sum ] || GOWORK=off go -C hack/tools build -o ../../bin/tools/ gotest.tools/gotestsum
# play EVENTS ARGUMENT... runs go test.
play() {
	local events=$1
	shift
	# The flags before -vet are those of gotool.BuildFlags. Without debug information, linking takes a third less time, and what runs without the
	# race detector finds most packages in the build cache. Stack traces still have names.
	exec bin/tools/gotestsum --format pkgname ${events:+--jsonfile "$events"} -- "${run[@]}" \
		-trimpath -buildvcs=false -gcflags=all=-dwarf=false -tags=grpcnotrace -vet=off -count=1 -timeout 1h "$@"
}
if [ $# -gt 0 ]; then
	play "${TEST_RESULTS:-}" -race -parallel 16 "$@"
fi

# These tests mostly compute, encrypt, compress, compile or start processes, and the race detector makes them two to forty times slower. Other
# tests run the same code with it. TestComputingTests of repo_test.go reads both lines.
readonly computing='^(TestSelfTest|TestFailedAdmissions|TestOptimum|TestOurOrderPacksBetter|TestEachFunctionMayBeMissing|TestProfileOfARecording|TestBuild|TestEqualInputsGiveEqualImages|TestPush|TestRelease|TestRotation|TestRulesAsTheScheduler|TestSameSeedSameTrace|TestRestarts)$'
readonly of=(./test/simulation ./test/restarts ./pkg/webhook ./test/packing ./pkg/nvml ./pkg/controller ./hack/image ./hack/release)
# go test begins packages in this order. The slowest come first: the last would run alone, on one core. Two more than there are cores run at a
# time, because some mostly wait.
listed=$(go list ./pkg/agent ./pkg/nvml ./test/restarts ./test/simulation ./test/dropin ./test/... ./hack/... ./cli/... ./... |
	grep -v -E '/test/(e2e|contract|facts|intruder|packing)$|/deployments/helm|^github.com/tandem-gpu/tandem$')
mapfile -t packages <<<"$listed"
set -m # each part is a process group, which ends as a whole
play "${TEST_RESULTS:+$TEST_RESULTS.computing}" -run "$computing" "${of[@]}" &
readonly computes=$!
play "${TEST_RESULTS:-}" -race -parallel 16 -p "$(($(nproc) + 2))" -skip "$computing" "${packages[@]}" &
readonly races=$!
# A shell does not forward signals.
trap 'kill -TERM -- -$computes -$races; wait' TERM INT
failed=0
wait "$computes" || failed=1
wait "$races" || failed=1
if [ -n "${TEST_RESULTS:-}" ]; then
	cat "$TEST_RESULTS.computing" >>"$TEST_RESULTS"
	rm "$TEST_RESULTS.computing"
fi
exit $failed
