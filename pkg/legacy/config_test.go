// SPDX-License-Identifier: Apache-2.0

package legacy

import (
	"os"
	"strings"
	"testing"
)

func TestNew(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Config)
		want   []string // parts of the error, none for success
	}{
		"complete":                   {func(*Config) {}, nil},
		"directory with a long path": {func(c *Config) { c.Directory = "/" + strings.Repeat("x", 90) }, []string{"exceed the 107 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, release137)
			test.change(&f.config)
			p, err := New(f.config)
			if (err == nil) != (len(test.want) == 0) {
				t.Fatalf("got %v", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q is not in %q", want, err)
				}
			}
			if err == nil && p.Ready() == nil {
				t.Error("ready before Run")
			}
			entries, err := os.ReadDir(f.dir)
			if err != nil || len(entries) != 0 {
				t.Errorf("New left %v behind, %v", entries, err)
			}
		})
	}
}
