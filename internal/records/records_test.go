// SPDX-License-Identifier: Apache-2.0

package records

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

type fact struct {
	Text string `json:"text,omitempty"`
}

func options(dir, boot string) Options[string, fact] {
	return Options[string, fact]{
		What: "fact", Dir: dir, BootID: boot, Name: func(k string) string { return "f-" + k },
		Parse: func(name string) (string, error) {
			if key, ok := strings.CutPrefix(strings.ToLower(name), "f-"); ok {
				return key, nil
			}
			return "", errors.New("no fact")
		},
		Check: func(key string, f fact) error {
			if f.Text == "bad" {
				return errors.New("bad text")
			}
			return nil
		},
		Unreadable: func(string) fact { return fact{"unknown"} },
	}
}

func open(t *testing.T, o Options[string, fact]) (*Store[string, fact], []error) {
	t.Helper()
	s := New(o)
	problems, err := s.Load()
	check(t, err)
	t.Cleanup(func() { check(t, s.Close()) })
	return s, problems
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func all(s *Store[string, fact]) map[string]string {
	found := map[string]string{}
	for _, key := range s.Keys() {
		f, _ := s.Get(key)
		found[key] = f.Text
	}
	return found
}

func TestStore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "below", "facts")
	s, _ := open(t, options(dir, "one"))
	check(t, s.Put("a", fact{"a longer text than the next"}))
	check(t, s.Put("a", fact{"second"}))
	check(t, s.Put("b", fact{}))
	check(t, s.Put("bad", fact{"bad"}))
	check(t, s.Put("c", fact{}))
	for range 2 {
		check(t, s.Drop("c"))
	}
	whole, err := os.ReadFile(filepath.Join(dir, "f-a"))
	check(t, err)
	old, _ := open(t, options(t.TempDir(), "zero"))
	check(t, old.Put("old", fact{"of another boot"}))
	earlier, err := os.ReadFile(filepath.Join(old.options.Dir, "f-old"))
	check(t, err)
	for name, text := range map[string]string{
		"f-torn": string(whole[:30]), "f-copy": string(whole), "f-empty": "", "f-old": string(earlier), "F-b": string(whole), "other": "",
	} {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	again, problems := open(t, options(dir, "one"))
	want := map[string]string{"a": "second", "b": "", "bad": "unknown", "torn": "unknown", "copy": "unknown", "empty": "unknown"}
	if !maps.Equal(all(again), want) {
		t.Errorf("found %v, want %v", all(again), want)
	}
	if len(problems) != 6 {
		t.Errorf("problems %v", problems)
	}
	if _, err := os.Stat(filepath.Join(dir, "f-old")); !os.IsNotExist(err) {
		t.Errorf("the record of an earlier boot is still there: %v", err)
	}

	// What another process removed is known, unless it is everything.
	check(t, os.Remove(again.Path("a")))
	if removed := again.Removed(); !slices.Equal(removed, []string{"a"}) {
		t.Errorf("removed are %v, want a", removed)
	}
	check(t, again.Repair())
	check(t, os.RemoveAll(dir))
	if removed := again.Removed(); removed != nil {
		t.Errorf("removed are %v, want none: the directory is gone", removed)
	}
	check(t, again.Repair())

	// Repair writes what another process removed, and leaves the rest alone.
	check(t, os.RemoveAll(dir))
	check(t, again.Repair())
	repaired, problems := open(t, options(dir, "one"))
	if !maps.Equal(all(repaired), all(again)) || len(problems) != 4 {
		t.Errorf("repaired are %v, %v", all(repaired), problems)
	}
	check(t, again.Put("torn", fact{"mended"}))
	if mended, _ := open(t, options(dir, "one")); all(mended)["torn"] != "mended" {
		t.Errorf("mended are %v", all(mended))
	}

	// A path that cannot be a directory: what was recorded is still known.
	check(t, os.RemoveAll(dir))
	check(t, os.WriteFile(dir, nil, 0o600))
	if err := again.Put("a", fact{"third"}); err == nil || !strings.Contains(err.Error(), "write record of fact f-a") {
		t.Errorf("written into nothing: %v", err)
	}
	if f, ok := again.Get("a"); !ok || f.Text != "second" || again.Repair() == nil {
		t.Errorf("known is %v", f)
	}
}

func TestExclusive(t *testing.T) {
	o := options(filepath.Join(t.TempDir(), "facts"), "one")
	o.Exclusive = true
	first, _ := open(t, o)
	if _, err := New(o).Load(); !errors.Is(err, ErrLocked) {
		t.Errorf("second store: %v", err)
	}
	check(t, first.Close())
	if err := first.Put("a", fact{}); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	open(t, o)
}

// TestFullDisk: on a disk without a free block, Put keeps what was recorded, and PutName keeps at least the name of a new record.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("a full disk needs the right to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { check(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	s, _ := open(t, options(filepath.Join(dir, "facts"), "one"))
	long := fact{strings.Repeat("x", 5000)}
	check(t, s.Put("a", fact{"first"}))
	var err error
	for n := 0; err == nil; n++ {
		err = os.WriteFile(filepath.Join(dir, fmt.Sprint("filler-", n)), make([]byte, page), 0o600)
	}
	check(t, s.Put("a", fact{"second"}))
	for _, err := range []error{s.Put("a", long), s.PutName("a", long), s.Put("b", fact{})} {
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("without room: %v", err)
		}
	}
	check(t, s.PutName("c", fact{"third"}))
	check(t, s.PutName("c", fact{"fourth"}))
	if err := s.Repair(); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("repair without room: %v", err)
	}
	now, _ := open(t, options(s.options.Dir, "one"))
	if want := map[string]string{"a": "second", "c": "unknown"}; !maps.Equal(all(now), want) {
		t.Errorf("on disk are %v, want %v", all(now), want)
	}
	if files, err := os.ReadDir(s.options.Dir); err != nil || len(files) != 2 {
		t.Errorf("files %v, %v", files, err)
	}
	check(t, os.Remove(filepath.Join(dir, "filler-0")))
	check(t, s.Repair())
	now, _ = open(t, options(s.options.Dir, "one"))
	if want := map[string]string{"a": "second", "c": "fourth"}; !maps.Equal(all(now), want) {
		t.Errorf("on disk are %v, want %v", all(now), want)
	}
	if !slices.Contains(s.Keys(), "c") {
		t.Error("c is forgotten")
	}
}

// A process without a free file descriptor removes no record.
func TestNoFileDescriptor(t *testing.T) {
	s, _ := open(t, options(filepath.Join(t.TempDir(), "facts"), "one"))
	check(t, s.Put("a", fact{"first"}))
	var before unix.Rlimit
	check(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	next, err := unix.Open("/dev/null", unix.O_RDONLY, 0)
	check(t, err)
	check(t, unix.Close(next))
	check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next), Max: before.Max}))
	putErr, removed := s.Put("a", fact{"second"}), s.Removed()
	check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
	if !errors.Is(putErr, unix.EMFILE) {
		t.Errorf("Put returned %v", putErr)
	}
	if len(removed) > 0 {
		t.Errorf("removed are %v", removed)
	}
	if again, _ := open(t, options(s.options.Dir, "one")); all(again)["a"] != "first" {
		t.Errorf("on disk are %v", all(again))
	}
}

// A record that cannot be looked at is not one that another process has removed.
func TestRecordThatCannotBeLookedAt(t *testing.T) {
	s, _ := open(t, options(filepath.Join(t.TempDir(), "facts"), "one"))
	s.entries[strings.Repeat("a", 300)] = entry[fact]{} // ENAMETOOLONG
	if removed := s.Removed(); len(removed) > 0 {
		t.Errorf("removed are %v", removed)
	}
}
