// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
)

// printer writes whole lines of several clusters and counts how their stories end. It is safe for concurrent use.
type printer struct {
	mu              sync.Mutex
	out             io.Writer
	passed, skipped int
	failed          []string
}

// labelled is what one cluster writes to.
func (p *printer) labelled(label string) *labelled { return &labelled{printer: p, label: label} }

// labelled holds back a line that has not ended. One writer uses it at a time.
type labelled struct {
	printer *printer
	label   string
	rest    []byte
}

func (l *labelled) Write(data []byte) (int, error) {
	l.rest = append(l.rest, data...)
	end := bytes.LastIndexByte(l.rest, '\n') + 1
	whole := string(l.rest[:end])
	l.rest = l.rest[end:]
	return len(data), l.printer.print(l.label, whole)
}

// flush writes the last line of one who has ended in the middle of it.
func (l *labelled) flush() {
	if len(l.rest) > 0 {
		_, _ = l.Write([]byte("\n"))
	}
}

func (p *printer) print(label, lines string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for line := range strings.Lines(lines) {
		result, rest, _ := strings.Cut(strings.TrimPrefix(line, "--- "), ": ")
		name, _, _ := strings.Cut(rest, " ")
		switch {
		case !strings.HasPrefix(line, "--- "):
		case result == "PASS":
			p.passed++
		case result == "SKIP":
			p.skipped++
		case result == "FAIL":
			p.failed = append(p.failed, name)
		}
		if _, err := fmt.Fprintf(p.out, "%s | %s", label, line); err != nil {
			return err
		}
	}
	return nil
}
