#!/usr/bin/env bash
# Compiles and runs the demo: demo.sh [ARGUMENTS of the demo]. hack/cmd/programs is compiled first, because it reports the progress of the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
build() {
	# The flags are those of gotool.BuildFlags, with which the packages have been compiled.
	CGO_ENABLED=1 go build -trimpath -buildvcs=false -gcflags=all=-dwarf=false -tags=grpcnotrace -o "$@"
}
if [ "$EUID" -ne 0 ]; then
	echo "demo: needs root, for namespaces, mounts and device nodes: run it as root or with sudo" >&2
	exit 1
fi
case ${1:-} in
down) ;;
ui | shell)
	# Otherwise this script would compile for minutes before it finds no cluster.
	if [ ! -x bin/hack/demo ]; then
		echo "demo: the demo does not run: start it with make demo" >&2
		exit 1
	fi
	;;
*)
	echo "demo: this takes half a minute, or about 15 minutes on two cores if nothing has been compiled yet"
	hack/go.sh
	build bin/hack/ ./hack/cmd/programs
	# A shell does not forward signals.
	bin/hack/programs &
	readonly programs=$!
	trap 'kill -TERM $programs; wait $programs' TERM INT
	wait $programs
	trap - TERM INT
	;;
esac
build bin/hack/ ./test/cmd/demo
if [ "${1:-}" != down ]; then
	build bin/hack/ ./hack/cmd/cluster
	make --no-print-directory --silent kubectl-gpu
fi
exec bin/hack/demo "$@"
