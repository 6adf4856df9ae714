#!/bin/sh
# Runs the tests of hardware beside which it lies. Arguments are those of a test binary: -test.run=Hardware/Cost.
# DRIVER_ROOT, DEV_ROOT, HOST_ROOT and NVML say where the driver is, if the agent does not find it by itself.
here=$(cd "$(dirname "$0")" && pwd) || exit
export TANDEM_HARDWARE_PROGRAMS="${TANDEM_HARDWARE_PROGRAMS:-$here}"
export TANDEM_HARDWARE_OUT="${TANDEM_HARDWARE_OUT:-$here/out}"
if ! "$here/hardware.test" -test.list=NONE >/dev/null 2>&1; then
	# This machine's C library is older than the one that the programs were built with.
	loader=$(echo "$here"/rootfs/lib*/ld-linux*)
	libraries=$(dirname "$(echo "$here"/rootfs/lib/*/libc.so.6)")
	export TANDEM_HARDWARE_LOADER="$loader --library-path $libraries"
fi
# shellcheck disable=SC2086 # the loader is a command line
exec $TANDEM_HARDWARE_LOADER "$here/hardware.test" -test.v -test.timeout=9m "$@"
