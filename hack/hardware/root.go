// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/hack/progress"
)

// Root packs a root directory with all that TestCluster needs into dir, for a machine with a GPU that has neither Go nor network: archives
// root.tar.xz.aa and so on of at most 40 MiB, which are one file, the script inside.sh, and a static busybox that unpacks them.
// The C library and the tools are those of this machine, which must be a Debian.
func (p Programs) Root(ctx context.Context, dir string, out io.Writer) error {
	checkout, err := gotool.Root(ctx)
	if err != nil {
		return err
	}
	log := progress.New(out)
	set, err := binaries.Ensure(ctx, binaries.Options{Progress: log})
	if err != nil {
		return err
	}
	archive, _, err := image.Build(ctx, image.Options{Progress: log})
	if err != nil {
		return err
	}
	var cached []string
	for _, path := range []string{set.Etcd, set.Containerd, set.Runc, set.Helm, filepath.Dir(set.Pause), set.Kubernetes(binaries.DefaultKubernetes)} {
		below, err := filepath.Rel(set.Cache, path)
		if err != nil {
			return err
		}
		cached = append(cached, below)
	}
	script, err := sources.ReadFile("root.sh")
	if err != nil {
		return err
	}
	inside, err := sources.ReadFile("inside.sh")
	if err != nil {
		return err
	}
	busybox, err := os.ReadFile("/usr/bin/busybox")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	log.Say("packing the root directory, which takes minutes")
	cmd := exec.CommandContext(ctx, "sh", "-c", string(script))
	cmd.Env = append(os.Environ(), "ROOT="+filepath.Join(dir, "root"), "PARTS="+filepath.Join(dir, "root.tar.xz."), "PROGRAMS="+p.Dir,
		"IMAGE="+archive, "CHART="+filepath.Join(checkout, "deployments", "helm"), "CACHE="+set.Cache, "CACHED="+strings.Join(cached, " "))
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("make root directory %s: %w: %s", dir, err, strings.TrimSpace(said.String()))
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "inside.sh"), inside, 0o755),
		os.WriteFile(filepath.Join(dir, "busybox"), busybox, 0o755),
	)
}
