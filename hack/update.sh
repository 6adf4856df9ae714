#!/usr/bin/env bash
# Rewrites what verify.sh compares. Read the difference before you commit it.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -co --exclude-standard '*.go' | xargs gofmt -w
go mod tidy
go -C hack/tools mod tidy
go generate ./api/... ./pkg/...
go test -count=1 ./deployments/helm ./pkg/driver ./pkg/nvml -update
