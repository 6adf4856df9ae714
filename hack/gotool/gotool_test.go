// SPDX-License-Identifier: Apache-2.0

package gotool

import (
	"bufio"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/hack/progress"
)

// A stand-in for go starts a compiler that would outlive it.
func TestCancelEndsWhatTheGoCommandRuns(t *testing.T) {
	bin, tmp := t.TempDir(), t.TempDir()
	script := "#!/bin/sh\necho \"$GOTMPDIR $EXTRA $*\"\nsleep 300 &\nwait\n"
	if err := os.WriteFile(filepath.Join(bin, "go"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := Command(ctx, tmp, []string{"EXTRA=x"}, "build", ".")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); err != nil || strings.TrimSpace(line) != tmp+" x build ." {
		t.Errorf("go saw %q (%v)", line, err)
	}
	cancel()
	ended := make(chan error, 1)
	go func() {
		// The pipe ends with the last process that has it.
		_, err := lines.ReadString('\n')
		ended <- errors.Join(err, cmd.Wait())
	}()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a killed build is a success")
		}
	case <-time.After(time.Minute):
		t.Fatal("the compiler lives on")
	}
}

func TestRootHasTheChart(t *testing.T) {
	root, err := Root(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "deployments", "helm", "tandem", "Chart.yaml")); err != nil {
		t.Error(err)
	}
}

func TestPackagesHaveSizes(t *testing.T) {
	dir := t.TempDir()
	for name, size := range map[string]int{"a.go": 7, "b.go": 5, "b_test.go": 3} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := Packages("unsafe\t0\t/nowhere\nexample.com/a\t3\t" + dir + "\ta.go\tb.go\n")
	if want := []progress.Package{{Name: "unsafe"}, {Name: "example.com/a", Size: 612}}; !slices.Equal(got, want) {
		t.Errorf("packages are %v, want %v", got, want)
	}
}

// With other flags these would compile all packages again; unit.sh those that it tests without the race detector.
func TestFlagsAreTheSameElsewhere(t *testing.T) {
	for _, path := range []string{"../demo.sh", "../../Makefile", "../unit.sh", "../../simulated/internal/gen/called_test.go"} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, flag := range BuildFlags() {
			if !strings.Contains(string(text), flag) {
				t.Errorf("%s has no %s", path, flag)
			}
		}
	}
}
