#!/usr/bin/env bash
# Rewrites what verify.sh compares. Read the difference before you commit it.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -co --exclude-standard '*.go' | xargs gofmt -w
for module in . cli hack test hack/tools hack/tools/golangci; do go -C "$module" mod tidy; done
go generate ./api/... ./pkg/... ./simulated/... ./hack/...
go test -count=1 ./cli/doctor ./cli/kubectl-gpu ./cli/migrate ./deployments/helm ./pkg/device ./pkg/driver ./pkg/gpunode ./pkg/nvml -update
