// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// recording keeps what is written to it, line by line and with times.
type recording struct {
	// hide replaces directories of this machine.
	hide  *strings.Replacer
	start time.Time

	mu    sync.Mutex
	lines []recordedLine
}

type recordedLine struct {
	at   time.Duration
	text string
}

func newRecording(checkout, cache string) *recording {
	return &recording{hide: strings.NewReplacer(checkout+"/", "", cache, "~/.cache/tandem"), start: time.Now()}
}

// Write takes whole lines.
func (r *recording) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for line := range strings.Lines(string(p)) {
		r.lines = append(r.lines, recordedLine{time.Since(r.start), r.hide.Replace(strings.TrimRight(line, " \n"))})
	}
	return len(p), nil
}

const (
	// columns is the width of the terminal that is shown. Longer lines are cut.
	columns = 132
	// longestPause is how long a viewer waits where the demo took longer, as while it compiles.
	longestPause = time.Second
)

func (l recordedLine) cut() string {
	if utf8.RuneCountInString(l.text) <= columns {
		return l.text
	}
	return string([]rune(l.text)[:columns-1]) + "…"
}

// cast is the recording for asciinema, in version 2 of its format (docs.asciinema.org/manual/asciicast/v2).
func (r *recording) cast() ([]byte, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	err := encoder.Encode(map[string]any{
		"version": 2, "width": columns, "height": len(r.lines) + 1, "title": "make demo", "idle_time_limit": longestPause.Seconds(),
	})
	for _, line := range r.lines {
		if err == nil {
			err = encoder.Encode([]any{float64(line.at.Milliseconds()) / 1000, "o", line.cut() + "\r\n"})
		}
	}
	return out.Bytes(), err
}

// Sizes of the picture, in pixels. The width of a character is that of common monospace fonts at this size.
const (
	fontSize, lineHeight, margin = 12, 16, 12
	characterWidth               = 7.25
)

// svg is a picture in which each line appears at its time, without long pauses. It shows all lines where motion is not wanted, and in programs
// that know no animation.
func (r *recording) svg() ([]byte, error) {
	var out bytes.Buffer
	width, height := int(columns*characterWidth)+2*margin, len(r.lines)*lineHeight+2*margin
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %[1]d %[2]d" width="%[1]d" height="%[2]d" role="img" aria-label="make demo">
<style>
text { font: %[3]dpx ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d8dee9; white-space: pre; animation: show 1ms backwards }
@keyframes show { from { opacity: 0 } }
@media (prefers-reduced-motion: reduce) { text { animation: none } }
</style>
<rect width="100%%" height="100%%" rx="8" fill="#1d2430"/>
`, width, height, fontSize)
	var before, shown time.Duration
	for i, line := range r.lines {
		shown += min(line.at-before, longestPause)
		before = line.at
		if line.text == "" {
			continue
		}
		fmt.Fprintf(&out, `<text x="%d" y="%d" xml:space="preserve" style="animation-delay:%.1fs">`, margin, margin+(i+1)*lineHeight-4, shown.Seconds())
		if err := xml.EscapeText(&out, []byte(line.cut())); err != nil {
			return nil, err
		}
		out.WriteString("</text>\n")
	}
	out.WriteString("</svg>\n")
	return out.Bytes(), nil
}

// save writes the recording to path.cast and path.svg.
func (r *recording) save(path string) error {
	for suffix, form := range map[string]func() ([]byte, error){".cast": r.cast, ".svg": r.svg} {
		data, err := form()
		if err == nil {
			err = os.WriteFile(path+suffix, data, 0o644)
		}
		if err != nil {
			return fmt.Errorf("save recording: %w", err)
		}
	}
	return nil
}
