#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, those that are missing only.
set -euo pipefail
"$(dirname "$0")/go.sh"
declare -A programs=([gcc]=gcc [libc6-dev]=/usr/include/stdio.h [shellcheck]=shellcheck)
missing=()
for package in "${!programs[@]}"; do
	command -v "${programs[$package]}" >/dev/null || [ -e "${programs[$package]}" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
	echo "deps: ${missing[*]} missing: install them, or run this as root on Debian, where it does so itself" >&2
	exit 1
fi
echo "deps: installing ${missing[*]}"
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
