# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=sh
# Second half of setup.sh, in the machine's cgroup namespace: its cgroup is the root of what is mounted here.

set -eu

mounted=no
while read -r dir options; do
  if [ "$options" = v2 ]; then
    mount -t cgroup2 cgroup2 "$dir"
    # A group that delegates controllers may hold no process itself.
    mkdir "$dir/system"
    echo 0 > "$dir/system/cgroup.procs"
    tr ' ' '\n' < "$dir/cgroup.controllers" | while read -r controller; do
      echo "+$controller" > "$dir/cgroup.subtree_control"
    done
    continue
  fi
  [ $mounted = yes ] || mount -t tmpfs -o mode=755,size=1m tmpfs /sys/fs/cgroup
  mounted=yes
  mkdir "$dir"
  mount -t cgroup -o "$options" cgroup "$dir"
  mkdir "$dir/system"
  echo 0 > "$dir/system/cgroup.procs"
  for part in $(basename "$dir" | tr , ' '); do
    [ -e "/sys/fs/cgroup/$part" ] || ln -s "$(basename "$dir")" "/sys/fs/cgroup/$part"
  done
done <<EOF
$HIERARCHIES
EOF

# Pods that ask for mount propagation need a shared tree; its only peers are this machine's.
mount --make-rshared /
echo ready >&3
exec 3>&-
exec "$PAUSE" < /dev/null > /dev/null 2>&1
