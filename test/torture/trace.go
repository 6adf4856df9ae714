// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/hack/cluster"
	"github.com/tandem-gpu/tandem/hack/install"
)

// trace is what happened when, line by line: all of it in a file, what a reader of a long run wants on the way on the
// terminal. It is safe for concurrent use.
type trace struct {
	mu   sync.Mutex
	file *os.File
	out  io.Writer
	// last is what is still awaited, as it was said last.
	last string
	// found are the first faults that were found, in words.
	found []string
}

// foundLines bounds what is repeated of the faults at the end of a run.
const foundLines = 10

const traceFile = "trace.log"

func openTrace(dir string, out io.Writer) (*trace, error) {
	file, err := os.OpenFile(filepath.Join(dir, traceFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	return &trace{file: file, out: out}, nil
}

func (t *trace) close() { t.file.Close() }

// say writes to both.
func (t *trace) say(format string, args ...any) {
	t.note(format, args...)
	t.mu.Lock()
	defer t.mu.Unlock()
	fmt.Fprintf(t.out, "%s  %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// note writes to the file only.
func (t *trace) note(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fmt.Fprintf(t.file, "%s %s\n", time.Now().Format("15:04:05.000"), fmt.Sprintf(format, args...))
}

// waiting notes what is not as it should be yet, whenever that changes.
func (t *trace) waiting(what string, problems any) {
	text := fmt.Sprintf("%s: %v", what, problems)
	t.mu.Lock()
	same := text == t.last
	t.last = text
	t.mu.Unlock()
	if !same {
		t.note("%s", text)
	}
}

// find keeps faults for the end of the run.
func (t *trace) find(lines []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.found = append(t.found, lines[:min(len(lines), foundLines-len(t.found))]...)
}

// findings are the first faults of this run, in words.
func (t *trace) findings() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.found, "\n  ")
}

// stateTimeout bounds what is collected while the cluster may be half down.
const stateTimeout = 30 * time.Second

// keepLogs writes down what a reader asks first: what was found, what lies in the ledger, objects, events and logs.
func (r *run) keepLogs(ctx context.Context, what string, lines []string) {
	r.trace.find(lines)
	dir := filepath.Join(r.Dir, "evidence", fmt.Sprintf("%s-%s", time.Now().Format("150405.000"), what))
	if err := r.collect(ctx, dir, lines); err != nil {
		r.trace.say("evidence in %s is incomplete: %v", dir, err)
		return
	}
	r.trace.say("evidence is in %s", dir)
}

func (r *run) collect(ctx context.Context, dir string, lines []string) error {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	holds, err := r.auditor.list(holdsDir)
	if err != nil {
		return err
	}
	text := fmt.Sprintf("%s\n\nledger:\n%s\n\nsights:\n%v\n", strings.Join(lines, "\n"), strings.Join(holds, "\n"), r.watch.sights())
	if r.hardware != nil {
		records, err := r.auditor.list(recordsDir)
		if err != nil {
			return err
		}
		text += fmt.Sprintf("\nrecords of partitions:\n%s\n\nGPUs:\n%s\n", strings.Join(records, "\n"), r.hardware)
	}
	if err := os.WriteFile(filepath.Join(dir, "what.txt"), []byte(text), 0o644); err != nil {
		return err
	}
	for _, each := range []struct {
		file string
		args []string
	}{
		{"tandem.log", []string{"logs", "-n", install.Namespace, "-l", "app.kubernetes.io/instance=" + install.Release, "--all-containers", "--tail=2000", "--prefix"}},
		{"tandem-previous.log", []string{"logs", "-n", install.Namespace, "-l", "app.kubernetes.io/instance=" + install.Release, "--previous", "--tail=2000", "--prefix"}},
		{"objects.yaml", []string{"get", "pods,resourceclaims,resourceslices,nodes", "-A", "-o", "yaml"}},
		{"gpunodes.yaml", []string{"get", "gpunodes", "-o", "yaml"}},
		{"events.txt", []string{"get", "events", "-A", "--sort-by=.lastTimestamp"}},
	} {
		out, err := r.cluster.Kubectl(ctx, each.args...)
		if err != nil {
			out += "\n" + err.Error()
		}
		if err := os.WriteFile(filepath.Join(dir, each.file), []byte(out), 0o644); err != nil {
			return err
		}
	}
	return copyTail(r.auditor.node.Component(cluster.Kubelet).LogPath(), filepath.Join(dir, "kubelet.log"))
}

// logTail is how much of kubelet's log is kept with each fault; the whole is collected at the end.
const logTail = 4 << 20

func copyTail(from, to string) error {
	source, err := os.Open(from)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	data, err := io.ReadAll(io.NewSectionReader(source, max(0, info.Size()-logTail), logTail))
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o644)
}
