#!/usr/bin/env bash
# Prints the last line of `make dropin` from what tests have left in $DROPIN_RESULTS (test/dropin, Report). Fails where a result is
# missing, or where Tandem differs from NVIDIA's programs.
set -euo pipefail
if [ "$(id -u)" -ne 0 ]; then
	echo "dropin: skipped: only root can create its clusters and mount namespaces"
	exit 0
fi
shopt -s nullglob
cat /dev/null "${DROPIN_RESULTS:?names the directory for results}"/* | awk '
	{ for (i = 1; i <= NF; i++) { split($i, result, "="); if (result[1] == "quota") quota = result[2]; else { sum[result[1]] += result[2]; seen[result[1]] = 1 } } }
	function number(key) { if (key in seen) return key "=" sum[key]; missing = missing " " key; return key "=?" }
	END {
		line = "dropin: " number("configurations") " " number("loaded") " " number("labels_differ") " " number("manifests") " " number("running")
		if (quota == "") missing = missing " quota"
		print line " quota=" (quota == "" ? "?" : quota)
		if (missing != "") print "dropin: no test has reported" missing > "/dev/stderr"
		exit !(missing == "" && sum["configurations"] > 0 && sum["configurations"] == sum["loaded"] && sum["labels_differ"] == 0 &&
			sum["manifests"] > 0 && sum["manifests"] == sum["running"] && quota == "ok")
	}'
