#!/usr/bin/env bash
# Compiles what the demo needs and runs it: demo.sh [ARGUMENTS of the demo]. The first program to be compiled tells how far the rest is.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "demo: takes half a minute, or about 15 minutes on two cores where nothing is compiled yet"
hack/go.sh
flags=(-trimpath -buildvcs=false -gcflags=all=-dwarf=false -tags=grpcnotrace) # as gotool.BuildFlags
CGO_ENABLED=1 go build "${flags[@]}" -o bin/hack/ ./hack/cmd/programs
bin/hack/programs
CGO_ENABLED=1 go build "${flags[@]}" -o bin/hack/ ./hack/cmd/demo
exec bin/hack/demo "$@"
