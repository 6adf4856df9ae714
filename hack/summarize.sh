#!/usr/bin/env bash
# Reads `go test -v` and prints one line a top-level test and a package, and what a test logs by t.Log if it passes. Every failure is
# printed whole, and once more at the end, because CI shows the last lines only; every reason for a skip is printed.
set -euo pipefail
awk '
	# held is the output of the test that runs, said its lines of t.Log, why the part of it that says why it fails.
	function failed(line) { printf "%s", held; print line; again = again why line "\n" }
	function forget() { held = said = why = ""; lines = reason = 0; fflush() }
	/^=== (RUN|PAUSE|CONT|NAME)/ { next }
	# A subtest has its line after that of its test.
	/^ +--- PASS/ { next }
	/^ +--- (FAIL|SKIP)/ { print; if ($2 == "FAIL:") again = again $0 "\n"; next }
	/^--- FAIL/ { failed($0); forget(); next }
	/^--- SKIP/ { printf "%s", held; print; forget(); next }
	/^--- PASS/ { printf "%s", said; print; forget(); next }
	/^(ok|\?)[ \t]/ { print; forget(); next }
	/^FAIL[ \t]/ { failed($0); forget(); next }
	{ held = held $0 "\n" }
	/^ +[^ ]+_test\.go:[0-9]+:/ { said = said $0 "\n"; reason = 1 }
	/^(panic:|fatal error:|WARNING: DATA RACE|# |\*\*\* Test killed)|^[^ ]+\.go:[0-9]+:[0-9]+: / { reason = 2 }
	reason == 1 && !/_test\.go:[0-9]+:|^        / { reason = 0 }
	reason && lines++ < 40 { why = why $0 "\n" }
	END { printf "%s", held; if (again != "") printf "\nWhat failed, once more:\n%s", again }
'
