// SPDX-License-Identifier: Apache-2.0

package leftovers

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// rig is a directory of runs, and a limit of 128.
func rig(t *testing.T) (tmp, limit string) {
	t.Helper()
	tmp, limit = t.TempDir(), filepath.Join(t.TempDir(), "limit")
	write(t, limit, "128\n")
	return tmp, limit
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func has(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(got)) != want {
		t.Errorf("%s has %q (%v), want %s", path, got, err, want)
	}
}

// killed is the directory of a run that was killed: a process of it lives on.
func killed(t *testing.T, tmp string) (dir string, ended <-chan error) {
	t.Helper()
	dir = filepath.Join(tmp, prefix+"1")
	if err := os.MkdirAll(filepath.Join(dir, "tandem-e2e-1", "cluster"), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, lockFile), "")
	cmd := exec.Command("sleep", "1000")
	cmd.Env = []string{"A=b", variable(dir)}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return dir, done
}

// The next run says what a killed one has left, and removes it.
func TestKilledRun(t *testing.T) {
	tmp, limit := rig(t)
	dir, ended := killed(t, tmp)
	write(t, limit, "1024\n")
	write(t, filepath.Join(tmp, recordFile), "128 1024\n")
	write(t, filepath.Join(tmp, "tandem-other"), "")
	var out strings.Builder
	r, err := begin(t.Context(), tmp, limit, &out)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err == nil {
			t.Error("the process ended by itself")
		}
	case <-time.After(time.Minute):
		t.Error("the process of the killed run lives on")
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory of the killed run: %v", err)
	}
	has(t, limit, "128")
	if !strings.HasPrefix(out.String(), "removing what was left in "+dir+": processes [") || !strings.Contains(out.String(), "tandem-e2e-1/cluster]") {
		t.Errorf("printed %q", out.String())
	}
	if err := r.End(t.Context()); err != nil {
		t.Error(err)
	}
	if left, err := filepath.Glob(filepath.Join(tmp, "*")); err != nil || len(left) != 2 { // tandem-other and the turn's lock
		t.Errorf("left: %v (%v)", left, err)
	}
}

// A run that is alive keeps its directory, and the limit that it needs.
func TestLivingRun(t *testing.T) {
	tmp, limit := rig(t)
	dir := filepath.Join(tmp, prefix+"1")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	other, err := lock(dir, os.O_CREATE)
	if err != nil {
		t.Fatal(err)
	}
	r, err := begin(t.Context(), tmp, limit, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Raise(1024); err != nil {
		t.Fatal(err)
	}
	if err := r.End(t.Context()); err != nil {
		t.Error(err)
	}
	has(t, limit, "1024")
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
	other.Close()
	if r, err = begin(t.Context(), tmp, limit, io.Discard); err != nil {
		t.Fatal(err)
	}
	has(t, limit, "128")
	if err := r.End(t.Context()); err != nil {
		t.Error(err)
	}
}

// A limit that is too low is higher until the run ends; another is left alone, and so is one that was changed meanwhile.
func TestRaise(t *testing.T) {
	for _, c := range []struct{ before, meanwhile, changed, after string }{
		{before: "128", meanwhile: "1024", after: "128"},
		{before: "8192", meanwhile: "8192", after: "8192"},
		{before: "128", meanwhile: "1024", changed: "512", after: "512"},
	} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			tmp, limit := rig(t)
			write(t, limit, c.before+"\n")
			r, err := begin(t.Context(), tmp, limit, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Raise(1024); err != nil {
				t.Fatal(err)
			}
			has(t, limit, c.meanwhile)
			if c.changed != "" {
				write(t, limit, c.changed)
			}
			if err := r.End(t.Context()); err != nil {
				t.Error(err)
			}
			has(t, limit, c.after)
		})
	}
	for _, bad := range []string{"many", ""} {
		tmp, limit := rig(t)
		write(t, limit, bad)
		r, err := begin(t.Context(), tmp, limit, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Raise(1024); err == nil {
			t.Errorf("a limit of %q was raised", bad)
		}
		has(t, limit, bad)
		if err := r.End(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
