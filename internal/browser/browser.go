// SPDX-License-Identifier: Apache-2.0

// Package browser runs a real browser for tests of kubectl gpu's page. Only tests import it.
package browser

import (
	"errors"
	"html"
	"os"
	"os/exec"
	"regexp"
	"strings"
)

// Program is the browser, of Debian's package of that name.
const Program = "chromium"

// ErrMissing says how to install the browser.
var ErrMissing = errors.New("there is no chromium: make deps installs it on Debian")

// Find returns ErrMissing if there is no browser.
func Find() error {
	if _, err := exec.LookPath(Program); err != nil {
		return ErrMissing
	}
	return nil
}

// Args returns the arguments for a browser without a window, with a directory for its files. Its clock advances ten seconds while it waits
// for nothing, so that the page's timers run at once.
func Args(dir string, more ...string) []string {
	args := []string{"--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr", "--user-data-dir=" + dir,
		"--virtual-time-budget=10000"}
	if os.Geteuid() == 0 { // its sandbox refuses root
		args = append(args, "--no-sandbox")
	}
	return append(args, more...)
}

// Complaints returns what a page's scripts and its security policy have reported, from the browser's standard error.
func Complaints(stderr string) (lines []string) {
	for line := range strings.Lines(stderr) {
		if strings.Contains(line, "CONSOLE") {
			lines = append(lines, line)
		}
	}
	return lines
}

// row is a device in the page.
var row = regexp.MustCompile(`<th scope="row"[^>]*>([^<]*)</th><td>([^<]*)</td><td data-state="(\w+)">[^<]*</td><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td>`)

// Devices returns the devices of the page, each with name, model, state, share, holders and reason. The page is what the server sends, or the
// document that a browser prints.
func Devices(page string) (found [][]string) {
	for _, match := range row.FindAllStringSubmatch(page, -1) {
		var cells []string
		for _, cell := range match[1:] {
			cells = append(cells, html.UnescapeString(cell))
		}
		found = append(found, cells)
	}
	return found
}
