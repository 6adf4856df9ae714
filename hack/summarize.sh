#!/usr/bin/env bash
# Reads `go test -v` and prints one line a top-level test and a package, and what a test logs by t.Log if it passes. Every failure is
# printed whole, and once more at the end, because CI shows the last lines only; every reason for a skip is printed.
set -euo pipefail
awk '
	# By test: held is its output, said its lines of t.Log, why the part of the output that says why it fails.
	function failed(line) { printf "%s", held[test]; print line; again = again why[test] line "\n" }
	function forget() { delete held[test]; delete said[test]; delete why[test]; delete lines[test]; reason = 0; fflush() }
	# A package that ends leaves what a crash or a compiler has said.
	function rest() { for (test in held) { printf "%s", held[test]; again = again why[test] } }
	function forgetAll() { split("", held); split("", said); split("", why); split("", lines); test = ""; reason = 0; fflush() }
	# Parallel tests take turns: these lines say whose output follows.
	/^=== (RUN|PAUSE|CONT|NAME)/ { split($3, path, "/"); test = path[1]; reason = 0; next }
	# A subtest has its line after that of its test.
	/^ +--- PASS/ { next }
	/^ +--- (FAIL|SKIP)/ { print; if ($2 == "FAIL:") again = again $0 "\n"; next }
	/^--- (PASS|FAIL|SKIP)/ { test = $3 }
	/^--- FAIL/ { failed($0); forget(); next }
	/^--- SKIP/ { printf "%s", held[test]; print; forget(); next }
	/^--- PASS/ { printf "%s", said[test]; print; forget(); next }
	/^(ok|\?)[ \t]/ { print; forgetAll(); next }
	/^FAIL[ \t]/ { rest(); print; again = again $0 "\n"; forgetAll(); next }
	{ held[test] = held[test] $0 "\n" }
	/^ +[^ ]+_test\.go:[0-9]+:/ { said[test] = said[test] $0 "\n"; reason = 1 }
	# Of a crash the first lines tell, of messages the last.
	/^(panic:|fatal error:|WARNING: DATA RACE|# |\*\*\* Test killed)|^[^ ]+\.go:[0-9]+:[0-9]+: / { if (reason < 2) { why[test] = ""; lines[test] = 0 } reason = 2 }
	reason == 1 && !/_test\.go:[0-9]+:|^        / { reason = 0 }
	reason == 1 { why[test] = why[test] $0 "\n"; if (++lines[test] > 40) sub(/^[^\n]*\n/, "", why[test]) }
	reason == 2 && lines[test]++ < 40 { why[test] = why[test] $0 "\n" }
	END { rest(); if (again != "") printf "\nWhat failed, once more:\n%s", again }
'
