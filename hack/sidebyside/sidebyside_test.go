// SPDX-License-Identifier: Apache-2.0

package sidebyside

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestLinesStayWhole(t *testing.T) {
	var out strings.Builder
	var seen []string
	p := &printer{out: &out, see: func(label, line string) { seen = append(seen, label+line) }}
	a, b := &lines{printer: p, label: "a"}, &lines{printer: p, label: "b"}
	for _, part := range []struct {
		to   *lines
		text string
	}{{a, "one\ntw"}, {b, "three\n"}, {a, "o\n\nfo"}, {b, "five\nsix\n"}, {a, "ur"}} {
		if n, err := part.to.Write([]byte(part.text)); err != nil || n != len(part.text) {
			t.Errorf("wrote %d of %d: %v", n, len(part.text), err)
		}
	}
	a.flush()
	b.flush()
	if want := "a | one\nb | three\na | two\na | \nb | five\nb | six\na | four\n"; out.String() != want {
		t.Errorf("printed\n%swant\n%s", out.String(), want)
	}
	if want := []string{"aone", "bthree", "atwo", "a", "bfive", "bsix", "afour"}; !slices.Equal(seen, want) {
		t.Errorf("seen %q, want %q", seen, want)
	}
}

// One that fails does not end the other, which begins to work when that is gone.
func TestAFailureLeavesTheOthersAlone(t *testing.T) {
	dir := t.TempDir()
	var out strings.Builder
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for {
			text, err := os.ReadFile(dir + "/pid")
			if pid, parseErr := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && parseErr == nil && syscall.Kill(pid, 0) != nil {
				break
			}
			runtime.Gosched()
		}
		// What would be done about the failure is done by now.
		time.Sleep(50 * time.Millisecond)
		if err := os.WriteFile(dir+"/go", nil, 0o600); err != nil {
			t.Error(err)
		}
	}()
	err := Run(t.Context(), &out, nil,
		Program{Label: "bad", Path: "sh", Args: []string{"-c", `echo $$ > "$0/pid"; echo no >&2; exit 3`, dir}},
		Program{Label: "good", Path: "sh", Args: []string{"-c", `until [ -e "$0/go" ]; do :; done; pwd; echo "$WORD"`, dir}, Dir: "/", Env: []string{"WORD=yes"}},
		Program{Label: "worse", Path: "sh", Args: []string{"-c", `kill -KILL $$`}},
	)
	<-gone
	if err == nil || err.Error() != "bad: exit status 3\nworse: signal: killed" {
		t.Errorf("got %v", err)
	}
	for _, want := range []string{"bad   | no\n", "good  | /\n", "good  | yes\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("printed\n%swithout %q", out.String(), want)
		}
	}
	end := "\nbad: exit status 3. Its last lines were:\nno\n\nworse: signal: killed. Its last lines were:\n"
	if !strings.HasSuffix(out.String(), end) {
		t.Errorf("printed\n%swithout at its end%s", out.String(), end)
	}
}

func TestOnlyTheLastLinesAreKept(t *testing.T) {
	l := &lines{printer: &printer{out: io.Discard}}
	for i := range 3 * keptLines {
		if _, err := fmt.Fprintf(l, "%d\n", i); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.last) != keptLines || l.last[0] != fmt.Sprintf("%d\n", 2*keptLines) {
		t.Errorf("kept %q", l.last)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out strings.Builder
	began := func(_, line string) {
		if line == "began" {
			cancel()
		}
	}
	err := Run(ctx, &out, began, Program{
		Label: "a", Path: "sh", Args: []string{"-c", `trap 'echo cleaned; exit 0' TERM; echo began; while :; do read -r _ < /dev/null || :; done`},
	})
	if err == nil || !strings.HasPrefix(out.String(), "a | began\na | cleaned\n") {
		t.Errorf("ended with %v, printed %q", err, out.String())
	}
}
