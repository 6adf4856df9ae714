// SPDX-License-Identifier: Apache-2.0

package progress

import (
	"bytes"
	"strings"
	"sync/atomic"
)

const kept = 8 << 10

// Tail keeps the end of what a program writes, and counts its lines. Readers may look at any time; there is one writer.
type Tail struct {
	end   atomic.Pointer[[]byte]
	lines atomic.Int64
}

// Write takes the output of a command.
func (t *Tail) Write(p []byte) (int, error) {
	var end []byte
	if before := t.end.Load(); before != nil {
		end = bytes.Clone(*before)
	}
	end = append(end, p...)
	end = end[max(0, len(end)-kept):]
	t.end.Store(&end)
	t.lines.Add(int64(bytes.Count(p, []byte("\n"))))
	return len(p), nil
}

// Lines is how many lines were written.
func (t *Tail) Lines() int64 { return t.lines.Load() }

// String is the end of the output without blanks around it.
func (t *Tail) String() string {
	if end := t.end.Load(); end != nil {
		return strings.TrimSpace(string(*end))
	}
	return ""
}

// Last is the last line.
func (t *Tail) Last() string {
	text := t.String()
	return text[strings.LastIndexByte(text, '\n')+1:]
}
