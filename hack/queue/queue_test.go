// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// Each name is handed out once, in order, however many take.
func TestEachNameOnce(t *testing.T) {
	const count, takers = 80, 4
	path := filepath.Join(t.TempDir(), "queue")
	var names []string
	for i := range count {
		names = append(names, fmt.Sprintf("Test%02d", i))
	}
	q, err := Write(path, names)
	if err != nil {
		t.Fatal(err)
	}
	if left, err := q.Left(t.Context()); left != count || err != nil {
		t.Errorf("%d names are left (%v), want %d", left, err, count)
	}
	taken := make([][]string, takers)
	var all sync.WaitGroup
	for i := range takers {
		all.Go(func() {
			for range count / takers {
				name, ok, err := At(path).Take(t.Context())
				if err != nil || !ok {
					t.Errorf("take: %q, %v, %v", name, ok, err)
					return
				}
				taken[i] = append(taken[i], name)
			}
		})
	}
	all.Wait()
	var got []string
	for _, names := range taken {
		if !slices.IsSorted(names) {
			t.Errorf("taken out of order: %v", names)
		}
		got = append(got, names...)
	}
	slices.Sort(got)
	if !slices.Equal(got, names) {
		t.Errorf("taken: %v, want %v", got, names)
	}
	if name, ok, err := q.Take(t.Context()); ok || err != nil {
		t.Errorf("take from an empty queue: %q, %v, %v", name, ok, err)
	}
	if left, err := q.Left(t.Context()); left != 0 || err != nil {
		t.Errorf("%d names are left of an empty queue (%v)", left, err)
	}
}

// The first name that is liked comes first, by the order of preferences; without one, the first.
func TestPreferences(t *testing.T) {
	q, err := Write(filepath.Join(t.TempDir(), "queue"), []string{"a1", "b1", "c1", "b2", "c2"})
	if err != nil {
		t.Fatal(err)
	}
	of := func(letter string) func(string) bool {
		return func(name string) bool { return strings.HasPrefix(name, letter) }
	}
	var got []string
	for range 5 {
		name, ok, err := q.Take(t.Context(), of("c"), of("b"))
		if err != nil || !ok {
			t.Fatalf("take: %q, %v, %v", name, ok, err)
		}
		got = append(got, name)
	}
	if want := []string{"c1", "c2", "b1", "b2", "a1"}; !slices.Equal(got, want) {
		t.Errorf("taken: %v, want %v", got, want)
	}
}

// A queue whose file is gone hands nothing out and says so.
func TestNoQueue(t *testing.T) {
	path := filepath.Join(t.TempDir(), "queue")
	if name, ok, err := At(path).Take(t.Context()); ok || err == nil {
		t.Errorf("without a file: %q, %v, %v", name, ok, err)
	}
}
