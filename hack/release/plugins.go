// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// plugin is the command that users run on their own machines, whatever these are.
const plugin = "kubectl-gpu"

var platforms = []struct{ os, arch string }{
	{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "amd64"}, {"darwin", "arm64"}, {"windows", "amd64"}, {"windows", "arm64"},
}

// makePlugins builds the plugin of kubectl for every platform and returns the paths of the programs.
func (b build) makePlugins(ctx context.Context) ([]string, error) {
	if b.NoPlugins {
		return nil, nil
	}
	var programs []string
	for _, p := range platforms {
		program := filepath.Join(b.result, fmt.Sprintf("%s-%s-%s", plugin, p.os, p.arch))
		if p.os == "windows" {
			program += ".exe"
		}
		fmt.Fprintf(b.Progress, "compiling %s for %s/%s\n", plugin, p.os, p.arch)
		cmd := gotool.Command(ctx, b.work, append([]string{"CGO_ENABLED=0", "GOOS=" + p.os, "GOARCH=" + p.arch}, gotool.FixedEnv...),
			"build", "-trimpath", "-buildvcs=false", "-o", program, "-ldflags", gotool.LDFlags(b.source.version, b.source.commit), "./cli/"+plugin)
		cmd.Dir = b.Root
		if output, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("compile %s for %s/%s: %w\n%s", plugin, p.os, p.arch, err, strings.TrimSpace(string(output)))
		}
		programs = append(programs, program)
	}
	return programs, nil
}
