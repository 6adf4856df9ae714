// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"

	"github.com/tandem-gpu/tandem/hack/install"
)

// values installs with others than usual until the story ends.
func (s *story) values(values ...string) {
	s.Helper()
	if err := install.Tandem(s.ctx, theCluster, install.Options{Values: append(slices.Clone(installValues), values...)}); err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() {
		if err := install.Tandem(s.ctx, theCluster, install.Options{Values: installValues}); err != nil {
			s.Error(err)
		}
	})
}
