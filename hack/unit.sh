#!/usr/bin/env bash
# Unit and contract tests with the race detector, except test/e2e, which needs clusters, and the chart, which verify.sh tests.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=$(go list ./... ./hack/... ./test/... | grep -v -e /test/e2e -e /deployments/helm)
# shellcheck disable=SC2086
go test -race -count=1 -timeout 1h -v $packages 2>&1 | hack/summarize.sh
