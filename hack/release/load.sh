#!/usr/bin/env bash
# Brings the image and the chart of this release to a cluster that cannot reach a registry on the internet.
set -euo pipefail
cd "$(dirname "$0")"

usage() {
	cat >&2 <<'EOF'
usage: load.sh import          on each node, as root: gives the image to containerd, under the name in the chart
       load.sh push REGISTRY   copies image and chart to a registry, such as registry.example.com/gpu
       load.sh check           compares the files with SHA256SUMS

push needs helm and one of crane, skopeo or oras, logged in to the registry.
EOF
	exit 2
}

# value prints a text of release.json, which has each on a line of its own.
value() { sed -n "s/^  \"$1\": \"\\(.*\\)\",\\{0,1\\}$/\\1/p" release.json; }

version=$(value version)
digest=$(value imageDigest)

check() { sha256sum --check --quiet --strict SHA256SUMS; }

import() {
	check
	tar -C image -cf - . | ctr --namespace=k8s.io images import -
}

push() {
	local registry=$1
	check
	if command -v crane >/dev/null; then
		crane push image "$registry/tandem:$version"
	elif command -v skopeo >/dev/null; then
		skopeo copy --all --preserve-digests "oci:image:$version" "docker://$registry/tandem:$version"
	elif command -v oras >/dev/null; then
		oras cp --from-oci-layout "image:$version" "$registry/tandem:$version"
	else
		echo "load.sh: none of crane, skopeo and oras is installed" >&2
		exit 1
	fi
	helm push "tandem-$version.tgz" "oci://$registry/charts"
	cat <<EOF
Install it with

  helm install tandem oci://$registry/charts/tandem --version $version \\
    --namespace tandem-system --create-namespace --set image.repository=$registry/tandem

The image is $registry/tandem@$digest.
EOF
}

case "${1-}:$#" in
check:1) check ;;
import:1) import ;;
push:2) push "$2" ;;
*) usage ;;
esac
