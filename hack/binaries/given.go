// SPDX-License-Identifier: Apache-2.0

package binaries

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// givenVariable names a directory with programs that were built before, and their hashes in the file SHA256SUMS. A component is not built if
// the directory has all of its programs.
const givenVariable = "TANDEM_PROGRAMS"

// given reports whether the directory of given programs has those of a component. It has none for a Tool: one may be for an image, and for
// another architecture.
func given(c component) bool {
	dir := os.Getenv(givenVariable)
	return dir != "" && c.module != "" && c.found != nil && complete(dir, c)
}

// take copies the programs of a component from $TANDEM_PROGRAMS to out. If the directory lacks one of them, it returns false and copies
// nothing.
func (b builder) take(ctx context.Context, c component, out string) (bool, error) {
	if !given(c) {
		return false, nil
	}
	dir := os.Getenv(givenVariable)
	sums, err := readSums(filepath.Join(dir, "SHA256SUMS"))
	if err != nil {
		return false, err
	}
	if err := os.Mkdir(out, 0o755); err != nil {
		return false, fmt.Errorf("create directory: %w", err)
	}
	var problems []error
	for _, program := range c.packages {
		for _, name := range program.names {
			problems = append(problems, takeProgram(ctx, filepath.Join(dir, name), filepath.Join(out, name), sums[name], c.version))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return false, err
	}
	b.progress.Say("%s %s: taken from %s", c.name, c.version, dir)
	return true, nil
}

// readSums reads what sha256sum writes, by the name of the file.
func readSums(path string) (map[string]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read hashes: %w", err)
	}
	sums := map[string]string{}
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) == 2 {
			sums[strings.TrimPrefix(fields[1], "*")] = fields[0]
		}
	}
	return sums, nil
}

// takeProgram copies a program. It fails if the program has another hash than sum, or if the copy reports another version.
func takeProgram(ctx context.Context, from, to, sum, version string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("read program: %w", err)
	}
	if got := fmt.Sprintf("%x", sha256.Sum256(data)); got != sum {
		return fmt.Errorf("%s has the hash %s, but SHA256SUMS says %q", from, got, sum)
	}
	if err := os.WriteFile(to, data, 0o755); err != nil {
		return fmt.Errorf("copy program: %w", err)
	}
	ask := []string{"--version"}
	switch filepath.Base(from) {
	case "kubectl":
		ask = []string{"version", "--client"}
	case "containerd-shim-runc-v2":
		ask = []string{"-v"}
	case "helm":
		ask = []string{"version", "--short"}
	}
	said, err := exec.CommandContext(ctx, to, ask...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ask %s for its version: %w: %s", from, err, said)
	}
	if wanted := regexp.MustCompile(`(^|[^0-9.])` + regexp.QuoteMeta(strings.TrimPrefix(version, "v")) + `([^0-9.+-]|$)`); !wanted.Match(said) {
		return fmt.Errorf("%s is not of version %s: it says %q", from, version, strings.TrimSpace(string(said)))
	}
	return nil
}
