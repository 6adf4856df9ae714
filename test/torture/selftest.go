// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/tandem-gpu/tandem/hack/gotool"
	"github.com/tandem-gpu/tandem/hack/image"
	"github.com/tandem-gpu/tandem/test/mutation"
)

// ErrBlind means that the oracle did not see a fault that was there.
var ErrBlind = errors.New("the oracle found nothing")

// SelftestOps is how many operations a mutation may go unseen.
const SelftestOps = 300

// Selftest builds Tandem with each mutation and plays against it until the oracle finds a fault. The error wraps ErrBlind for each that it did
// not find.
func Selftest(ctx context.Context, dir string, state State, mutations []Mutation, out io.Writer) error {
	var blind []error
	for _, s := range mutations {
		started := time.Now()
		fmt.Fprintf(out, "selftest: %s: %s\n", s.Name, s.What)
		counters, err := s.play(ctx, filepath.Join(dir, s.Name), state, out)
		if err != nil {
			err = fmt.Errorf("selftest %s: %w", s.Name, err)
			if !errors.Is(err, ErrBlind) || ctx.Err() != nil {
				return errors.Join(append(blind, err)...)
			}
			fmt.Fprintln(out, err)
			blind = append(blind, err)
			continue
		}
		fmt.Fprintf(out, "selftest: %s: found after %d operations and %s: %s\n", s.Name, counters.Ops, time.Since(started).Round(time.Second),
			counters.Found())
	}
	return errors.Join(blind...)
}

// play removes its cluster at the end.
func (s Mutation) play(ctx context.Context, dir string, state State, out io.Writer) (counters Counters, err error) {
	unlock, err := Lock(dir)
	if err != nil {
		return Counters{}, err
	}
	defer unlock()
	tarball, err := s.build(ctx, dir, out)
	if err != nil {
		return Counters{}, err
	}
	state.MIG, state.Sharing = s.Mix.MIG, s.Mix.Sharing
	c, err := Fresh(ctx, dir, state, tarball, out)
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Minute)
		defer cancel()
		err = errors.Join(err, Remove(clean, dir))
	}()
	if err != nil {
		return Counters{}, err
	}
	state.Ops, state.RoundSize = SelftestOps, SelftestOps/3
	counters, err = Run(ctx, c, Options{Dir: dir, State: state, Mix: s.Mix, UntilFault: true, Out: out})
	switch {
	case errors.Is(err, ErrFaults):
		return counters, nil
	case err == nil || errors.Is(err, ErrNothingTested):
		return counters, fmt.Errorf("%w in %d operations", ErrBlind, counters.Ops)
	}
	return counters, err
}

// build compiles the mutated image into dir and answers its tarball.
func (s Mutation) build(ctx context.Context, dir string, out io.Writer) (string, error) {
	root, err := gotool.Root(ctx)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make directory: %w", err)
	}
	overlay, err := mutation.Overlay(root, dir, s.changes)
	if err != nil {
		return "", err
	}
	tarball, _, err := image.Build(ctx, image.Options{
		Root: root, Out: filepath.Join(dir, "image"), Version: "mutated-" + s.Name, Overlay: overlay, Progress: out,
	})
	return tarball, err
}
