// SPDX-License-Identifier: Apache-2.0

package mutation

import (
	"strings"
	"testing"
)

func TestReading(t *testing.T) {
	const (
		sub      = `{"Action":"fail","Package":"` + module + `/pkg/ledger","Test":"TestA/b"}`
		parent   = `{"Action":"fail","Package":"` + module + `/pkg/ledger","Test":"TestA"}`
		whole    = `{"Action":"fail","Package":"` + module + `/pkg/ledger"}`
		passed   = `{"Action":"pass","Package":"` + module + `/pkg/mig","Test":"TestC"}`
		timedOut = `{"Action":"output","Package":"` + module + `/pkg/ledger","Test":"TestA","Output":"panic: test timed out after 10m0s\n"}`
		text     = `{"ImportPath":"` + module + `/pkg/ledger","Action":"build-output","Output":"claim.go:1:1: undefined: x\n"}`
		build    = `{"ImportPath":"` + module + `/pkg/ledger","Action":"build-fail"}`
	)
	for _, c := range []struct {
		name   string
		events []string
		found  Found
		err    string
	}{
		{"the first test counts", []string{passed, sub, parent, whole}, Found{"TestA/b", "./pkg/ledger"}, ""},
		{"all tests passed", []string{passed}, Found{}, "no test failed"},
		{"no test ran", []string{whole}, Found{}, "no test failed"},
		{"a test hung", []string{passed, timedOut, parent, whole}, Found{}, "did not end"},
		{"it does not compile", []string{text, build, whole, passed}, Found{}, "undefined: x"},
		{"no events", []string{"go: no such tool"}, Found{}, "read the output"},
	} {
		t.Run(c.name, func(t *testing.T) {
			found, err := read(strings.NewReader(strings.Join(c.events, "\n")))
			if found != c.found || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("found %+v, %v; want %+v, %q", found, err, c.found, c.err)
			}
		})
	}
}
