#!/usr/bin/env bash
# Unit and contract tests of everything but test/e2e and the chart, which is verify.sh's, with the race detector; names every package and test that ran.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=$(go list ./... | grep -v -e /test/e2e -e /deployments/helm)
# shellcheck disable=SC2086
go test -race -count=1 -timeout 15m -v $packages 2>&1 | hack/summarize.sh
