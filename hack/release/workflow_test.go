// SPDX-License-Identifier: Apache-2.0

package release

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/tandem-gpu/tandem/hack/binaries"
	"github.com/tandem-gpu/tandem/hack/gotool"
)

var commitOfAction = regexp.MustCompile(`^[\w./-]+@[0-9a-f]{40}$`)

type workflow struct {
	Permissions map[string]string
	Jobs        map[string]job
}

type job struct {
	Permissions     map[string]string
	Uses, If        string
	ContinueOnError any `json:"continue-on-error"`
	Needs           any
	Strategy        struct{ Matrix map[string][]string }
	With            map[string]string
	Steps           []struct {
		Uses, Run, If   string
		ContinueOnError any `json:"continue-on-error"`
		Env             map[string]string
	}
}

// workflows are the texts of the workflows by the names of the files, and the Makefile.
func workflows(t *testing.T) map[string]string {
	t.Helper()
	root, err := gotool.Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*"))
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	texts := map[string]string{}
	for _, path := range append(paths, filepath.Join(root, "Makefile")) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		texts[filepath.Base(path)] = string(text)
	}
	return texts
}

func parse(t *testing.T, text string) (w workflow) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(text), &w); err != nil {
		t.Fatal(err)
	}
	return w
}

// Workflows run actions of known commits only. In the one that has the rights to publish, no job has rights that it does not name.
func TestWorkflow(t *testing.T) {
	actions := 0
	for file, text := range workflows(t) {
		if file == "Makefile" {
			continue
		}
		w := parse(t, text)
		if len(w.Permissions) != 1 || w.Permissions["contents"] != "read" {
			t.Errorf("%s may %v", file, w.Permissions)
		}
		for name, job := range w.Jobs {
			if name != "publish" && len(job.Permissions) != 0 {
				t.Errorf("%s: %s may %v", file, name, job.Permissions)
			}
			if job.Uses != "" && !strings.HasPrefix(job.Uses, "./.github/workflows/") {
				t.Errorf("%s: %s is a workflow of another repository: %s", file, name, job.Uses)
			}
			for _, step := range job.Steps {
				if step.Uses != "" {
					actions++
					if !commitOfAction.MatchString(step.Uses) {
						t.Errorf("%s: %s uses %s, which is not a commit", file, name, step.Uses)
					}
				}
				// The text of a tag or a secret must not become a command.
				if strings.Contains(step.Run, "${{") {
					t.Errorf("%s: %s runs %q: expressions belong into env", file, name, step.Run)
				}
			}
		}
	}
	if actions == 0 {
		t.Error("no action found")
	}
}

// gate lists what lets a release pass that not all tests have proven.
func gate(t *testing.T, texts map[string]string) (holes []string) {
	t.Helper()
	release, test, long := parse(t, texts["release.yaml"]), parse(t, texts["test.yaml"]), parse(t, texts["long.yaml"])
	want := func(ok bool, format string, args ...any) {
		if !ok {
			holes = append(holes, fmt.Sprintf(format, args...))
		}
	}
	want(fmt.Sprint(release.Jobs["publish"].Needs) == "build", "publish does not need build")
	want(fmt.Sprint(release.Jobs["build"].Needs) == "[test long]", "build needs %v", release.Jobs["build"].Needs)
	versions := []string{binaries.KnownKubernetes[0], binaries.DefaultKubernetes}
	called := release.Jobs["test"]
	want(called.Uses == "./.github/workflows/test.yaml" && called.With["kubernetes"] == "${{ matrix.kubernetes }}" &&
		reflect.DeepEqual(called.Strategy.Matrix, map[string][]string{"kubernetes": versions}), "test does not run on %v", versions)
	want(release.Jobs["long"].Uses == "./.github/workflows/long.yaml", "long does not run test-long")
	runs := func(w workflow, run string, env, matrix map[string]string) {
		job, found := w.Jobs["test"], false
		for _, step := range job.Steps {
			found = found || step.Run == run && reflect.DeepEqual(step.Env, env)
		}
		want(found, "no step runs %s with %v", run, env)
		got := map[string]string{}
		for name, values := range job.Strategy.Matrix {
			got[name] = strings.Join(values, " ")
		}
		want(reflect.DeepEqual(got, matrix), "%s runs for %v, want %v", run, got, matrix)
	}
	runs(test, "make test", map[string]string{"KUBERNETES": "${{ inputs.kubernetes }}", "SHARD": "${{ matrix.shard }}"},
		map[string]string{"shard": "1/3 2/3 3/3"})
	runs(long, `make deps "$PART"`, map[string]string{"PART": "${{ matrix.part }}"}, map[string]string{"part": strings.Join(longParts(t, texts["Makefile"]), " ")})
	for file, w := range map[string]workflow{"release": release, "test": test, "long": long} {
		for name, job := range w.Jobs {
			want(job.If == "" && job.ContinueOnError == nil, "%s: %s has a condition", file, name)
			for _, step := range job.Steps {
				want(step.If == "" && step.ContinueOnError == nil, "%s: a step of %s has a condition", file, name)
			}
		}
	}
	return holes
}

// longParts are the parts of make test-long that prove something.
func longParts(t *testing.T, makefile string) []string {
	t.Helper()
	match := regexp.MustCompile(`(?m)^long_parts := ((?:.*\\\n)*.*)$`).FindStringSubmatch(makefile)
	if match == nil {
		t.Fatal("the Makefile has no long_parts")
	}
	parts := strings.Fields(strings.ReplaceAll(match[1], `\`, " "))
	return slices.DeleteFunc(parts, func(part string) bool { return part == "deps" || part == "programs" })
}

// A release needs a job that played everything on the oldest and the newest Kubernetes, and make test-long. The test finds each hole that
// is made in that.
func TestReleaseNeedsAllTests(t *testing.T) {
	if holes := gate(t, workflows(t)); len(holes) > 0 {
		t.Errorf("holes in the gate: %q", holes)
	}
	for _, hole := range []struct{ file, old, now string }{
		{"release.yaml", "    needs: [test, long]\n", ""},
		{"release.yaml", "    needs: [test, long]\n", "    needs: [test]\n"},
		{"release.yaml", "    needs: build\n", ""},
		{"release.yaml", "kubernetes: [v1.34.10, v1.37.2]", "kubernetes: [v1.37.2]"},
		{"release.yaml", "    with: {kubernetes: \"${{ matrix.kubernetes }}\"}\n", ""},
		{"release.yaml", "    uses: ./.github/workflows/long.yaml\n", "    uses: ./.github/workflows/test.yaml\n"},
		{"release.yaml", "  build:\n", "  build:\n    if: always()\n"},
		{"test.yaml", `["1/3", "2/3", "3/3"]`, `["1/3", "2/3"]`},
		{"test.yaml", "run: make test\n", "run: make unit\n"},
		{"test.yaml", "      - run: make test\n", "      - run: make test\n        continue-on-error: true\n"},
		{"long.yaml", "          - torture-mig\n", ""},
		{"Makefile", " scale ", " scale another "},
	} {
		texts := workflows(t)
		cut := strings.Replace(texts[hole.file], hole.old, hole.now, 1)
		if cut == texts[hole.file] {
			t.Errorf("%s does not have %q", hole.file, hole.old)
		}
		texts[hole.file] = cut
		if len(gate(t, texts)) == 0 {
			t.Errorf("%s with %q in the place of %q is no hole", hole.file, hole.now, hole.old)
		}
	}
}

// make test-long plays the stories on the newest release of each other minor version.
func TestOtherVersions(t *testing.T) {
	newest := map[string]string{}
	for _, version := range binaries.KnownKubernetes {
		newest[version[:strings.LastIndex(version, ".")]] = version // oldest first
	}
	parts := longParts(t, workflows(t)["Makefile"])
	for _, version := range newest {
		if slices.Contains(parts, "e2e-"+version) == (version == binaries.DefaultKubernetes) {
			t.Errorf("stories on %s: the parts are %v", version, parts)
		}
	}
}
