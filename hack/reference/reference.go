// SPDX-License-Identifier: Apache-2.0

// Package reference writes the pages of docs/reference from the sources: the chart's values and their schema, the types of the node
// configuration and of claim parameters, the definition of GPUNode, the metrics that the programs register, the devices that the driver
// publishes, and a table of events.
package reference

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"
)

//go:generate go run ../cmd/reference ../..

// pages are the names of the pages and what writes them.
var pages = map[string]func(root string) (string, error){
	"values.md": values, "configuration.md": configuration, "gpunode.md": gpuNode, "metrics.md": metrics, "events.md": eventsPage,
	"attributes.md": attributesPage,
}

// Write writes all pages of the checkout whose root directory is given.
func Write(root string) error {
	for name, page := range pages {
		text, err := page(root)
		if err != nil {
			return fmt.Errorf("write docs/reference/%s: %w", name, err)
		}
		path := filepath.Join(root, "docs", "reference", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// header begins a page: its title, where it comes from, and its first paragraphs.
func header(title, sources string, paragraphs ...string) string {
	text := fmt.Sprintf("# %s\n\n<!-- make update writes this page from %s -->\n", title, sources)
	for _, p := range paragraphs {
		text += "\n" + wrap(p) + "\n"
	}
	return text
}

// wrap breaks a paragraph into lines of at most 120 characters, the limit of the repository's pages.
func wrap(paragraph string) string {
	var text strings.Builder
	length := 0
	for _, word := range strings.Fields(paragraph) {
		switch n := utf8.RuneCountInString(word); {
		case length == 0:
			length = n
		case length+1+n > 120:
			text.WriteString("\n")
			length = n
		default:
			text.WriteString(" ")
			length += 1 + n
		}
		text.WriteString(word)
	}
	return text.String()
}

// table is a Markdown table.
type table struct{ strings.Builder }

func newTable(columns ...string) *table {
	t := &table{}
	t.row(columns...)
	fmt.Fprintf(t, "|%s\n", strings.Repeat("---|", len(columns)))
	return t
}

func (t *table) row(cells ...string) {
	t.WriteString("|")
	for _, c := range cells {
		t.WriteString(strings.TrimRight(" "+strings.ReplaceAll(c, "|", `\|`), " ") + " |")
	}
	t.WriteString("\n")
}

// code marks text as code; nothing stays nothing.
func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}

// prose makes one line of a comment, with what Markdown would read as markup escaped.
func prose(text string) string {
	return strings.NewReplacer("*", `\*`, "<", `\<`).Replace(strings.Join(strings.Fields(text), " "))
}
