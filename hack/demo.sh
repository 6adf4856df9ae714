#!/usr/bin/env bash
# Compiles and runs the demo: demo.sh [ARGUMENTS of the demo]. hack/cmd/programs is compiled first, because it reports the progress of the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
echo "demo: this takes half a minute, or about 15 minutes on two cores if nothing has been compiled yet"
hack/go.sh
flags=(-trimpath -buildvcs=false -gcflags=all=-dwarf=false -tags=grpcnotrace) # as gotool.BuildFlags
CGO_ENABLED=1 go build "${flags[@]}" -o bin/hack/ ./hack/cmd/programs
bin/hack/programs
CGO_ENABLED=1 go build "${flags[@]}" -o bin/hack/ ./hack/cmd/demo
exec bin/hack/demo "$@"
