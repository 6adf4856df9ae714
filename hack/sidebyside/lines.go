// SPDX-License-Identifier: Apache-2.0

package sidebyside

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
)

// printer writes whole lines of several programs. It is safe for concurrent use.
type printer struct {
	mu  sync.Mutex
	out io.Writer
	see func(label, line string)
	// width of the labels.
	width int
}

func (p *printer) print(label, lines string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for line := range strings.Lines(lines) {
		if p.see != nil {
			p.see(label, strings.TrimSuffix(line, "\n"))
		}
		if _, err := fmt.Fprintf(p.out, "%-*s | %s", p.width, label, line); err != nil {
			return err
		}
	}
	return nil
}

// keptLines is how many of a program's last lines are repeated if it fails.
const keptLines = 20

// lines is what one program writes to. It holds back a line that has not ended. One writer uses it at a time.
type lines struct {
	*printer
	label string
	rest  []byte
	// last are the last keptLines.
	last []string
}

func (l *lines) Write(data []byte) (int, error) {
	l.rest = append(l.rest, data...)
	end := bytes.LastIndexByte(l.rest, '\n') + 1
	whole := string(l.rest[:end])
	l.rest = l.rest[end:]
	l.last = append(l.last, slices.Collect(strings.Lines(whole))...)
	l.last = slices.Clone(l.last[max(0, len(l.last)-keptLines):])
	return len(data), l.print(l.label, whole)
}

// flush writes the last line of a program that has ended in the middle of it.
func (l *lines) flush() {
	if len(l.rest) > 0 {
		_, _ = l.Write([]byte("\n"))
	}
}
