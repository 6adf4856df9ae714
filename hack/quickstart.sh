#!/usr/bin/env bash
# Prints the commands of the quick start for kind, as its readers copy them. A workflow runs them with kind, and TestQuickStartOnKind without.
set -euo pipefail
cd "$(dirname "$0")/.."
awk '/^## / { on = /^## On kind/ } on && /^```/ { inside = !inside; next } inside { print; found = 1 } END { exit !found }' docs/user/quick-start.md
