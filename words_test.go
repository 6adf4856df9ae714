// SPDX-License-Identifier: Apache-2.0

package tandem

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// retired maps each word that must not be used to the glossary's word.
var retired = map[string]string{
	"nobody": "name the component, or: no holder", "somebody": "name the component", "whoever": "name the component",
	"stranger": "unknown pod", "strangers": "unknown pods", "obstacle": "unavailability", "obstacles": "unavailability",
	"nudge": "retry", "nudges": "retries", "nudged": "retried", "condemned": "pending eviction", "lapse": "expire", "lapsed": "expired",
	"loser": "conflict", "losers": "conflicts", "verdict": "pod state", "verdicts": "pod states",
	"faulty": "unhealthy", "untouched": "excluded", "roster": "device list", "tally": "in-flight", "caretaker": "driverless mode",
	"ripen": "debounce", "restless": "needs refresh", "unwant": "cancel", "limitsonly": "DevicePluginOnly",
	"misfortune": "fault", "misfortunes": "faults", "sabotage": "mutation", "deeds": "actions", "strikes": "faults",
}

// word is a word of a text, or a part of an identifier in camel case.
var word = regexp.MustCompile(`[A-Z]?[a-z]+`)

func TestRetiredWordsStayOut(t *testing.T) {
	// Most lines have no retired word. This search takes much less time than to find all words.
	mayHave := func(line string) bool {
		line = strings.ToLower(line)
		for w := range retired {
			if strings.Contains(line, w) {
				return true
			}
		}
		return false
	}
	for _, path := range texts(t) {
		if path == "words_test.go" {
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for number, line := range strings.Split(path+"\n"+string(data), "\n") {
			// The account nobody of /etc/passwd keeps its name.
			if strings.Contains(line, "65534") || !mayHave(line) {
				continue
			}
			words := word.FindAllString(line, -1)
			for i := range words {
				words[i] = strings.ToLower(words[i])
				if i > 0 && words[i-1] == "limits" && words[i] == "only" && strings.Contains(strings.ToLower(line), "limitsonly") {
					words[i] = "limitsonly"
				}
			}
			for _, w := range words {
				if better, found := retired[w]; found {
					t.Errorf("%s:%d: %q is retired, use the glossary's words: %s", path, number, w, better)
				}
			}
		}
	}
}

func TestMarkdownLinesAreShort(t *testing.T) {
	for _, path := range texts(t) {
		if filepath.Ext(path) != ".md" {
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(data), "\n") {
			if utf8.RuneCountInString(line) > 120 && !strings.HasPrefix(line, "|") && !strings.Contains(line, "://") {
				t.Errorf("%s:%d: more than 120 characters", path, i+1)
			}
		}
	}
}

var (
	link        = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	codeBlock   = regexp.MustCompile("(?ms)^ *```.*?^ *```|`[^`\n]*`")
	heading     = regexp.MustCompile(`(?m)^#+ +(.*?)\s*$`)
	linkText    = regexp.MustCompile(`\[([^]]*)\]\([^)]*\)`)
	notInAnchor = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// TestLinksLeadSomewhere: links between pages name files that exist, and headings of theirs, by GitHub's rule for anchors.
func TestLinksLeadSomewhere(t *testing.T) {
	read := func(path string) string {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	anchors := map[string][]string{}
	for _, page := range texts(t) {
		if filepath.Ext(page) != ".md" {
			continue
		}
		// A link may be broken into two lines.
		for _, found := range link.FindAllStringSubmatch(codeBlock.ReplaceAllString(read(page), ""), -1) {
			if strings.Contains(found[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(found[1], "#")
			target := filepath.Join(filepath.Dir(page), path)
			if path == "" {
				target = page
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", page, found[1], err)
				continue
			}
			if anchor == "" {
				continue
			}
			if anchors[target] == nil {
				for _, h := range heading.FindAllStringSubmatch(read(target), -1) {
					plain := strings.ToLower(linkText.ReplaceAllString(h[1], "$1"))
					anchors[target] = append(anchors[target], strings.ReplaceAll(notInAnchor.ReplaceAllString(plain, ""), " ", "-"))
				}
			}
			if !slices.Contains(anchors[target], anchor) {
				t.Errorf("%s links to %s, which has no such heading", page, found[1])
			}
		}
	}
}

// TestPathsExist: docs/design/0014-paths.md names files and functions that exist, in tables `| step | file | function |`.
func TestPathsExist(t *testing.T) {
	const page = "docs/design/0014-paths.md"
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for line := range strings.Lines(string(data)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || len(cells) != 3 {
			continue
		}
		file, functions := strings.Trim(cells[1], " `"), strings.Split(cells[2], ",")
		if !strings.HasSuffix(file, ".go") {
			continue
		}
		rows++
		declared, err := functionsOf(file)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, function := range functions {
			if function = strings.Trim(function, " `()"); !slices.Contains(declared, function) {
				t.Errorf("%s names %s in %s, which is not there", page, function, file)
			}
		}
	}
	if rows == 0 {
		t.Errorf("%s has no table of files and functions", page)
	}
}

// TestWhereToChange: the table of docs/design/0001-architecture.md names files that exist, and after a file in parentheses functions of it.
func TestWhereToChange(t *testing.T) {
	const page = "docs/design/0001-architecture.md"
	data, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(data), "| to change | look at |\n")
	if table, _, _ = strings.Cut(table, "\n\n"); !found {
		t.Fatalf("%s has no table of what to change", page)
	}
	named := regexp.MustCompile("`([a-z][-a-z0-9_/.]*/[-a-z0-9_.]+)`(?: \\(((?:`\\w+`(?:, )?)+)\\))?")
	for _, of := range named.FindAllStringSubmatch(table, -1) {
		if _, err := os.Stat(of[1]); err != nil {
			t.Errorf("%s: %v", page, err)
			continue
		}
		if of[2] == "" {
			continue
		}
		declared, err := functionsOf(of[1])
		if err != nil {
			t.Error(err)
			continue
		}
		for function := range strings.SplitSeq(of[2], ", ") {
			function = strings.Trim(function, "`")
			if !slices.ContainsFunc(declared, func(name string) bool { return name == function || strings.HasSuffix(name, "."+function) }) {
				t.Errorf("%s names %s in %s, which is not there", page, function, of[1])
			}
		}
	}
}

// functionsOf lists the functions (Func) and methods (Type.Method) of a file.
func functionsOf(path string) ([]string, error) {
	parsed, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, declaration := range parsed.Decls {
		f, ok := declaration.(*ast.FuncDecl)
		if !ok {
			continue
		}
		name := f.Name.Name
		if f.Recv != nil {
			receiver := f.Recv.List[0].Type
			if star, ok := receiver.(*ast.StarExpr); ok {
				receiver = star.X
			}
			if generic, ok := receiver.(*ast.IndexExpr); ok {
				receiver = generic.X
			}
			if id, ok := receiver.(*ast.Ident); ok {
				name = id.Name + "." + name
			}
		}
		names = append(names, name)
	}
	return names, nil
}

var (
	metricName = regexp.MustCompile(`tandem_[a-z]+[a-z_]*[a-z]\b`)
	// histogramSeries ends the names of a histogram's series.
	histogramSeries = regexp.MustCompile(`_(bucket|sum|count)$`)

	eventName  = regexp.MustCompile("events? ((?:`[A-Z][A-Za-z]+`(?:, | and | or )?)+)")
	quotedName = regexp.MustCompile("`([A-Za-z]+)`")
)

// sourcePath is a Go file with its directory.
var sourcePath = regexp.MustCompile("`([a-z][\\w./-]*/[\\w.-]+\\.go)`")

// TestPagesNameExistingFiles: Go files that pages name with a directory exist.
func TestPagesNameExistingFiles(t *testing.T) {
	for _, page := range texts(t) {
		if filepath.Ext(page) != ".md" {
			continue
		}
		data, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range sourcePath.FindAllStringSubmatch(string(data), -1) {
			if _, err := os.Stat(path[1]); err != nil {
				t.Errorf("%s names %s: %v", page, path[1], err)
			}
		}
	}
}

// TestPagesNameWhatExists: metrics and events that pages for users name are in the code.
func TestPagesNameWhatExists(t *testing.T) {
	var code strings.Builder
	for _, f := range sources(t) {
		if !f.test && (strings.HasPrefix(f.pkg, "pkg/") || strings.HasPrefix(f.pkg, "cmd/") || strings.HasPrefix(f.pkg, "cli/") || strings.HasPrefix(f.pkg, "internal/")) {
			code.WriteString(f.text)
		}
	}
	pages := slices.DeleteFunc(texts(t), func(path string) bool { return !strings.HasPrefix(path, "docs/user/") || filepath.Ext(path) != ".md" })
	if len(pages) == 0 {
		t.Fatal("there are no pages")
	}
	for _, page := range append(pages, "README.md", "deployments/helm/tandem/README.md", "deployments/helm/tandem/templates/prometheusrule.yaml") {
		data, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, name := range metricName.FindAllString(string(data), -1) {
			names = append(names, histogramSeries.ReplaceAllString(name, ""))
		}
		for _, events := range eventName.FindAllStringSubmatch(string(data), -1) {
			for _, event := range quotedName.FindAllStringSubmatch(events[1], -1) {
				names = append(names, event[1])
			}
		}
		for _, name := range names {
			if !strings.Contains(code.String(), `"`+name+`"`) {
				t.Errorf("%s names %s, which is not in the code", page, name)
			}
		}
	}
}

// texts are the paths of all text files of the repository that people write.
func texts(t *testing.T) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if name := entry.Name(); path != "." && (name == ".git" || name == "bin" || name == ".cache") {
				return fs.SkipDir
			}
			return nil
		}
		if slices.Contains([]string{".go", ".md", ".yaml", ".tpl", ".sh", ".txt"}, filepath.Ext(path)) || entry.Name() == "Makefile" {
			found = append(found, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// tried matches what a page says of how it was tested.
var tried = regexp.MustCompile(`(?i)\bnot\s+tried\b|\btried with\b`)

// TestPagesSayWhatWasTried: a page that tells what to set in another project says in its first lines whether it was tried.
func TestPagesSayWhatWasTried(t *testing.T) {
	found := 0
	for _, path := range texts(t) {
		dir := filepath.Dir(path)
		if dir != "docs/user/platforms" && dir != "docs/user/with" || filepath.Base(path) == "README.md" {
			continue
		}
		found++
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(string(data), "\n")
		if !tried.MatchString(strings.Join(lines[:min(len(lines), 8)], "\n")) {
			t.Errorf("%s does not say in its first lines whether it was tried", path)
		}
	}
	if found == 0 {
		t.Error("there is no such page")
	}
}
