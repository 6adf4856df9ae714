// SPDX-License-Identifier: Apache-2.0

package simnode_test

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/pkg/nvml"
	"github.com/tandem-gpu/tandem/simulated/simnode"
)

func TestProfileThatCannotBeLoaded(t *testing.T) {
	for _, profile := range []string{"", "none"} {
		options := simnode.Options(nvml.Options{Host: nvml.Host{Library: simnode.Library + profile}}, "")
		if _, err := options.OpenLibrary(); err == nil || !strings.Contains(err.Error(), "load simulated machine") {
			t.Errorf("profile %q: %v", profile, err)
		}
	}
}

func TestOtherLibrariesAreKept(t *testing.T) {
	for _, library := range []string{"", nvml.Auto, "/lib/libnvidia-ml.so.1"} {
		options := simnode.Options(nvml.Options{Host: nvml.Host{Library: library}}, "seed")
		if options.OpenLibrary != nil || options.Library != library || options.DriverRoot != "" {
			t.Errorf("library %q: %+v", library, options)
		}
	}
}
