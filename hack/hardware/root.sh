#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a root directory with all that TestCluster needs, and packs it into parts for a machine with a GPU that has neither Go nor network.
# Environment: ROOT (the directory), PARTS (prefix of the archives), PROGRAMS (what make hardware builds), IMAGE (Tandem's image), CHART
# (deployments/helm), CACHE and CACHED (the cluster's programs: directories below CACHE).

set -eu

rm -rf "$ROOT"
mkdir -p "$ROOT"
for dir in bin sbin lib lib64; do
	[ ! -L "/$dir" ] || ln -s "usr/$dir" "$ROOT/$dir"
done
for dir in usr/bin usr/sbin usr/lib usr/lib64 etc proc sys dev run/nvidia/driver tmp root var/lib var/tmp opt; do
	mkdir -p "$ROOT/$dir"
done
chmod 1777 "$ROOT/tmp" "$ROOT/var/tmp"

# copy takes a file with all that it links to. On a merged system /bin is a link to /usr/bin.
copy() {
	case $1 in
	/bin/* | /sbin/* | /lib/* | /lib64/*) file=/usr$1 ;;
	*) file=$1 ;;
	esac
	[ -e "$file" ] || [ -L "$file" ] || return 0
	[ ! -d "$file" ] || [ -L "$file" ] || return 0
	[ ! -e "$ROOT$file" ] && [ ! -L "$ROOT$file" ] || return 0
	mkdir -p "$ROOT$(dirname "$file")"
	cp -a "$file" "$ROOT$file"
	[ -L "$file" ] || return 0
	target=$(readlink "$file")
	case $target in
	/*) copy "$target" ;;
	*) copy "$(dirname "$file")/$target" ;;
	esac
}

# The tools that hack/cluster starts, and those with which a reader looks around.
for package in coreutils util-linux mount dash bash libc6 libc-bin iproute2 iptables nftables conntrack kmod busybox-static grep sed tar gzip \
	findutils hostname procps crun; do
	dpkg-query --listfiles "$package"
done | grep -E '^/(usr/)?(bin|sbin|lib|lib64)/' | grep -vE '/(gconv|locale)/' | sort -u | while read -r path; do copy "$path"; done
for tool in iptables ip6tables iptables-save iptables-restore ip; do copy "/usr/sbin/$tool"; done
for plugin in ptp host-local; do copy "/usr/lib/cni/$plugin"; done
for file in passwd group nsswitch.conf protocols services ld.so.conf ld.so.conf.d os-release ssl/certs iproute2 login.defs shells; do
	mkdir -p "$ROOT/etc/$(dirname "$file")"
	[ ! -e "/etc/$file" ] || cp -aL "/etc/$file" "$ROOT/etc/$file"
done

mkdir -p "$ROOT/cache" "$ROOT/checkout/deployments"
cp -a "$PROGRAMS" "$ROOT/programs"
cp "$IMAGE" "$ROOT/programs/tandem.tar"
cp -a "$CHART" "$ROOT/checkout/deployments/"
for dir in $CACHED; do
	mkdir -p "$ROOT/cache/$(dirname "$dir")"
	cp -a "$CACHE/$dir" "$ROOT/cache/$dir"
done

find "$ROOT" -type f -perm -1 | while read -r file; do
	ldd "$file" 2>/dev/null | grep -oE '/[^ ]+' || true
done | sort -u | while read -r library; do copy "$library"; done
chroot "$ROOT" /sbin/ldconfig

# The tests ask the go command for the checkout, and look for these files where there are no packages. Nothing is compiled.
printf '#!/bin/sh\necho /checkout\n' > "$ROOT/usr/bin/go"
chmod 755 "$ROOT/usr/bin/go"
mkdir -p "$ROOT/usr/include"
touch "$ROOT/usr/bin/gcc" "$ROOT/usr/bin/pkg-config" "$ROOT/usr/include/stdio.h" "$ROOT/usr/include/seccomp.h"

rm -f "$PARTS"*
tar -C "$ROOT" -c . | xz -T0 -6 | split -b 40M - "$PARTS"
