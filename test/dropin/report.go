// SPDX-License-Identifier: Apache-2.0

package dropin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// resultsVariable names the directory for results of tests, of which hack/dropin.sh makes the last line of make dropin.
const resultsVariable = "DROPIN_RESULTS"

// Report logs a result, "key=value key=value", and leaves it for the last line of make dropin if the environment names a directory for
// results. A test of this package or of test/e2e calls it once, at its end. Numbers of several tests under one key are added.
func Report(t *testing.T, format string, args ...any) {
	t.Helper()
	result := fmt.Sprintf(format, args...)
	t.Log(result)
	dir := os.Getenv(resultsVariable)
	if dir == "" {
		return
	}
	err := os.MkdirAll(dir, 0o750)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, strings.ReplaceAll(t.Name(), "/", "-")), []byte(result+"\n"), 0o600)
	}
	if err != nil {
		t.Errorf("leave the result for make dropin: %v", err)
	}
}
