#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, those that are missing only, and downloads Go modules. Without
# chromium, tests of a web page in a browser are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
hack/go.sh
declare -A programs=([gcc]=gcc [libc6-dev]=/usr/include/stdio.h [shellcheck]=shellcheck)
missing=()
for package in "${!programs[@]}"; do
	command -v "${programs[$package]}" >/dev/null || [ -e "${programs[$package]}" ] || missing+=("$package")
done
# The lock and the options of package hack/apt: apt-get does not wait for another apt-get.
install() {
	echo "deps: installing $*"
	mkdir -p /run/lock
	local apt=(flock --close /run/lock/tandem-apt.lock apt-get -q -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
	"${apt[@]}" update && DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "$@"
}
may_install() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }
if ! command -v chromium >/dev/null && may_install && ! install chromium; then
	echo "deps: chromium could not be installed: tests in a browser are skipped, and make test fails"
fi
if [ ${#missing[@]} -gt 0 ]; then
	if ! may_install; then
		echo "deps: ${missing[*]} missing: install them, or run this as root on Debian, where it does so itself" >&2
		exit 1
	fi
	install "${missing[@]}"
fi
# Later steps download what is missing as well, but they try once.
for module in . cli hack test hack/tools hack/tools/golangci; do
	for pause in 5 10 20 0; do
		GOWORK=off go -C "$module" mod download && break
		[ "$pause" -gt 0 ] || echo "deps: not all modules of $module could be downloaded; a later step may fail" >&2
		sleep "$pause"
	done
done
