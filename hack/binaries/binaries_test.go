// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"context"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/hack/progress"
)

func TestValidKubernetes(t *testing.T) {
	for _, version := range KnownKubernetes {
		if err := ValidKubernetes(version); err != nil {
			t.Error(err)
		}
	}
	for _, version := range []string{"", "1.37.1", "v1.37", "v1.33.9", "v1.9.1", "v2.40.0", "v1.37.1-rc.1", "latest"} {
		if err := ValidKubernetes(version); err == nil {
			t.Errorf("version %q is taken", version)
		}
	}
	if KnownKubernetes[len(KnownKubernetes)-1] != DefaultKubernetes {
		t.Errorf("default %s is not the newest known version", DefaultKubernetes)
	}
}

// TestCompatibilityPage: the page for users names the versions that the tests run.
func TestCompatibilityPage(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "user", "compatibility.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range append(slices.Clone(KnownKubernetes), ContainerdVersion, RuncVersion, Helm().Version) {
		if !strings.Contains(string(page), version) {
			t.Errorf("the page does not have %s", version)
		}
	}
	if want := "`make test`: " + DefaultKubernetes; !strings.Contains(string(page), want) {
		t.Errorf("the page does not say %q", want)
	}
}

func TestStagingVersions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "go.mod")
	gomod := "module k8s.io/kubernetes\n\nrequire (\n\tk8s.io/api v0.0.0\n\tk8s.io/utils v0.0.0-20260108192941-914a6e750570\n" +
		"\tk8s.io/klog/v2 v2.140.0\n\texample.com/x v0.0.0\n\tk8s.io/kubelet v0.0.0 // indirect\n)\n\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n)\n"
	if err := os.WriteFile(path, []byte(gomod), 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := stagingVersions(path, "v1.36.3")
	if want := map[string]string{"k8s.io/api": "v0.36.3", "k8s.io/kubelet": "v0.36.3"}; err != nil || !maps.Equal(got, want) {
		t.Errorf("staging versions %v (%v), want %v", got, err, want)
	}
}

func TestCacheDir(t *testing.T) {
	home := t.TempDir()
	for name, c := range map[string]struct{ cache, xdg, want string }{
		"set":     {"/c", "/x", "/c"},
		"xdg":     {"", "/x", "/x/tandem"},
		"default": {"", "", filepath.Join(home, ".cache", "tandem")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TANDEM_CACHE", c.cache)
			t.Setenv("XDG_CACHE_HOME", c.xdg)
			t.Setenv("HOME", home)
			if got, err := CacheDir(); err != nil || got != c.want {
				t.Errorf("got %s (%v), want %s", got, err, c.want)
			}
		})
	}
}

func TestLocate(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TANDEM_CACHE", dir)
	set, err := Locate([]string{"v1.36.3", "v1.37.1"})
	if err != nil {
		t.Fatal(err)
	}
	for _, version := range []string{"v1.36.3", "v1.37.1"} {
		if got, want := set.Kubernetes(version), filepath.Join(dir, "kubernetes", version); got != want {
			t.Errorf("kubernetes %s is in %s, want %s", version, got, want)
		}
		if !strings.HasPrefix(set.Path(version), set.Kubernetes(version)+":") {
			t.Errorf("path %s", set.Path(version))
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("locating wrote %v (%v)", entries, err)
	}
}

func testBuilder(t *testing.T) (builder, *progress.Tail) {
	var said progress.Tail
	return newBuilder(t.TempDir(), &said), &said
}

func tiny(source string) component {
	return component{name: "tiny", version: "v1", source: []byte(source), packages: []program{{".", []string{"tiny", "small"}}}}
}

const tinySource = `package main

import (
	"os"
	"path/filepath"
)

func main() { os.Stdout.WriteString(filepath.Base(os.Args[0])) }
`

func TestEnsureBuildsOnce(t *testing.T) {
	b, said := testBuilder(t)
	orphan := filepath.Join(b.cache, "tiny", ".v1.building-123")
	if err := os.MkdirAll(orphan, 0o755); err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	for range 3 {
		running.Go(func() {
			dir, err := b.ensure(t.Context(), tiny(tinySource), "")
			if err != nil {
				t.Error(err)
				return
			}
			for _, name := range []string{"tiny", "small"} {
				if out, err := exec.Command(filepath.Join(dir, name)).CombinedOutput(); err != nil || string(out) != name {
					t.Errorf("%s says %q: %v", name, out, err)
				}
			}
		})
	}
	running.Wait()
	if count := strings.Count(said.String(), "building tiny"); count != 1 {
		t.Errorf("built %d times:\n%s", count, said)
	}
	if _, err := os.Stat(orphan); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("leftover of a killed run: %v", err)
	}
}

func TestEnsureReportsWhatTheCompilerSays(t *testing.T) {
	b, _ := testBuilder(t)
	_, err := b.ensure(t.Context(), tiny("package main\n\nfunc main() { nonsense() }\n"), "")
	if err == nil || !strings.Contains(err.Error(), "undefined: nonsense") || !strings.Contains(err.Error(), "build tiny v1") {
		t.Fatalf("build of nonsense: %v", err)
	}
	// A failure leaves nothing that could pass for a result.
	entries, err := os.ReadDir(filepath.Join(b.cache, "tiny"))
	if err != nil || len(entries) != 1 || entries[0].Name() != ".v1.lock" {
		t.Errorf("left in the cache: %v (%v)", entries, err)
	}
	if _, err := b.ensure(t.Context(), tiny(tinySource), ""); err != nil {
		t.Errorf("build after a failure: %v", err)
	}
}

func TestEnsureWaitsForAnotherRun(t *testing.T) {
	b, _ := testBuilder(t)
	if err := os.MkdirAll(filepath.Join(b.cache, "tiny"), 0o755); err != nil {
		t.Fatal(err)
	}
	other, err := os.Create(filepath.Join(b.cache, "tiny", ".v1.lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := b.ensure(ctx, tiny(tinySource), ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while another run builds: %v", err)
	}
}

func TestPauseEndsWhenTold(t *testing.T) {
	b, _ := testBuilder(t)
	dir, err := b.ensure(t.Context(), pause(nil), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		// It does not say when it listens, and a signal that comes earlier ends it with another status: be ever more patient.
		var err error
		for patience := time.Millisecond; patience < 10*time.Second; patience *= 2 {
			cmd := exec.Command(filepath.Join(dir, "pause"))
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(patience)
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			if err = cmd.Wait(); err == nil {
				break
			}
		}
		if err != nil {
			t.Errorf("after %v: %v", signal, err)
		}
	}
}
