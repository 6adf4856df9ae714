// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Check makes the release twice, each from a checkout of its own of the same commit, and reports the files that differ. o.Out gets the first
// one. Both share this machine's caches of Go and of programs of other modules.
func Check(ctx context.Context, o Options) (Description, error) {
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	work, err := os.MkdirTemp("", "tandem-release-")
	if err != nil {
		return Description{}, fmt.Errorf("make directory for checkouts: %w", err)
	}
	defer os.RemoveAll(work)
	if _, err := inspect(ctx, o); err != nil {
		return Description{}, err
	}
	// The paths have different lengths, so that one in a file shifts what follows.
	first, second := filepath.Join(work, "a"), filepath.Join(work, "another", "checkout")
	for _, dir := range []string{first, second} {
		if _, err := git(ctx, o.Root, "clone", "--quiet", "--no-hardlinks", o.Root, dir); err != nil {
			return Description{}, fmt.Errorf("make a checkout: %w", err)
		}
	}
	one, two := o, o
	one.Root, two.Root, two.Out = first, second, filepath.Join(work, "second")
	d, err := Build(ctx, one)
	if err != nil {
		return Description{}, err
	}
	if _, err := Build(ctx, two); err != nil {
		return Description{}, err
	}
	differences, err := compare(one.Out, two.Out)
	if err != nil {
		return Description{}, err
	}
	if len(differences) > 0 {
		return Description{}, fmt.Errorf("compare two builds of %s: %s", o.Version, strings.Join(differences, ", "))
	}
	fmt.Fprintf(o.Progress, "two builds of %s have the same bytes\n", o.Version)
	return d, nil
}

// compare lists the files that are in one directory only, or differ.
func compare(one, two string) ([]string, error) {
	sums := map[string][2]string{}
	for i, dir := range []string{one, two} {
		files, err := regularFiles(dir)
		if err != nil {
			return nil, err
		}
		if len(files) == 0 {
			return nil, errors.New("compare releases: " + dir + " is empty")
		}
		for _, file := range files {
			sum, err := sumOf(filepath.Join(dir, file))
			if err != nil {
				return nil, fmt.Errorf("sum %s: %w", file, err)
			}
			both := sums[file]
			both[i] = sum
			sums[file] = both
		}
	}
	var differences []string
	for _, file := range sortedKeys(sums) {
		switch both := sums[file]; {
		case both[0] == "":
			differences = append(differences, file+" is in the second only")
		case both[1] == "":
			differences = append(differences, file+" is in the first only")
		case both[0] != both[1]:
			differences = append(differences, file+" differs")
		}
	}
	return differences, nil
}
