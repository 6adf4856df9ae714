// SPDX-License-Identifier: Apache-2.0

package release

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

var commitOfAction = regexp.MustCompile(`^[\w./-]+@[0-9a-f]{40}$`)

// The workflow that has the rights to publish runs actions of known commits only, and no job has rights that it does not name.
func TestWorkflow(t *testing.T) {
	root, err := gotool.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var workflow struct {
		Permissions map[string]string
		Jobs        map[string]struct {
			Permissions map[string]string
			Steps       []struct{ Uses, Run string }
		}
	}
	text := mustRead(t, filepath.Join(root, ".github", "workflows", "release.yaml"))
	if err := yaml.Unmarshal([]byte(text), &workflow); err != nil {
		t.Fatal(err)
	}
	if len(workflow.Permissions) != 1 || workflow.Permissions["contents"] != "read" || len(workflow.Jobs["build"].Permissions) != 0 {
		t.Errorf("the workflow may %v, its job build %v", workflow.Permissions, workflow.Jobs["build"].Permissions)
	}
	actions := 0
	for name, job := range workflow.Jobs {
		for _, step := range job.Steps {
			if step.Uses != "" {
				actions++
				if !commitOfAction.MatchString(step.Uses) {
					t.Errorf("%s uses %s, which is not a commit", name, step.Uses)
				}
			}
			// The text of a tag or a secret must not become a command.
			if strings.Contains(step.Run, "${{") {
				t.Errorf("%s runs %q: expressions belong into env", name, step.Run)
			}
		}
	}
	if actions == 0 {
		t.Error("no action found")
	}
}
