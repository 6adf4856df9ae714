# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# First process of a machine, in fresh mount, network, PID, UTS and IPC namespaces. Environment: NAME, ROOT (directory that
# becomes /), GROUP (cgroup name), HIERARCHIES (lines "mountpoint options"), TREES (directories of the host's root to show),
# MOUNTS (lines "source target ro|rw"), RUN_OPTIONS (further ones of the mount at /run, each after a comma), BOOT_ID, PAUSE (program to
# become), SECOND (script to run in the cgroup namespace).

set -eu

# Begin only when told to: by then the one who started us has written down who we are.
read -r _

# From here on no mount reaches the host.
mount --make-rprivate /
hostname "$NAME"

while read -r dir _; do
  echo 0 > "$dir/$GROUP/cgroup.procs"
done <<EOF
$HIERARCHIES
EOF

mount --bind "$ROOT" "$ROOT"
cd "$ROOT"
for tree in $TREES; do
  mount --rbind "/$tree" "$tree"
  mount -o remount,bind,ro "$tree"
done

mount -t proc -o nosuid,nodev,noexec proc proc
mount -t sysfs -o nosuid,nodev,noexec sysfs sys
mount -t tmpfs -o "mode=755,size=512m$RUN_OPTIONS" tmpfs run
mkdir run/lock

mount -t tmpfs -o mode=755,size=4m tmpfs dev
mknod -m 666 dev/null c 1 3
mknod -m 666 dev/zero c 1 5
mknod -m 666 dev/full c 1 7
mknod -m 666 dev/random c 1 8
mknod -m 666 dev/urandom c 1 9
mknod -m 666 dev/tty c 5 0
mknod -m 644 dev/kmsg c 1 11
mkdir dev/pts dev/shm dev/mqueue
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o mode=1777,size=64m tmpfs dev/shm
mount -t mqueue mqueue dev/mqueue
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr

# kubelet writes settings of the whole kernel; here it writes to copies. The boot ID is the machine's own.
mkdir run/.machine
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
    kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  copy=run/.machine/$(echo "$setting" | tr / .)
  cat "proc/sys/$setting" > "$copy"
  mount --bind "$copy" "proc/sys/$setting"
done
echo "$BOOT_ID" > run/.machine/boot_id
mount --bind run/.machine/boot_id proc/sys/kernel/random/boot_id

while read -r source target mode; do
  [ -n "$source" ] || continue
  if [ -d "$source" ]; then
    [ -d ".$target" ] || mkdir -p ".$target"
  elif [ ! -e ".$target" ]; then
    mkdir -p ".$(dirname "$target")"
    : > ".$target"
  fi
  mount --rbind "$source" ".$target"
  [ "$mode" = rw ] || mount -o remount,bind,ro ".$target"
done <<EOF
$MOUNTS
EOF

mkdir -p .host
pivot_root . .host
cd /
umount -l /.host
rmdir /.host
exec unshare --cgroup /bin/sh -c "$SECOND"
