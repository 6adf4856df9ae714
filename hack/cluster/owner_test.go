// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/hack/progress"
)

// TestOwnedDirEndsWithItsProcess starts itself as the process that is killed.
func TestOwnedDirEndsWithItsProcess(t *testing.T) {
	const (
		variable = "TANDEM_TEST_OWNER"
		prefix   = "tandem-test-"
	)
	if os.Getenv(variable) != "" {
		dir := must(OwnedDir(t.Context(), prefix, nil))
		config := Config{Dir: filepath.Join(dir, "cluster"), NoNodes: true}
		if err := errors.Join(os.Mkdir(config.Dir, 0o755), config.complete(), config.save()); err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString(dir + "\n")
		select {}
	}
	t.Setenv("TMPDIR", t.TempDir())
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), variable+"=1")
	cmd.Stderr = t.Output()
	output := must(cmd.StdoutPipe())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	theirs := strings.TrimSpace(must(bufio.NewReader(output).ReadString('\n')))
	mine := must(OwnedDir(t.Context(), prefix, nil))
	if _, err := os.Stat(filepath.Join(theirs, "cluster", configFile)); err != nil {
		t.Fatalf("the directory of a process that runs: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	var said progress.Tail
	if _, err := OwnedDir(t.Context(), prefix, &said); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(theirs); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory of a killed process: %v", err)
	}
	if !strings.Contains(said.String(), theirs) {
		t.Errorf("removed without a word: %q", said.String())
	}
	if _, err := os.Stat(mine); err != nil {
		t.Errorf("my own directory: %v", err)
	}
}
