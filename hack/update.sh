#!/usr/bin/env bash
# Rewrites what verify.sh compares. Read the difference before you commit it.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -co --exclude-standard '*.go' | xargs gofmt -w
for module in . hack test hack/tools hack/tools/golangci; do go -C "$module" mod tidy; done
go generate ./api/... ./pkg/... ./simulated/... ./hack/...
go test -count=1 ./cmd/kubectl-gpu ./deployments/helm ./pkg/device ./pkg/doctor ./pkg/driver ./pkg/gpunode ./pkg/migrate ./pkg/nvml -update
