// SPDX-License-Identifier: Apache-2.0

package terminal

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"unicode"

	"sigs.k8s.io/yaml"
)

// harmful are what a terminal acts on: each must not get through any function.
var harmful = []string{"\x1b[2J", "\x1b]0;title\a", "\u009b31m", "\u009d0;x\u009c", "\x9b", "\r", "\b", "\x7f", "\x00", "\u202e", "\u2066", "\u200f", "\u061c",
	"\u2028", "\ufeff", "\u200b", "\U000e0041", "\xff\xfe", "\xed\xa0\x80"}

func TestNothingHarmfulGetsThrough(t *testing.T) {
	for _, text := range harmful {
		var written bytes.Buffer
		if _, err := io.Copy(Writer(&written, false), iotest.OneByteReader(strings.NewReader("a "+text+" b"))); err != nil {
			t.Fatal(err)
		}
		encoded, err := json.Marshal("a " + text + " b")
		if err != nil {
			t.Fatal(err)
		}
		for name, got := range map[string]string{
			"Plain": Plain("a "+text+" b", false), "ASCII": Plain("a "+text+" b", true), "Lines": Lines("a "+text+" b", false),
			"Writer": written.String(), "JSON": JSON(string(encoded)),
		} {
			if at := strings.IndexFunc(got, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }); at >= 0 {
				t.Errorf("%s(%q): %q", name, text, got)
			}
			if !strings.Contains(got, "a ") || !strings.Contains(got, " b") {
				t.Errorf("%s(%q) lost text: %q", name, text, got)
			}
		}
	}
}

func TestTextStays(t *testing.T) {
	const text = "µ 世界 🙂 é"
	if got := Plain(text, false); got != text {
		t.Errorf("Plain: %q", got)
	}
	if got := Plain("µ\nb", true); got != "??b" {
		t.Errorf("ASCII: %q", got)
	}
	if got := Lines(text+"\n\tb", false); got != text+"\n\tb" {
		t.Errorf("Lines: %q", got)
	}
	for _, reader := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text)), iotest.HalfReader(strings.NewReader(text))} {
		var written bytes.Buffer
		if _, err := io.Copy(Writer(&written, false), reader); err != nil || written.String() != text {
			t.Errorf("Writer: %q, %v", written.String(), err)
		}
	}
}

// JSON means the same after JSON and JSONForYAML.
func TestJSONKeepsItsMeaning(t *testing.T) {
	want := map[string]string{"a": "\u202e\u009b\U000e0041 世界\n\x7f", "b\u200f": "c"}
	text, err := json.MarshalIndent(want, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]string
	if err := json.Unmarshal([]byte(JSON(string(text))), &got); err != nil || len(got) != 2 || got["a"] != want["a"] || got["b\u200f"] != "c" {
		t.Errorf("%q, %v", got, err)
	}
	got = nil
	if err := yaml.Unmarshal([]byte(JSONForYAML(string(text))), &got); err != nil || len(got) != 2 || got["a"] != want["a"] || got["b\u200f"] != "c" {
		t.Errorf("YAML: %q, %v", got, err)
	}
}
