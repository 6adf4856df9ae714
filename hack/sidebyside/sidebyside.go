// SPDX-License-Identifier: Apache-2.0

// Package sidebyside runs programs at the same time that wait more than they compute, and tells their lines apart. It knows nothing
// of what they do.
package sidebyside

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Program is one to run.
type Program struct {
	// Label begins its lines.
	Label string
	Path  string
	Args  []string
	// Dir to run in; empty is that of the caller. Env is the caller's where nil.
	Dir string
	Env []string
}

// endPatience is how long a program may take to clean up when it is interrupted: one that is killed leaves a cluster behind.
const endPatience = 10 * time.Minute

// Run runs them until the last has ended; one that fails leaves the others alone, and all failures are returned. When ctx is done they
// are told by SIGTERM. Lines of output and errors go to out whole; see, if it is not nil, is called with each of them and its
// program's label, one at a time. The last lines of those that failed are repeated at the end, where a reader of a long log looks first.
// The programs of hack/cmd call it.
func Run(ctx context.Context, out io.Writer, see func(label, line string), programs ...Program) error {
	p := &printer{out: out, see: see}
	for _, program := range programs {
		p.width = max(p.width, len(program.Label))
	}
	errs := make([]error, len(programs))
	outputs := make([]*lines, len(programs))
	var all sync.WaitGroup
	for i, program := range programs {
		outputs[i] = &lines{printer: p, label: program.Label}
		all.Go(func() { errs[i] = program.run(ctx, outputs[i]) })
	}
	all.Wait()
	for i, err := range errs {
		if err != nil {
			fmt.Fprintf(out, "\n%v. Its last lines were:\n%s", err, strings.Join(outputs[i].last, ""))
		}
	}
	return errors.Join(errs...)
}

func (r Program) run(ctx context.Context, to *lines) error {
	defer to.flush()
	cmd := exec.CommandContext(ctx, r.Path, r.Args...)
	cmd.Stdout, cmd.Stderr = to, to
	cmd.Dir, cmd.Env = r.Dir, r.Env
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = endPatience
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", r.Label, err)
	}
	return nil
}
