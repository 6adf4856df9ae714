#!/usr/bin/env bash
# Reads `go test -v` and prints one line a top-level test and a package, every failure whole, and every reason for a skip.
set -euo pipefail
awk '
	/^=== (RUN|PAUSE|CONT|NAME)/ { next }
	/^--- (PASS|FAIL|SKIP)/ { print; keep = ($2 != "PASS:"); next }
	/^ +--- (FAIL|SKIP)/ { print; keep = 1; next }
	/^ +--- PASS/ { keep = 0; next }
	/^(ok|FAIL|panic|\?)|WARNING: DATA RACE|^fatal error/ { print; keep = ($1 != "ok"); fflush(); next }
	/_test\.go:[0-9]+:/ { held = $0; print; next }
	keep { print }
'
