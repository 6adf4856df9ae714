// SPDX-License-Identifier: Apache-2.0

package stories

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"testing"
)

// ModuleDir downloads a module (path@version) that is no dependency of ours, outside of the checkout, whose go.sum it would add to.
func ModuleDir(t testing.TB, module string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "mod", "download", "-json", module)
	cmd.Dir, cmd.Env = t.TempDir(), append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	out, err := cmd.Output()
	SkipUnreachable(t, out)
	var answer struct{ Dir string }
	if err != nil || json.Unmarshal(out, &answer) != nil {
		t.Fatalf("download %s: %v\n%s", module, err, out)
	}
	return answer.Dir
}

// SkipUnreachable skips the test if the output of the go command says that a module cannot be downloaded here.
func SkipUnreachable(t testing.TB, out []byte) {
	t.Helper()
	if bytes.Contains(out, []byte("dial tcp")) || bytes.Contains(out, []byte("server response")) {
		t.Skipf("a module cannot be downloaded:\n%s", out)
	}
}
