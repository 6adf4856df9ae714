// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/hack/binaries"
)

// namespace is where the manifest installs, as the pages for users have it.
const namespace = "tandem-system"

// makeChart writes the chart, whose default values name the image by digest, and the manifest that this chart gives.
func (b build) makeChart(ctx context.Context, d Description) error {
	fmt.Fprintln(b.Progress, "packaging the chart")
	staged := filepath.Join(b.work, "tandem")
	if err := os.CopyFS(staged, os.DirFS(filepath.Join(b.Root, chartPath))); err != nil {
		return fmt.Errorf("copy chart: %w", err)
	}
	values := filepath.Join(staged, "values.yaml")
	data, err := os.ReadFile(values)
	if err != nil {
		return fmt.Errorf("read values of the chart: %w", err)
	}
	pinned, err := pin(string(data), d.Image, d.ImageDigest)
	if err != nil {
		return err
	}
	if err := os.WriteFile(values, []byte(pinned), 0o644); err != nil {
		return fmt.Errorf("write values of the chart: %w", err)
	}
	// Helm copies the times of the files into the archive.
	if err := setTimes(staged, b.source.time()); err != nil {
		return err
	}
	if _, err := binaries.Helm().Output(ctx, b.work, "package", staged, "--destination", b.result); err != nil {
		return err
	}
	rendered, err := binaries.Helm().Output(ctx, b.work, "template", "tandem", filepath.Join(b.result, d.ChartFile), "--namespace", namespace, "--no-hooks")
	if err != nil {
		return err
	}
	return b.write(manifest, fmt.Sprintf(manifestHead, d.Version, namespace)+rendered)
}

// manifestHead precedes what helm template prints: the namespace, which Helm makes by an option. Pod Security would refuse the agent, which
// is privileged by default.
const manifestHead = `# Tandem %s with the chart's default values. It is installed by kubectl apply --server-side -f install.yaml.
apiVersion: v1
kind: Namespace
metadata:
  name: %s
  labels:
    pod-security.kubernetes.io/enforce: privileged
`

// unpinned is how values.yaml of the checkout begins: there is no image of a checkout.
const unpinned = `# There is no public image yet. Build and push one with
# ` + "`make image-push IMAGE=registry.example.com/gpu/tandem:TAG`." + `
image:
  # Registry and repository without a tag, for example registry.example.com/gpu/tandem. Required.
  repository: ""
  # Empty: the chart's appVersion.
  tag: ""
  # sha256:… pins the image. The tag is then ignored.
  digest: ""
`

const pinnedValues = `# The image of this release. For a mirror set repository only: the digest is the same there.
image:
  # Registry and repository without a tag.
  repository: %s
  # Empty: the chart's appVersion.
  tag: ""
  # sha256:… pins the image. The tag is then ignored. Set "" together with a tag for another image.
  digest: %s
`

// pin puts repository and digest into the values of the chart and leaves the rest, with its comments, as it is.
func pin(values, repository, digest string) (string, error) {
	rest, ok := strings.CutPrefix(values, unpinned)
	if !ok {
		return "", fmt.Errorf("pin image %s in values.yaml: it does not begin as hack/release expects", repository)
	}
	return fmt.Sprintf(pinnedValues, repository, digest) + rest, nil
}

func setTimes(dir string, to time.Time) error {
	files, err := regularFiles(dir)
	if err != nil {
		return err
	}
	for _, name := range files {
		if err := os.Chtimes(filepath.Join(dir, name), to, to); err != nil {
			return fmt.Errorf("set time of %s: %w", name, err)
		}
	}
	return nil
}
