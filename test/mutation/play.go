// SPDX-License-Identifier: Apache-2.0

package mutation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/tandem-gpu/tandem/hack/gotool"
)

// Found is the first test that failed.
type Found struct {
	Test string
	// Package is relative to the root: "./pkg/ledger".
	Package string
}

// ErrNotFound means that no test failed.
var ErrNotFound = errors.New("not found: no test failed")

// limit bounds the tests of a mutation. A test that does not end has not found it.
const limit = "-timeout=10m"

// Play runs the test By with the mutation, or without By all tests of the package until one fails. dir is an empty directory for what that
// needs. It changes nothing below root. Errors: ErrNotFound; a mutation that does not apply or compile; tests that do not end.
func (m Mutation) Play(ctx context.Context, root, dir string) (Found, error) {
	overlay, err := Overlay(root, dir, m.Changes)
	if err != nil {
		return Found{}, err
	}
	args := []string{"test", "-json", "-overlay=" + overlay, "-vet=off", "-count=1", "-failfast", limit, m.Package}
	if m.By != "" {
		args = append(args, "-run=^"+m.By+"$")
	}
	cmd := gotool.Command(ctx, dir, nil, args...)
	var events, complaints bytes.Buffer
	cmd.Dir, cmd.Stdout, cmd.Stderr = root, &events, &complaints
	failed := cmd.Run()
	if ctx.Err() != nil {
		return Found{}, context.Cause(ctx)
	}
	found, err := read(&events)
	if failed != nil && errors.Is(err, ErrNotFound) {
		err = fmt.Errorf("go test: %w: %s", failed, complaints.String())
	}
	return found, err
}

// read returns the first failed test in the output of go test -json (go doc test2json).
func read(events io.Reader) (Found, error) {
	var found Found
	var build strings.Builder
	var broken []string
	timedOut := map[string]bool{}
	for decoder := json.NewDecoder(events); ; {
		var event struct{ Action, Package, ImportPath, Test, Output string }
		err := decoder.Decode(&event)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return Found{}, fmt.Errorf("read the output of go test: %w", err)
		}
		switch {
		case event.Action == "build-output":
			build.WriteString(event.Output)
		case event.Action == "build-fail":
			broken = append(broken, event.ImportPath)
		case strings.HasPrefix(event.Output, "panic: test timed out"):
			timedOut[event.Package] = true // the test that runs then is called failed
		case event.Action == "fail" && event.Test != "" && !timedOut[event.Package] && found.Test == "":
			found = Found{event.Test, strings.Replace(event.Package, module, ".", 1)}
		}
	}
	switch {
	case len(broken) > 0:
		return Found{}, fmt.Errorf("it does not compile (%s):\n%s", strings.Join(broken, ", "), build.String())
	case found.Test != "":
		return found, nil
	case len(timedOut) > 0:
		return Found{}, errors.New("not found: a test did not end")
	default:
		return Found{}, ErrNotFound
	}
}

const module = "github.com/tandem-gpu/tandem"
