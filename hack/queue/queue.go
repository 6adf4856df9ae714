// SPDX-License-Identifier: Apache-2.0

// Package queue hands names out to several processes, each name once: a process that is slower takes fewer of them. It does not know
// what they name.
package queue

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/hack/filelock"
)

// Queue is a file with the names that are left, one a line. Its methods may be called by several processes at the same time. A lock
// file stays beside it.
type Queue struct{ path string }

// Write makes the file. The program that starts the processes calls it before them.
func Write(path string, names []string) (Queue, error) {
	q := Queue{path}
	return q, q.write(names)
}

// At is the queue in a file that Write has made.
func At(path string) Queue { return Queue{path} }

// Take removes the first name that the first preference likes, if there is none the first that the next one likes, and so on; otherwise
// the first. ok is false where none is left.
func (q Queue) Take(ctx context.Context, likes ...func(name string) bool) (name string, ok bool, err error) {
	err = q.change(ctx, func(names []string) []string {
		if len(names) == 0 {
			return nil
		}
		at := 0
		for _, like := range likes {
			if i := slices.IndexFunc(names, like); i >= 0 {
				at = i
				break
			}
		}
		name, ok = names[at], true
		return slices.Delete(names, at, at+1)
	})
	return name, ok && err == nil, err
}

// Left is the number of names that are left.
func (q Queue) Left(ctx context.Context) (count int, err error) {
	err = q.change(ctx, func(names []string) []string {
		count = len(names)
		return names
	})
	return count, err
}

func (q Queue) change(ctx context.Context, with func([]string) []string) error {
	unlock, err := filelock.Wait(ctx, q.path+".lock")
	if err != nil {
		return err
	}
	defer unlock()
	text, err := os.ReadFile(q.path)
	if err != nil {
		return fmt.Errorf("read queue: %w", err)
	}
	return q.write(with(strings.Fields(string(text))))
}

func (q Queue) write(names []string) error {
	if err := os.WriteFile(q.path, []byte(strings.Join(names, "\n")), 0o644); err != nil {
		return fmt.Errorf("write queue: %w", err)
	}
	return nil
}
