#!/usr/bin/env bash
# Prints the last line of `make dropin` from what tests have left in $DROPIN_RESULTS (test/dropin, Report). Fails where a result is
# missing, or where Tandem differs from NVIDIA's programs.
set -euo pipefail
if [ "$(id -u)" -ne 0 ]; then
	echo "dropin: not checked: only root can create its clusters and mount namespaces" >&2
	exit 1
fi
missing_ok=
if [ -n "${SHARD:-}" ]; then
	echo "dropin: SHARD=$SHARD: the other shards have some of the results"
	missing_ok=1
fi
# Before 1.36, quota does not count claims.
quota=
[[ ! "${KUBERNETES:-}" =~ ^v1\.3[45]\. ]] || quota=none
shopt -s nullglob
cat /dev/null "${DROPIN_RESULTS:?names the directory for results}"/* | awk -v missing_ok="$missing_ok" -v quota="$quota" '
	{ for (i = 1; i <= NF; i++) { split($i, result, "="); if (result[1] == "quota") quota = result[2]; else { sum[result[1]] += result[2]; seen[result[1]] = 1 } } }
	function number(key) { if (key in seen) return key "=" sum[key]; missing = missing " " key; return key "=?" }
	END {
		line = "dropin: " number("configurations") " " number("loaded") " " number("labels_differ") " " number("manifests") " " number("running")
		if (quota == "") missing = missing " quota"
		print line " quota=" (quota == "" ? "?" : quota)
		if (missing != "") print "dropin: no test has reported" missing > "/dev/stderr"
		if (missing_ok) exit sum["configurations"] != sum["loaded"] || sum["labels_differ"] != 0 || sum["manifests"] != sum["running"]
		exit !(missing == "" && sum["configurations"] > 0 && sum["configurations"] == sum["loaded"] && sum["labels_differ"] == 0 &&
			sum["manifests"] > 0 && sum["manifests"] == sum["running"] && quota ~ /^(ok|none)$/)
	}'
