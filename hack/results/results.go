// SPDX-License-Identifier: Apache-2.0

// Package results reads the events that tests report (`go test -json`, `go tool test2json`). It tells which tests have ended, which have
// not, and which skips are no surprise. It runs no test.
package results

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Variable names the file for events of one part of make test. hack/unit.sh and hack/cmd/stories write it.
const Variable = "TEST_RESULTS"

// Want is the action of an event that no test reports: hack/cmd/stories announces a story that it is to play.
const Want = "want"

// Event is one line of the format, which `go doc test2json` describes.
type Event struct {
	Action      string
	Package     string  `json:",omitempty"`
	ImportPath  string  `json:",omitempty"`
	Test        string  `json:",omitempty"`
	Output      string  `json:",omitempty"`
	Elapsed     float64 `json:",omitempty"`
	FailedBuild string  `json:",omitempty"`
}

// Top says that the event belongs to a test that is part of no other test.
func (e Event) Top() bool { return e.Test != "" && !strings.Contains(e.Test, "/") }

// Results are what events add up to. The zero value has none.
type Results struct {
	// Wanted are the stories that were to be played.
	Wanted []string
	// Failed and Skipped are tests, subtests among them; Failed are also packages.
	Failed, Skipped []Said
	// Idle are packages with tests none of which ran.
	Idle []string

	ended map[string]string
	ran   map[string]bool
	said  map[test]*log
}

type test struct{ pkg, name string }

// Said is a test with what it has logged.
type Said struct {
	Name string
	Text string
}

// Read adds the events of a file.
func Read(path string) (*Results, error) {
	r := &Results{}
	file, err := os.Open(path)
	if err != nil {
		return r, fmt.Errorf("read results: %w", err)
	}
	defer file.Close()
	if err := Decode(file, r.Add); err != nil {
		return r, fmt.Errorf("read results %s: %w", path, err)
	}
	return r, nil
}

// Decode calls see with each event until the stream ends. It leaves out lines that are none: messages of the go command, and half a line
// of a process that was killed.
func Decode(stream io.Reader, see func(Event)) error {
	for lines := bufio.NewReader(stream); ; {
		line, err := lines.ReadBytes('\n')
		var e Event
		if json.Unmarshal(line, &e) == nil {
			see(e)
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// Add takes the next event.
func (r *Results) Add(e Event) {
	if r.said == nil {
		r.ended, r.ran, r.said = map[string]string{}, map[string]bool{}, map[test]*log{}
	}
	t := test{e.Package + e.ImportPath, e.Test}
	switch e.Action {
	case Want:
		r.Wanted = append(r.Wanted, e.Test)
	case "run":
		r.ran[e.Package] = true
	case "output", "build-output":
		if r.said[t] == nil {
			r.said[t] = &log{}
		}
		r.said[t].add(e.Output)
	case "pass", "fail", "skip", "build-fail":
		r.end(e, t)
	}
}

func (r *Results) end(e Event, t test) {
	said := r.said[t]
	delete(r.said, t)
	switch {
	case e.Test == "" && e.Action == "pass" && !r.ran[e.Package]:
		r.Idle = append(r.Idle, e.Package)
	case e.Test != "" && e.Action == "skip":
		r.Skipped = append(r.Skipped, Said{e.Test, said.reason()})
	case e.Action == "fail" && e.FailedBuild == "" || e.Action == "build-fail":
		r.fail(t, said)
	}
	if e.Top() {
		r.ended[e.Test] = e.Action
	}
}

// fail keeps what a test has said. What fails because of its parts has nothing to say.
func (r *Results) fail(t test, said *log) {
	part := func(s Said) bool { return t.name == "" || strings.HasPrefix(s.Name, t.name+"/") }
	if text := said.String(); text != "" || !slices.ContainsFunc(r.Failed, part) {
		r.Failed = append(r.Failed, Said{cmp.Or(t.name, t.pkg), text})
	}
}

// Stories counts the stories that were to be played. notPlayed are those that did not end.
func (r *Results) Stories() (played, skipped int, notPlayed []string) {
	for _, name := range r.Wanted {
		switch r.ended[name] {
		case "pass", "fail":
			played++
		case "skip":
			skipped++
		default:
			notPlayed = append(notPlayed, name)
		}
	}
	return played, skipped, notPlayed
}

// FailedStories is how many of the stories that were to be played failed.
func (r *Results) FailedStories() (failed int) {
	for _, name := range r.Wanted {
		if r.ended[name] == "fail" {
			failed++
		}
	}
	return failed
}

// expected are the reasons for a skip that do not depend on what make deps installs and on the rights of root.
var expected = regexp.MustCompile(strings.Join([]string{
	`no hardware to test`, // no GPU
	`set TANDEM_TEST_CLUSTER=1`,
	`run KUEUE=1`, `run PROMETHEUS=1`, `run KARPENTER=1`,
	`make kubelet-model runs it`,
	`Kubernetes v?1\.\d`,                             // the version lacks what the test is about
	`the API server does not serve DeviceTaintRules`, // before 1.37
	`no cgroup of version 1`, `no cgroups here`,
	`/dev/kmsg`, `/dev/fuse`, `FUSE`,
}, "|"))

// Surprises are skips without a known reason, and packages of which no test ran.
func (r *Results) Surprises() []Said {
	surprises := slices.DeleteFunc(slices.Clone(r.Skipped), func(s Said) bool { return expected.MatchString(s.Text) })
	for _, pkg := range r.Idle {
		surprises = append(surprises, Said{pkg, "no test of the package ran"})
	}
	return surprises
}

// Of a test, headLines and tailLines are kept: of a crash the first lines tell, of messages the last. Of each message linesEach are kept.
const headLines, tailLines, linesEach = 20, 40, 6

// Lines that end like these are around what a failed test logs of the state of a cluster. Results leave that out: it would hide what failed,
// and a reader finds it in the test's output.
const (
	StateBegins = "the state of the cluster:"
	StateEnds   = "end of the state of the cluster"
)

type log struct {
	head, tail []string
	more       int
	state      bool
}

// place is where a test has logged a message.
var place = regexp.MustCompile(`^\s*[^ ]+\.go:[0-9]+: `)

func (l *log) add(line string) {
	line = strings.TrimRight(line, "\n")
	ends := strings.HasSuffix(line, StateEnds)
	l.state = !ends && (l.state || strings.HasSuffix(line, StateBegins))
	if l.state || ends {
		return
	}
	if frame := strings.TrimSpace(line); frame == "" || frame == "PASS" || frame == "FAIL" || strings.HasPrefix(frame, "=== ") ||
		strings.HasPrefix(frame, "--- ") || strings.HasPrefix(frame, "FAIL\t") {
		return
	}
	if !strings.HasPrefix(line, "        ") {
		l.more = linesEach
	}
	if l.more--; l.more < 0 {
		return
	}
	if len(l.head) < headLines {
		l.head = append(l.head, line)
		return
	}
	l.tail = append(l.tail, line)
	l.tail = l.tail[max(0, len(l.tail)-tailLines):]
}

func (l *log) String() string {
	if l == nil {
		return ""
	}
	return strings.Join(append(slices.Clone(l.head), l.tail...), "\n")
}

// reason is the last message.
func (l *log) reason() string {
	if l == nil {
		return ""
	}
	lines := append(slices.Clone(l.head), l.tail...)
	for i := len(lines) - 1; i >= 0; i-- {
		if at := place.FindString(lines[i]); at != "" {
			lines[i] = strings.TrimPrefix(lines[i], at)
			lines = lines[i:]
			break
		}
	}
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, " ")
}
