#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of hardware in the directory that root.sh has made, as root: unshare --mount inside.sh DIRECTORY [ARGUMENTS of the test binary].
# The directory becomes the root; the machine's own root, with its driver, is then below /run/nvidia/driver, as GPU Operator has it.

set -eu

root=$1
shift
mount --make-rprivate /
mount --bind "$root" "$root"
for dir in proc sys dev; do
	mount --rbind "/$dir" "$root/$dir"
done
cd "$root"
pivot_root . run/nvidia/driver
cd /checkout
unset LD_LIBRARY_PATH LD_PRELOAD
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C TANDEM_CACHE=/cache TANDEM_HARDWARE_PROGRAMS=/programs \
	TANDEM_HARDWARE_OUT=/out TANDEM_HARDWARE_IMAGE=/programs/tandem.tar
exec /programs/hardware.test -test.v -test.timeout=9m "$@"
